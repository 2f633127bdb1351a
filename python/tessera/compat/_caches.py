"""What the functions of FlashAttention-2 and FlashAttention-3 do with caches of keys and values, on top of
:func:`tessera.append` and :func:`tessera.cached_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tessera
from tessera.compat._refusals import refuse_float8


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Slots of a sequence."""
    if k_cache.dim() != 4:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)}: must be (batch, seqlen, heads, head_dim), or (num_pages, "
            "page_size, heads, head_dim) with a table of pages"
        )
    return int(k_cache.shape[1] * (1 if page_table is None else page_table.shape[-1]))


def window_of(causal: bool, window_size: Sequence[int], most_left: int, most_right: int) -> tuple[int, int]:
    """The window in force, -1 where there is no limit, or one of at least `most_left` or `most_right`, which upstream
    takes for none. Whether a window is left decides on the positions of rotated queries."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size = {window_size!r}: must be a pair (left, right), negative for no limit"
        ) from None
    left, right = (-1 if size < 0 or size >= most else size for size, most in ((left, most_left), (right, most_right)))
    return left, 0 if causal else right


@torch.no_grad()
def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    cache_seqlens: int | Tensor | None,
    window: tuple[int, int],
    chunk: int = 0,
    cache_index: Tensor | None = None,
    leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    **scores: Any,
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the cache, after k and v have been appended to it where they are given.

    Args:
        cache_seqlens: the slots that are filled before the append; None: all of them, which needs k to be None.
        window: of :func:`window_of`.
        cu_seqlens_k_new: where sequences begin in packed k and v; without these it is not looked at.
        scores: further arguments of :func:`tessera.cached_attention`.
    """
    refuse_float8(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{missing} is None, but {given} is given: both or neither")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos is given, but k is None: positions are those of new keys")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    place: dict[str, Any] = {"page_table": page_table, "cache_index": cache_index}
    queries: dict[str, Any] = {}
    if cu_seqlens_q is not None:
        queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": _bound(q, batch, max_seqlen_q)}
    lengths: dict[str, Any] = {"seqlens": cache_seqlens}
    if k is not None:
        assert v is not None
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is None, but k is given: it must say behind which slots new keys go")
        rotary: dict[str, Any] = {}
        if rotary_cos is not None:
            rotary = {
                "q": q,
                **queries,
                "rotary_cos": rotary_cos,
                "rotary_sin": rotary_sin,
                "rotary_seqlens": rotary_seqlens,
                "rotary_interleaved": rotary_interleaved,
                "rotary_constant_q": window == (-1, -1) and chunk == 0,
            }
        rotated = tessera.append(
            k, v, k_cache, v_cache, seqlens=cache_seqlens, cu_seqlens_new=cu_seqlens_k_new, **place, **rotary
        )
        q = q if rotated is None else rotated
        lengths = _lengths_with(cache_seqlens, k, cu_seqlens_k_new, cu_seqlens_q is None)
    out, lse = tessera.cached_attention(
        q, k_cache, v_cache, **lengths, **place, **queries, leftpad=leftpad, window=window, chunk=chunk, **scores,
        return_lse=True,
    )  # fmt: skip
    return out, lse


def _bound(q: Tensor, batch: int, max_seqlen_q: int | None) -> int | None:
    """Of the queries' lengths. Rows of no sequence, which a GPU leaves alone, must fit into it as well."""
    return None if max_seqlen_q is None else max(max_seqlen_q, -(-q.shape[0] // max(batch, 1)))


def _lengths_with(seqlens: Tensor, k: Tensor, cu_seqlens_k_new: Tensor | None, dense: bool) -> dict[str, Any]:
    """How many keys there are once k is among them; a negative length stays one."""
    if cu_seqlens_k_new is None and dense:
        return {"seqlens": seqlens, "lengths": "before", "seqlen_new": k.shape[1]}
    added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    return {"seqlens": torch.where(seqlens < 0, seqlens, seqlens + added)}
