"""Caches of keys and values as objects: what a layer keeps, `KVCache`, and what all layers share, `CachedSequences`.

Rule S13 of docs/semantics.md says what they mean; every call is one `tessera.append` or `tessera.cached_attention`, by
position, since keywords cost microseconds.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import cache


def _to_device(numbers: Tensor, target: Tensor) -> None:
    """One copy, which the host does not wait for."""
    if target.is_cuda:
        numbers = numbers.pin_memory()  # torch keeps this memory until the copy is done
    target.copy_(numbers, non_blocking=True)


def _check_integers(name: str, x: Tensor | None, dim: int, shape: str, *dtypes: torch.dtype) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__!r}: must be a torch tensor")
    if x.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: must be {shape}")
    if x.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}.dtype = {str(x.dtype).removeprefix('torch.')}: must be {accepted}")


@dataclasses.dataclass(eq=False)
class CachedSequences:
    """Where the sequences of a batch lie in the caches of all layers, and how long they are.

    Everything lies on the device and stays where it is, so a CUDA graph may be replayed after `assign` and `advance`.

    Attributes:
        seqlens: int32 (batch,), the filled slots of each sequence. A negative one is no sequence: nothing is appended
            to it, and its queries get o = 0 and lse = -inf. None: all slots are filled, and nothing can be appended.
        page_table: int32 or int64 (batch, pages): slot s of a sequence is slot s % page_size of page
            page_table[b, s // page_size]. What is beyond the length may be anything. None: a sequence is a row.
        cache_index: int32 (batch,): sequence b has row cache_index[b] of `page_table`, or of k and v; None: row b.
        leftpad: int32 (batch,): the keys of a sequence begin at that slot. Lengths count slots.
        lengths: what `seqlens` counts while a step runs. "before": not the step's new keys; `advance` comes behind the
            last layer. "after": these, too; `advance` comes in front of the first layer.
    """

    seqlens: Tensor | None
    page_table: Tensor | None = None
    cache_index: Tensor | None = None
    leftpad: Tensor | None = None
    lengths: Literal["before", "after"] = "before"
    # What `assign` wrote into page_table: for each row its pages, None where it did not, and the same as a tensor.
    _pages: list[list[int] | None] = dataclasses.field(default_factory=list, init=False, repr=False)
    _host_table: Tensor | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: an argument has another shape or type than above.
            TypeError: what must be a tensor is none.
        """
        if self.lengths not in ("before", "after"):
            raise ValueError(f"lengths = {self.lengths!r}: must be 'before' or 'after'")
        for name in ("seqlens", "cache_index", "leftpad"):
            _check_integers(name, getattr(self, name), 1, "(batch,)", torch.int32)
        _check_integers("page_table", self.page_table, 2, "(batch, pages of a sequence)", torch.int32, torch.int64)
        if self.page_table is not None:
            self._pages = [None] * self.page_table.shape[0]
            self._host_table = torch.full(self.page_table.shape, -1, dtype=self.page_table.dtype)

    @classmethod
    def paged(
        cls,
        batch: int,
        pages: int,
        *,
        device: torch.device | str | None = None,
        lengths: Literal["before", "after"] = "before",
    ) -> "CachedSequences":
        """A batch of no sequences yet, with a page table that `assign` fills.

        Args:
            batch: how many sequences there may be at once.
            pages: how many pages one of them may have.
            device: the caches'.
            lengths: as above.
        """
        return cls(
            torch.full((batch,), -1, dtype=torch.int32, device=device),
            torch.full((batch, pages), -1, dtype=torch.int32, device=device),
            lengths=lengths,
        )

    def assign(self, seqlens: Sequence[int], pages: Sequence[Sequence[int]] | None = None) -> None:
        """Says from the host what the first sequences are; the others are none from then on.

        One copy of the lengths, and one of the table if a row of it has changed. Neither waits for the device. Rows of
        the table are remembered: who writes to `page_table` himself leaves `pages` out.

        Args:
            seqlens: the lengths of the first len(seqlens) sequences, as `lengths` counts them, e.g. of a
                `PagedSequence` what it held before or after the step.
            pages: the pages of each of these; None: the table stays as it is.

        Raises:
            ValueError: there are more lengths than sequences, more pages than a row has, no table or no lengths, or
                `cache_index` picks rows of the table.
        """
        if self.seqlens is None:
            raise ValueError("seqlens is None: there are no lengths to assign")
        batch, count = self.seqlens.shape[0], len(seqlens)
        if count > batch:
            raise ValueError(f"seqlens has {count} lengths: must not be more than the {batch} sequences of the batch")
        if pages is not None:
            self._assign_pages(pages, count)
        padded = torch.full((batch,), -1, dtype=torch.int32)
        padded[:count] = torch.tensor(seqlens, dtype=torch.int32)
        _to_device(padded, self.seqlens)

    def _assign_pages(self, pages: Sequence[Sequence[int]], count: int) -> None:
        table, host = self.page_table, self._host_table
        if table is None or host is None:
            raise ValueError("pages is given, but page_table is None: the sequences are rows")
        if self.cache_index is not None:
            raise ValueError("pages is given, but cache_index picks rows of page_table: must be None")
        if len(pages) != count:
            raise ValueError(f"pages has {len(pages)} rows: must be one for each of the {count} lengths")
        for row, numbers in enumerate(pages):
            if len(numbers) > table.shape[1]:
                raise ValueError(f"pages[{row}] has {len(numbers)} pages: must not be more than {table.shape[1]}")
        changed = [row for row, numbers in enumerate(pages) if self._pages[row] != numbers]
        for row in changed:
            self._pages[row] = list(pages[row])
            host[row, : len(pages[row])] = torch.tensor(self._pages[row], dtype=host.dtype)
        if changed:
            _to_device(host[:count], table[:count])

    def advance(self, added: int | Tensor) -> None:
        """Lengths grow on the device; negative ones stay. Nothing waits, and a CUDA graph may capture it.

        Args:
            added: slots, the same for all sequences, or int32 (batch,) on the device, e.g. cu_seqlens_new.diff().

        Raises:
            ValueError: there are no lengths.
        """
        if self.seqlens is None:
            raise ValueError("seqlens is None: there are no lengths to advance")
        self.seqlens.add_((self.seqlens >= 0) * added)

    def first(self, count: int) -> "CachedSequences":
        """The first `count` sequences: a view, whose lengths and pages are these here, also after `assign` on either.

        Raises:
            ValueError: there are not so many.
        """
        # By hand: torch.compile does not look into copy.copy in every version.
        view = object.__new__(CachedSequences)
        for name in ("page_table", "lengths", "_pages", "_host_table"):
            setattr(view, name, getattr(self, name))
        for name in ("seqlens", "page_table", "cache_index", "leftpad"):
            x = getattr(self, name)
            # With an index any sequence may have any row of the table.
            if x is not None and not (name == "page_table" and self.cache_index is not None):
                if not 0 <= count <= x.shape[0]:
                    raise ValueError(f"count = {count}: must lie in [0, {x.shape[0]}], the sequences of the batch")
                x = x[:count]
            setattr(view, name, x)
        return view


class KVCache:
    """Keys and values of one layer, which `CachedSequences` finds in it; outside autograd.

    Attributes:
        k: (rows, capacity, num_heads_k, head_dim), or pages: (num_pages, page_size, num_heads_k, head_dim). Any
            strides, the last one 1.
        v: the same with head_dim_v, and strides of its own.
        k_scale, v_scale: float32, iff k and v are of 8 bits (float8_e4m3fn or int8), what their elements are multiplied
            by: one number; (batch, num_heads_k), a number for each sequence and head; or k's shape without head_dim, a
            number for each slot and head, which appending writes. The others are read by it: they must be there before.

    Both may be parts of one tensor, e.g. `KVCache(*pages.unbind(1))` of (num_pages, 2, page_size, num_heads_k,
    head_dim), and may have heads outside slots, e.g. `x.transpose(1, 2)` of (rows, num_heads_k, capacity, head_dim).
    """

    def __init__(self, k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None):
        """
        Raises:
            ValueError: k and v have other shapes, other types, or a last stride that is not 1; scales are missing where
                they have 8 bits, or given where they have not.
            TypeError: one of them is no tensor.
        """
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} is of type {type(x).__name__!r}: must be a torch tensor")
            if x.dim() != 4:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: must be (rows or pages, slots, heads, head_dim)")
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise ValueError(f"{name} has strides {x.stride()}: the last one must be 1")
        if k.shape[:3] != v.shape[:3]:
            shape = (*k.shape[:3], v.shape[3])
            raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: must be {shape}")
        if (k.dtype, k.device) != (v.dtype, v.device):
            raise ValueError(f"v is of {v.dtype} on {v.device}, but k is of {k.dtype} on {k.device}: must be the same")
        scaled = k.dtype in (torch.float8_e4m3fn, torch.int8)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scaled and not isinstance(scale, Tensor):
                raise ValueError(f"{name} is None, but k is of {k.dtype}: caches of 8 bits have scales, in float32")
            if not scaled and scale is not None:
                raise ValueError(f"{name} is given, but k is of {k.dtype}: only caches of 8 bits have scales")
        self.k, self.v, self.k_scale, self.v_scale = k, v, k_scale, v_scale

    def append(
        self,
        k_new: Tensor,
        v_new: Tensor,
        sequences: CachedSequences,
        *,
        cu_seqlens_new: Tensor | None = None,
        max_seqlen_new: int | None = None,
        q: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        rotary_seqlens: Tensor | None = None,
        rotary_constant_q: bool = False,
    ) -> Tensor | None:
        """Writes new keys and values into the slots that `sequences.lengths` names, in place.

        With "before" a sequence's new rows go behind its length, with "after" they are the last that it counts.

        Args:
            k_new: (batch, seqlen_new, num_heads_k, head_dim), or packed (total_new, num_heads_k, head_dim) with
                `cu_seqlens_new`. Of the cache's type; if that has 8 bits, of any other, and quantised.
            v_new: the same with head_dim_v.
            sequences: where they go. Left padding changes nothing here: lengths count slots.
            q, cu_seqlens_new, ...: as `tessera.append` takes them.

        Returns:
            The rotated q, or None without q.

        Raises: as `tessera.append`.
        """
        return cache.append(
            k_new, v_new, self.k, self.v, sequences.seqlens, sequences.lengths, cu_seqlens_new, max_seqlen_new,
            sequences.page_table, sequences.cache_index, None, q, cu_seqlens_q, max_seqlen_q, rotary_cos, rotary_sin,
            rotary_interleaved, rotary_seqlens, None, rotary_constant_q, self.k_scale, self.v_scale,
        )  # fmt: skip

    def write(
        self,
        k_new: Tensor,
        v_new: Tensor,
        slot_mapping: Tensor,
        *,
        q: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        rotary_positions: Tensor | None = None,
    ) -> Tensor | None:
        """Writes new keys and values into slots that are named one by one, in place.

        Args:
            k_new: (total_new, num_heads_k, head_dim), of the cache's type, or quantised as by `append`. Scales by head
                are (1, num_heads_k) then.
            v_new: the same with head_dim_v.
            slot_mapping: int64 (total_new,): page * page_size + slot, or row * capacity + slot; -1 is nowhere.
            q: queries to rotate, (total_q, num_heads, head_dim).
            rotary_positions: int32 or int64, the position of row i of q and of row i of k_new.
            rotary_cos, ...: as `tessera.append` takes them.

        Returns:
            The rotated q, or None without q.

        Raises: as `tessera.append`.
        """
        return cache.append(
            k_new, v_new, self.k, self.v, None, "before", None, None, None, None, slot_mapping, q, None, None,
            rotary_cos, rotary_sin, rotary_interleaved, None, rotary_positions, False, self.k_scale, self.v_scale,
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        sequences: CachedSequences,
        *,
        seqlen_new: int | None = None,
        cu_seqlens_new: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        chunk: int = 0,
        sink_tokens: int = 0,
        tree_mask: Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        batch_invariant: bool = False,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        max_seqlen_new: int | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        rotary_seqlens: Tensor | None = None,
        rotary_constant_q: bool = False,
        out: Tensor | None = None,
        return_lse: bool = False,
        qv: Tensor | None = None,
        skip_pages: bool = False,
        prefix_levels: int = 0,
    ) -> Any:
        """Attention of queries over what the cache holds of their sequences, new keys among it: append first, or give
        them here, which is one call for both.

        Args:
            q: (batch, seqlen_q, num_heads, head_dim), or packed (total_q, num_heads, head_dim) if `cu_seqlens_q` is
                given. Of the cache's type.
            sequences: whose keys each sequence of queries sees.
            seqlen_new: with lengths "before" and dense q, how many keys were appended that `seqlens` does not count;
                None: as many as `k_new` has, or as there are queries. With "after" 0 or None.
            cu_seqlens_new: with lengths "before" and packed q, int32 (batch + 1,), where each sequence's new keys
                begin; None: `cu_seqlens_q`, as many as there are queries.
            k_new, v_new: keys and values that are appended first, as `append` takes them.
            cu_seqlens_q, causal, qv, prefix_levels, ...: as `tessera.cached_attention` takes them.

        Returns:
            o, like q with head_dim_v; with `return_lse` (o, lse), as `tessera.attention`.

        Raises: as `tessera.cached_attention`.
        """
        if not isinstance(q, Tensor):
            raise TypeError(f"q is of type {type(q).__name__!r}: must be a torch tensor")
        lengths: str = sequences.lengths
        if sequences.seqlens is None:
            lengths = "full"
        elif lengths == "before":
            if cu_seqlens_new is None:
                cu_seqlens_new = cu_seqlens_q
            if seqlen_new is None and k_new is None and cu_seqlens_q is None and q.dim() == 4:
                seqlen_new = q.shape[1]
        return cache.cached_attention(
            q, self.k, self.v, sequences.seqlens, lengths, seqlen_new, cu_seqlens_new, sequences.page_table,
            sequences.cache_index, sequences.leftpad, cu_seqlens_q, max_seqlen_q, causal, window, chunk, sink_tokens,
            tree_mask, softmax_scale, softcap, alibi_slopes, sink, batch_invariant, k_new, v_new, max_seqlen_new,
            rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, rotary_constant_q, out, return_lse, False,
            self.k_scale, self.v_scale, qv, skip_pages, prefix_levels,
        )  # fmt: skip

    def copy_pages(self, copies: Tensor) -> None:
        """Copies whole pages, keys and values, as `PagedSequence.extend` asks for: before any append of the step.

        Every source is read before any target is written.

        Args:
            copies: int64 (copies, 2) on the device: source and target, pages of this layer.

        Raises:
            ValueError: copies has another shape or type.
            IndexError: on a CPU, there is no such page.
        """
        _check_integers("copies", copies, 2, "(copies, 2)", torch.int64)
        if copies.shape[1] != 2:
            raise ValueError(f"copies has shape {tuple(copies.shape)}: must be (copies, 2)")
        source, target = copies.unbind(1)
        for x in (self.k, self.v):
            # Bytes: not every torch indexes types of 8 bits.
            x = x.view(torch.uint8) if x.element_size() == 1 else x
            x[target] = x[source]
        for scale in (self.k_scale, self.v_scale):
            if scale is not None and scale.dim() == 3:
                scale[target] = scale[source]
