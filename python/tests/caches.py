"""Caches of keys and values for tests: at random, and what they mean in plain torch, in double."""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import reference


class Cache(NamedTuple):
    """k and v as functions take them. Pages of a sequence are in random order, and some pages serve nobody."""

    k: Tensor  # (rows, capacity, heads, head_dim), or (num_pages, page_size, heads, head_dim)
    v: Tensor
    page_table: Tensor | None  # (rows, pages), -1 where a sequence has none
    capacity: int

    def clone(self) -> "Cache":
        return self._replace(k=self.k.clone(), v=self.v.clone())

    def slots(self, row: int) -> Tensor:
        """Indices of a sequence's slots among all rows of k.flatten(0, 1), -1 where there is no page."""
        at = torch.arange(self.capacity)
        if self.page_table is None:
            return row * self.capacity + at
        size = self.k.shape[1]
        pages = self.page_table[row].cpu().long()[at // size]
        return torch.where(pages < 0, -1, pages * size + at % size)


def random_cache(
    rows: int, capacity: int, page_size: int | None, heads: int, dims: tuple[int, int], dtype: torch.dtype, device: str,
    page_ids: torch.dtype = torch.int32,
) -> Cache:  # fmt: skip
    """Capacity is rounded up to whole pages."""
    if page_size is None:
        k, v = (torch.randn(rows, capacity, heads, d, device=device, dtype=dtype) for d in dims)
        return Cache(k, v, None, capacity)
    pages = -(-capacity // page_size)
    order = torch.randperm(rows * pages + 3)[: rows * pages].view(rows, pages)
    # Keys and values side by side, as engines have them: v has the strides of a part of a larger tensor.
    both = torch.randn(rows * pages + 3, page_size, heads, sum(dims), device=device, dtype=dtype)
    return Cache(both[..., : dims[0]], both[..., dims[0] :], order.to(device, page_ids), pages * page_size)


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(rows, heads, head_dim) by one position a row, in double."""
    half = cos.shape[-1]
    c, s = (table[position.to(table.device)].double()[:, None] for table in (cos, sin))
    x = x.double().clone()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half)
    )  # fmt: skip
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def attend(
    q: Tensor,
    cache: Cache,
    sequences: list[tuple[slice | int, int, int, int]],
    *,
    chunk: int = 0,
    sink_tokens: int = 0,
    tree_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.double,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """o like q and lse (batch, heads, rows), packed (heads, total).

    Args:
        sequences: of each its rows of q (a slice of packed ones, or an index), its row of the cache, its first slot,
            and the slot behind its last one, at most the first for a sequence without keys.
        dtype: in which everything is computed.
    """
    results = []
    for b, (rows, row, first, end) in enumerate(sequences):
        at = cache.slots(row)[first : max(first, end)].to(q.device)
        k, v = (x.flatten(0, 1)[at].to(dtype)[None] for x in (cache.k, cache.v))
        x = q[rows].to(dtype)[None]
        queries, keys = x.shape[1], k.shape[1]
        more = dict(options)
        if alibi_slopes is not None:
            more["alibi_slopes"] = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=q.device)
        j = torch.arange(keys, device=q.device)[None]
        p = torch.arange(queries, device=q.device)[:, None] + keys - queries
        left, right = more.pop("window", (-1, -1))
        right = 0 if more.pop("causal", False) else right
        if right >= 0:
            hidden |= j > p + right
        if chunk > 0:
            hidden |= j >= (p.div(chunk, rounding_mode="floor") + 1) * chunk
        far = torch.zeros_like(hidden)
        if left >= 0:
            far |= j < p - left
        if chunk > 0:
            far |= j < p.div(chunk, rounding_mode="floor") * chunk
        hidden |= far & (j >= sink_tokens)
        if tree_mask is not None:
            bit = j - (keys - queries)
            seen = tree_mask[rows].to(q.device)[:, None] >> bit.clamp(min=0) & 1
            hidden |= (bit >= 0) & (seen == 0)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=q.device).masked_fill(hidden, -torch.inf)
        results.append(reference.dense(x, k, v, bias=bias, **more))
    if sequences and isinstance(sequences[0][0], slice):
        return torch.cat([o[0] for o, _ in results]), torch.cat([lse[0] for _, lse in results], -1)
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


def random_lengths(batch: int, most: int, device: str) -> Tensor:
    """int32, up to `most`, among them a full one; rarely none."""
    lengths = [random.randint(0, most) for _ in range(batch)]
    lengths[random.randrange(batch)] = most
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def check_close(
    result: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor], rotated: bool = False
) -> None:
    """o by the criterion of `reference`, and lse of float32. Of rotated queries a number may be rounded to the other
    side, which moves a score by a few units of it."""
    reference.assert_output_close(result[0], exact[0], plain[0])
    unit = torch.finfo(result[0].dtype).eps
    reference.assert_close("lse", result[1], exact[1], exact[1], floor=2e-5 + 2 * unit * rotated)
