"""Attention over caches of keys and values, and appends to them, for torch tensors; outside autograd.

As in `ops`, the custom ops `tessera::cached_forward` and `tessera::append` are called where somebody watches
(torch.compile, torch.export, dispatch modes), otherwise the library itself.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _native
from ..arguments import band
from .ops import (
    FRAMEWORK,
    WATCH,
    empty_lse,
    is_compiling,
    is_transformed,
    is_watched,
    longest_of,
    outputs,
    require_tensors,
)  # fmt: skip
from .tensors import refuse_gradients, rows, signed

_library = torch.library.Library("tessera", "FRAGMENT")
_library.define(
    "cached_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? cu_seqlens_q, Tensor? seqlens, Tensor? cu_seqlens_new, Tensor? page_table, Tensor? cache_index, "
    "Tensor? leftpad, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, Tensor? qv, SymInt? max_seqlen_q, "
    "str lengths, SymInt? seqlen_new, float? softmax_scale, float softcap, SymInt window_left, SymInt window_right, "
    "SymInt chunk, SymInt sink_tokens, bool batch_invariant, bool skip_pages, SymInt prefix_levels) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "append(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? q, Tensor? seqlens, "
    "Tensor? cu_seqlens_new, Tensor? page_table, Tensor? cache_index, Tensor? cu_seqlens_q, Tensor? slot_mapping, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, Tensor? rotary_positions, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, str lengths, SymInt max_seqlen_q, SymInt max_seqlen_new, "
    "bool rotary_interleaved, bool rotary_constant_q) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


# Looked up once: every call asks.
_is_plain = _native.is_plain

# What has gradients.
_INSTEAD = ", or tessera.attention"


def _need_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@torch.library.impl(_library, "cached_forward", "CompositeExplicitAutograd")
def _forward_op(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    o, lse = outputs(q, v_cache)
    _native.cached_forward(q, k_cache, v_cache, o, lse, *more, FRAMEWORK)
    return o, lse


@torch.library.register_fake("tessera::cached_forward", lib=_library)
def _forward_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return outputs(q, v_cache)


def _packed_length(cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int | None:
    if cu_seqlens_q is not None:
        return longest_of("q", cu_seqlens_q, max_seqlen_q)
    if max_seqlen_q is not None:
        raise ValueError("max_seqlen_q is given, but cu_seqlens_q is None: packed queries need cu_seqlens_q")
    return None


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor | None,
    lengths: str,
    seqlen_new: int | None,
    cu_seqlens_new: Tensor | None,
    page_table: Tensor | None,
    cache_index: Tensor | None,
    leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    causal: bool,
    window: tuple[int, int],
    chunk: int,
    sink_tokens: int,
    tree_mask: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    batch_invariant: bool,
    k_new: Tensor | None,
    v_new: Tensor | None,
    max_seqlen_new: int | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    rotary_seqlens: Tensor | None,
    rotary_constant_q: bool,
    out: Tensor | None,
    return_lse: bool,
    detaches: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    qv: Tensor | None = None,
    skip_pages: bool = False,
    prefix_levels: int = 0,
) -> Any:
    """`tessera.cached_attention`. A few microseconds are all it may take: docs/python.md has them.

    detaches: tensors that require a gradient are taken for what they hold, instead of refused.
    """
    is_traced = False
    if is_compiling() or not _is_plain(WATCH, q, k_cache, v_cache, k_new, v_new, sink, qv):
        is_traced = is_watched(q) or is_transformed()
        require_tensors(
            k_cache=k_cache, v_cache=v_cache, seqlens=seqlens, cu_seqlens_new=cu_seqlens_new, page_table=page_table,
            cache_index=cache_index, leftpad=leftpad, cu_seqlens_q=cu_seqlens_q, tree_mask=tree_mask,
            alibi_slopes=alibi_slopes, sink=sink, k_new=k_new, v_new=v_new, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens, out=out, k_scale=k_scale, v_scale=v_scale, qv=qv,
        )  # fmt: skip
        if _need_gradients(q, k_cache, v_cache, sink, k_new, v_new, qv):
            if detaches:
                q, k_cache, v_cache = q.detach(), k_cache.detach(), v_cache.detach()
                k_new, v_new, qv = (None if x is None else x.detach() for x in (k_new, v_new, qv))
            refuse_gradients(
                "cached_attention", "" if qv is not None else _INSTEAD, q=q, k_cache=k_cache, v_cache=v_cache,
                sink=sink, k_new=k_new, v_new=v_new, qv=qv,
            )  # fmt: skip
        if not is_traced:
            q = q.resolve_neg()
            if k_new is not None:
                _check_written(k_cache, v_cache)
            k_cache, v_cache, k_new, v_new, qv = (signed(x) for x in (k_cache, v_cache, k_new, v_new, qv))
    if k_new is None or v_new is None:
        if not (k_new is v_new is rotary_cos is rotary_sin is rotary_seqlens is None) or max_seqlen_new is not None:
            _refuse_rows(
                k_new=k_new, v_new=v_new, max_seqlen_new=max_seqlen_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                rotary_seqlens=rotary_seqlens,
            )  # fmt: skip
    elif seqlen_new is not None:
        raise ValueError(f"seqlen_new = {seqlen_new} is given, but k_new is, too, which says how many there are")
    elif is_traced:
        rotates = rotary_cos is not None
        rotated = append(
            k_new, v_new, k_cache, v_cache, seqlens, lengths, cu_seqlens_new, max_seqlen_new, page_table, cache_index,
            None, q if rotates else None, cu_seqlens_q if rotates else None, max_seqlen_q if rotates else None,
            rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, None, rotary_constant_q, k_scale, v_scale,
        )  # fmt: skip
        q = q if rotated is None else rotated
        if lengths != "before":
            cu_seqlens_new = None  # lengths count the new keys
        elif k_new.dim() == 4:
            seqlen_new = k_new.shape[1]
    if cu_seqlens_q is not None or max_seqlen_q is not None:
        max_seqlen_q = _packed_length(cu_seqlens_q, max_seqlen_q)
    if is_traced and qv is not None:
        qv = rows(qv.resolve_neg())
    left, right = (-1, 0 if causal else -1) if window == (-1, -1) else band(causal, window)
    more = (
        alibi_slopes, sink, cu_seqlens_q, seqlens, cu_seqlens_new, page_table, cache_index, leftpad, tree_mask,
        k_scale, v_scale, qv, max_seqlen_q, lengths, seqlen_new, softmax_scale, softcap, left, right, chunk,
        sink_tokens, batch_invariant, skip_pages, prefix_levels,
    )  # fmt: skip
    if is_traced:
        q, k_cache, v_cache = rows(q.resolve_neg()), k_cache.resolve_neg(), v_cache.resolve_neg()
        o, lse = torch.ops.tessera.cached_forward(q, k_cache, v_cache, *more)
        o = o if out is None else out.copy_(o)
        return (o, lse) if return_lse else o
    lse = empty_lse(q) if return_lse else None
    if k_new is None or v_new is None:
        o = _native.cached_forward(q, k_cache, v_cache, out, lse, *more, FRAMEWORK)
    else:
        if max_seqlen_new is None:
            max_seqlen_new = 0 if cu_seqlens_new is None else k_new.shape[0]  # no sequence has more
        q_out = None
        if rotary_cos is not None and rotary_sin is not None:
            q_out = _like_rows(q)
            rotary_cos, rotary_sin = signed(rotary_cos), signed(rotary_sin)
        o = _native.cached_step(
            k_new, v_new, q_out, rotary_cos, rotary_sin, rotary_seqlens, max_seqlen_new, rotary_interleaved,
            rotary_constant_q, q, k_cache, v_cache, out, lse, *more, FRAMEWORK,
        )  # fmt: skip
    return (o, lse) if return_lse else o


def explain_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, device: str | None, tensors: dict[str, Any], numbers: dict[str, Any]
) -> str:
    """`tessera.explain_cached`: its arguments that must be tensors or None, and the others."""
    require_tensors(k_cache=k_cache, v_cache=v_cache, **tensors)
    numbers["max_seqlen_q"] = _packed_length(tensors["cu_seqlens_q"], numbers["max_seqlen_q"])
    left, right = band(numbers.pop("causal"), numbers.pop("window"))
    numbers |= {"window_left": left, "window_right": right}
    names = ("alibi_slopes", "sink", "cu_seqlens_q", "seqlens", "cu_seqlens_new", "page_table", "cache_index",
             "leftpad", "tree_mask", "k_scale", "v_scale", "qv", "max_seqlen_q", "lengths", "seqlen_new",
             "softmax_scale", "softcap", "window_left", "window_right", "chunk", "sink_tokens",
             "batch_invariant", "skip_pages", "prefix_levels")  # fmt: skip
    given = tensors | numbers
    return _native.explain_cached(q, k_cache, v_cache, None, None, *(given[name] for name in names), device)


def _refuse_rows(**given: Any) -> None:
    """What comes with new rows, where there are none, or one half of them."""
    missing = next(name for name in ("k_new", "v_new") if given[name] is None)
    name = next(name for name, x in given.items() if x is not None)
    raise ValueError(f"{name} is given, but {missing} is None: new rows have both, or there is nothing about them")


def _check_written(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.is_neg():
            raise ValueError(f"{name} has torch's negative bit, so it cannot be written: must not, e.g. {name}.clone()")


def _like_rows(q: Tensor) -> Tensor:
    """Where rotated queries go."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _append(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, q: Tensor | None, more: tuple[Any, ...]
) -> Tensor | None:
    """The rotated queries, if there are queries."""
    q_out = None if q is None else _like_rows(q)
    _native.append(k_new, v_new, k_cache, v_cache, q, q_out, *more, FRAMEWORK)
    return q_out


