"""What the functions of FlashAttention-2 and FlashAttention-3 do with caches of keys and values, on top of
:func:`tessera.append` and :func:`tessera.cached_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.compat._descales import E4M3, CacheFactors
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
    """The window in force beside `causal`, -1 where there is no limit, or one of at least `most_left` or `most_right`,
    which upstream takes for none, or where `causal` is closer. Whether a window is left decides on the positions of
    rotated queries."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size = {window_size!r}: must be a pair (left, right), negative for no limit"
        ) from None
    left, right = (-1 if size < 0 or size >= most else size for size, most in ((left, most_left), (right, most_right)))
    return left, -1 if causal else right


def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    window: tuple[int, int],
    causal: bool = False,
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
    factors: CacheFactors | None = None,
    qv: Tensor | None = None,
) -> Any:
    """(o, lse), or o alone, over the cache, after k and v have been appended to it where they are given. Outside
    autograd.

    Args:
        cache_seqlens: the slots that are filled before the append, of type int32; None: all of them, which needs k to
            be None.
        window, causal: the window beside `causal`, of :func:`window_of` or (-1, -1); or one that knows of it already.
        cu_seqlens_k_new: where sequences begin in packed k and v; without these it is not looked at.
        softmax_scale, softcap, alibi_slopes, out, return_lse: as :func:`tessera.cached_attention` takes them.
        factors: of a cache of e4m3, :func:`factors_of_cache`. Beside it q may be e4m3, too; k and v are of q's type
            then, and are copied, or else are divided by the factors and rounded.
        qv: as :func:`tessera.cached_attention` takes it.
    """
    copies = False  # elements, not values
    if factors is not None:
        copies = k is not None and q.dtype is E4M3
        q, k, v = (_widened(name, x, q.dtype) for name, x in (("q", q), ("k", k), ("v", v)))
    elif q.dtype in FLOAT8 or not q.dtype is k_cache.dtype is v_cache.dtype:
        refuse_float8(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    max_seqlen_q = None if cu_seqlens_q is None else _bound(q, cu_seqlens_q.shape[0] - 1, max_seqlen_q)
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    # The library's own functions, by position: keywords cost a microsecond.
    seqlens, lengths, cu_seqlens_new, constant_q = cache_seqlens, "after", None, False
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
        if rotary_cos is None:
            rotary_sin = rotary_seqlens = None
        else:
            constant_q = not causal and window == (-1, -1) and chunk == 0
        if (cu_seqlens_q is None) == (cu_seqlens_k_new is None) and not copies:
            lengths, cu_seqlens_new = "before", cu_seqlens_k_new
        else:
            q, k_cache, v_cache, k, v = (x.detach() for x in (q, k_cache, v_cache, k, v))
            scales = (None, None) if factors is None else factors
            if copies:
                one = torch.ones((), device=q.device)
                scales = (one, one)
            rotates = rotary_cos is not None
            rotated = cache.append(
                k, v, k_cache, v_cache, cache_seqlens, "before", cu_seqlens_k_new, None, page_table, cache_index, None,
                q if rotates else None, cu_seqlens_q if rotates else None, max_seqlen_q if rotates else None,
                rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, None, constant_q, *scales,
            )  # fmt: skip
            # A negative length stays one.
            added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            seqlens = torch.where(cache_seqlens < 0, cache_seqlens, cache_seqlens + added)
            q = q if rotated is None else rotated
            k = v = rotary_cos = rotary_sin = rotary_seqlens = None
    k_scale, v_scale = (None, None) if factors is None else factors
    return cache.cached_attention(
        q, k_cache, v_cache, seqlens, lengths, None, cu_seqlens_new, page_table, cache_index, leftpad, cu_seqlens_q,
        max_seqlen_q, causal, window, chunk, 0, None, softmax_scale, softcap, alibi_slopes, None, False, k, v, None,
        rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, constant_q, out, return_lse, True,
        k_scale, v_scale, qv,
    )  # fmt: skip


def _widened(name: str, x: Tensor | None, dtype: torch.dtype) -> Any:
    """What stands beside a cache of float8, in bfloat16 if it is float8, too: exactly."""
    if x is None:
        return None
    if x.dtype is not dtype:
        raise ValueError(f"{name}.dtype = {x.dtype}, but q.dtype = {dtype}: they must be the same")
    return x.bfloat16() if dtype is E4M3 else x


def _bound(q: Tensor, batch: int, max_seqlen_q: int | None) -> int | None:
    """Of the queries' lengths. Rows of no sequence, which a GPU leaves alone, must fit into it as well."""
    return None if max_seqlen_q is None else max(max_seqlen_q, -(-q.shape[0] // max(batch, 1)))
