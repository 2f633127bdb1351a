"""What the functions of FlashAttention-2 and FlashAttention-3 do with caches of keys and values, on top of
:func:`tessera.append` and :func:`tessera.cached_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.compat._refusals import FLOAT8, refuse_float8
from tessera.torch import cache


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Slots of a sequence."""
    shape = k_cache.shape
    if len(shape) != 4:
        raise ValueError(
            f"k_cache has shape {tuple(shape)}: must be (batch, seqlen, heads, head_dim), or (num_pages, "
            "page_size, heads, head_dim) with a table of pages"
        )
    return shape[1] if page_table is None else shape[1] * page_table.shape[-1]


def window_of(causal: bool, window_size: Sequence[int], most_left: int, most_right: int) -> tuple[int, int]:
    """The window in force, -1 where there is no limit, or one of at least `most_left` or `most_right`, which upstream
    takes for none. Whether a window is left decides on the positions of rotated queries."""
    if window_size == (-1, -1):  # nearly always, and faster
        return -1, 0 if causal else -1
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size = {window_size!r}: must be a pair (left, right), negative for no limit"
        ) from None
    left, right = (-1 if size < 0 or size >= most else size for size, most in ((left, most_left), (right, most_right)))
    return left, 0 if causal else right


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
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = True,
) -> Any:
    """(o, lse), or o alone, over the cache, after k and v have been appended to it where they are given. Outside
    autograd.

    Args:
        cache_seqlens: the slots that are filled before the append, of type int32; None: all of them, which needs k to
            be None.
        window: of :func:`window_of`.
        cu_seqlens_k_new: where sequences begin in packed k and v; without these it is not looked at.
        softmax_scale, softcap, alibi_slopes, out, return_lse: as :func:`tessera.cached_attention` takes them.
    """
    if q.dtype in FLOAT8 or not q.dtype is k_cache.dtype is v_cache.dtype:
        refuse_float8(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if torch.is_grad_enabled():
        q, k_cache, v_cache = (x.detach() if x.requires_grad else x for x in (q, k_cache, v_cache))
        k, v = (x if x is None or not x.requires_grad else x.detach() for x in (k, v))
    max_seqlen_q = None if cu_seqlens_q is None else _bound(q, cu_seqlens_q.shape[0] - 1, max_seqlen_q)
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    # The library's own functions, by position: keywords cost a microsecond.
    seqlens, lengths, seqlen_new, cu_seqlens_new = cache_seqlens, "after", None, None
    if k is None:
        if v is not None:
            raise ValueError("k is None, but v is given: both or neither")
        if rotary_cos is not None:
            raise ValueError("rotary_cos is given, but k is None: positions are those of new keys")
    elif v is None:
        raise ValueError("v is None, but k is given: both or neither")
    elif cache_seqlens is None:
        raise ValueError("cache_seqlens is None, but k is given: it must say behind which slots new keys go")
    else:
        rotates = rotary_cos is not None
        rotated = cache.append(
            k, v, k_cache, v_cache, cache_seqlens, "before", cu_seqlens_k_new, None, page_table, cache_index, None,
            q if rotates else None, cu_seqlens_q if rotates else None, max_seqlen_q if rotates else None,
            rotary_cos, rotary_sin if rotates else None, rotary_interleaved, rotary_seqlens if rotates else None, None,
            rotates and window == (-1, -1) and chunk == 0,
        )  # fmt: skip
        if rotated is not None:
            q = rotated
        if cu_seqlens_q is None and cu_seqlens_k_new is None:
            lengths, seqlen_new = "before", k.shape[1]
        elif cu_seqlens_q is not None and cu_seqlens_k_new is not None:
            lengths, cu_seqlens_new = "before", cu_seqlens_k_new
        else:
            # A negative length stays one.
            added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            seqlens = torch.where(cache_seqlens < 0, cache_seqlens, cache_seqlens + added)
    return cache.cached_attention(
        q, k_cache, v_cache, seqlens, lengths, seqlen_new, cu_seqlens_new, page_table, cache_index, leftpad,
        cu_seqlens_q, max_seqlen_q, False, window, chunk, 0, None, softmax_scale, softcap, alibi_slopes, None, False,
        out, return_lse,
    )  # fmt: skip


def _bound(q: Tensor, batch: int, max_seqlen_q: int | None) -> int | None:
    """Of the queries' lengths. Rows of no sequence, which a GPU leaves alone, must fit into it as well."""
    return None if max_seqlen_q is None else max(max_seqlen_q, -(-q.shape[0] // max(batch, 1)))