@torch.library.impl(_library, "append", "CompositeExplicitAutograd")
def _append_op(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, q: Tensor | None, *more: Any) -> Tensor:
    _check_written(k_cache, v_cache)
    q_out = _append(k_new, v_new, k_cache, v_cache, q, more)
    return k_new.new_empty(0) if q_out is None else q_out


@torch.library.register_fake("tessera::append", lib=_library)
def _append_fake(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, q: Tensor | None, *more: Any
) -> Tensor:
    return k_new.new_empty(0) if q is None else _like_rows(q)


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor | None,
    lengths: str,
    cu_seqlens_new: Tensor | None,
    max_seqlen_new: int | None,
    page_table: Tensor | None,
    cache_index: Tensor | None,
    slot_mapping: Tensor | None,
    q: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    rotary_seqlens: Tensor | None,
    rotary_positions: Tensor | None,
    rotary_constant_q: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | None:
    """`tessera.append`. As short as `cached_attention`."""
    is_traced = False
    if is_compiling() or not _is_plain(WATCH, k_cache, v_cache, k_new, v_new, q):
        is_traced = is_watched(k_cache) or is_transformed()
        require_tensors(
            k_new=k_new, v_new=v_new, v_cache=v_cache, seqlens=seqlens, cu_seqlens_new=cu_seqlens_new,
            page_table=page_table, cache_index=cache_index, slot_mapping=slot_mapping, q=q, cu_seqlens_q=cu_seqlens_q,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
            rotary_positions=rotary_positions, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        if _need_gradients(k_new, v_new, k_cache, v_cache, q):
            refuse_gradients("append", _INSTEAD, k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache, q=q)
        if not is_traced:
            _check_written(k_cache, v_cache)
            k_new, v_new, q = signed(k_new), signed(v_new), signed(q)
    longest_q = 0 if cu_seqlens_q is None else longest_of("q", cu_seqlens_q, max_seqlen_q)
    if max_seqlen_new is None:
        max_seqlen_new = 0 if cu_seqlens_new is None else k_new.shape[0]  # no sequence has more
    if is_traced:  # compilers cannot trace the look at a sign
        k_new, v_new = rows(k_new.resolve_neg()), rows(v_new.resolve_neg())
        q = None if q is None else rows(q.resolve_neg())
        if rotary_cos is not None and rotary_sin is not None:
            rotary_cos, rotary_sin = rows(rotary_cos.resolve_neg()), rows(rotary_sin.resolve_neg())
    elif rotary_cos is not None:
        rotary_cos, rotary_sin = signed(rotary_cos), signed(rotary_sin)
    more = (
        seqlens, cu_seqlens_new, page_table, cache_index, cu_seqlens_q, slot_mapping, rotary_cos, rotary_sin,
        rotary_seqlens, rotary_positions, k_scale, v_scale, lengths, longest_q, max_seqlen_new, rotary_interleaved,
        rotary_constant_q,
    )  # fmt: skip
    if is_traced:
        q_out = torch.ops.tessera.append(k_new, v_new, k_cache, v_cache, q, *more)
        return None if q is None else q_out
    return _append(k_new, v_new, k_cache, v_cache, q, more)
