"""What the functions of FlashAttention-2 and FlashAttention-3 share, on top of :mod:`tessera.torch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tessera
import tessera.torch
from tessera.compat._descales import Factors
from tessera.compat._refusals import refuse_float8
from tessera.torch.ops import is_transformed, is_watched
from tessera.torch.tensors import rows

# Keyword arguments of tessera.attention, tessera.torch.forward and tessera.torch.backward.
Keywords = dict[str, Any]

# Views of a packed tensor: k and v, or q, k and v.
Split = Callable[[Tensor], Sequence[Tensor]]


def score_keywords(
    softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float, deterministic: bool
) -> Keywords:
    """The arguments that both versions have. Upstream takes any negative number for "no limit", and with `causal` any
    right end for 0."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size = {window_size!r}: must be a pair (left, right), negative for no limit"
        ) from None
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": (max(left, -1), 0 if causal else max(right, -1)),
        "softcap": max(softcap, 0.0),
        "deterministic": deterministic,
    }


def packed_keywords(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Keywords:
    """The arguments of packed tensors. Where only a part of a sequence is used, it is cut into pieces, on the device.

    Of sequence i, queries s...e and keys t...f (ends excluded), the first uq and uk are used. Its pieces are

        queries   s...s+uq   s+uq...e   e...e
        keys      t...t+uk   t+uk...t+uk   t+uk...f

    so that unused queries see no key (their result is 0, their lse -inf) and nobody sees unused keys. The second piece
    exists only with `seqused_q`, the third only with `seqused_k`.

    Args:
        q, k: (total, ...). On a GPU they may have tokens at the end that belong to no sequence and are left alone.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1).
        max_seqlen_q, max_seqlen_k: upper bounds of the sequences' lengths; None on a CPU only. With `seqused_q` or
            `seqused_k` bounds of what is used are enough on a CPU. On a GPU, where lengths cannot be read without
            waiting, unused tokens beyond a bound that is too low get an undefined result.
        seqused_q, seqused_k: integers (batch), at most the sequences' lengths: ValueError on a CPU otherwise. On a GPU
            they are not read: results of wrong ones are undefined.
    """
    used = (("q", seqused_q, cu_seqlens_q), ("k", seqused_k, cu_seqlens_k))
    for name, count, cu_seqlens in used:
        if count is not None:
            _check_used(f"seqused_{name}", count, cu_seqlens)
    max_seqlen_q = _bound(q, cu_seqlens_q, max_seqlen_q, seqused_q is not None)
    max_seqlen_k = _bound(k, cu_seqlens_k, max_seqlen_k, seqused_k is not None)
    if seqused_q is not None or seqused_k is not None:
        start_q, end_q, start_k, end_k = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
        used_k = end_k if seqused_k is None else start_k + seqused_k.to(torch.int32)
        starts_q, starts_k = [start_q], [start_k]
        if seqused_q is not None:
            starts_q.append(start_q + seqused_q.to(torch.int32))
            starts_k.append(used_k)
        if seqused_k is not None:
            starts_q.append(end_q)
            starts_k.append(used_k)
        cu_seqlens_q = torch.cat((torch.stack(starts_q, dim=1).flatten(), cu_seqlens_q[-1:]))
        cu_seqlens_k = torch.cat((torch.stack(starts_k, dim=1).flatten(), cu_seqlens_k[-1:]))
    batch = max(cu_seqlens_q.shape[0] - 1, 1)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        # Tokens of no sequence, if any, must fit into the bounds as well.
        "max_seqlen_q": None if max_seqlen_q is None else max(max_seqlen_q, -(-q.shape[0] // batch)),
        "max_seqlen_k": None if max_seqlen_k is None else max(max_seqlen_k, -(-k.shape[0] // batch)),
    }


def _check_used(name: str, used: Tensor, cu_seqlens: Tensor) -> None:
    """What can be said of `seqused_q` or `seqused_k` without waiting for a device."""
    if not isinstance(used, Tensor):
        raise TypeError(f"{name} is of type {type(used).__name__!r}: must be a tensor of int32")
    if used.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}.dtype = {used.dtype}: must be int32")
    batch = cu_seqlens.shape[0] - 1
    if used.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(used.shape)}: must be ({batch},), (batch,)")
    if used.device != cu_seqlens.device:
        raise ValueError(f"{name} is on {used.device}: must be on {cu_seqlens.device}, where the sequences are")
    if used.device.type == "cpu" and not is_watched(used):
        for i, (count, length) in enumerate(zip(used.tolist(), cu_seqlens.diff().tolist(), strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"{name}[{i}] = {count}: must lie in [0, {length}], the sequence's length")


def _bound(x: Tensor, cu_seqlens: Tensor, longest: int | None, cut: bool) -> int | None:
    """The bound of the lengths; of whole sequences where they are cut and the caller's may be of what is used only."""
    if longest is None or not cut or cu_seqlens.device.type != "cpu":
        return longest
    if is_watched(cu_seqlens):
        return x.shape[0]
    return max(longest, int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Upstream computes in the type that it is given, whatever autocast says."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def attend(
    q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, return_lse: bool, factors: Factors | None = None
) -> tuple[Tensor, Tensor | None]:
    """Differentiable attention: o, and lse with -inf in empty rows or None. factors: of float8 tensors, which have no
    gradients, and an o of bfloat16."""
    result: Any
    if factors is not None:
        keywords = {name: value for name, value in keywords.items() if name != "deterministic"}  # of gradients
        result = tessera.scaled_attention(rows(q), rows(k), rows(v), *factors, return_lse=return_lse, **keywords)
    else:
        refuse_float8(q=q, k=k, v=v)
        with without_autocast(q):
            q, k, v = rows(q), rows(k), rows(v)
            if "qv" in keywords:
                keywords = keywords | {"qv": rows(keywords["qv"])}
            result = tessera.attention(q, k, v, return_lse=return_lse, **keywords)
    out, lse = result if return_lse else (result, None)
    return out, lse


def attend_packed(
    q: Tensor | None, packed: Tensor, split: Split, keywords: Keywords, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend` over k and v, or q, k and v, that are views of one tensor, whose gradient is one tensor too.

    Args:
        q: None if `packed` holds the queries as well.
        packed: what `split` makes views of.
    """
    refuse_float8(q=q, **{"qkv" if q is None else "kv": packed})
    if is_watched(packed) or is_transformed() or not (torch.is_grad_enabled() and packed.requires_grad):
        # Without gradients there is nothing to join, and what compilers and transforms see must be operators.
        return attend(*operands(q, packed, split), keywords, return_lse)
    with without_autocast(packed):
        q = None if q is None else rows(q)
        out, lse = _PackedAttention.apply(q, rows(packed), split, keywords)
    return out, lse if return_lse else None


def operands(q: Tensor | None, packed: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    parts = split(packed)
    expected = 3 if q is None else 2
    if len(parts) != expected:
        name = "qkv" if q is None else "kv"
        raise ValueError(f"{name} has shape {tuple(packed.shape)}: must be (..., {expected}, heads, head_dim)")
    q, k, v = parts if q is None else (q, *parts)
    return q, k, v


class _PackedAttention(torch.autograd.Function):
    """Attention that writes the gradients of packed operands side by side, where autograd would copy them together."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, packed: Tensor, split: Split, keywords: Keywords) -> tuple[Tensor, Tensor]:
        out, lse, rng_state = tessera.torch.forward(*operands(q, packed, split), **keywords)
        ctx.set_materialize_grads(False)
        ctx.split = split
        # Tensors go through save_for_backward, which notices if somebody changes them in between.
        ctx.keywords = {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in keywords.items() if isinstance(value, Tensor)}
        tensors["rng_state"] = rng_state
        ctx.names = list(tensors)
        ctx.save_for_backward(q, packed, out, lse, *tensors.values())
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True; gradients without a graph would be taken for constants
            raise NotImplementedError(
                "packed attention has no second derivatives: its gradients cannot be differentiated"
            )
        q, packed, out, lse, *tensors = ctx.saved_tensors
        keywords = ctx.keywords | dict(zip(ctx.names, tensors, strict=True))
        dout = torch.zeros_like(out) if dout is None else dout
        dq = None if q is None else q.new_empty(q.shape)
        dpacked = packed.new_empty(packed.shape)
        q, k, v = operands(q, packed, ctx.split)
        to_q, to_k, to_v = operands(dq, dpacked, ctx.split)
        tessera.torch.backward(dout, q, k, v, out, lse, dlse=dlse, dq=to_q, dk=to_k, dv=to_v, **keywords)
        return dq, dpacked, None, None


def row_products(dout: Tensor, out: Tensor) -> Tensor:
    """sum over columns of dout * out, float32: (batch, seqlen, heads, head_dim_v) to (batch, heads, seqlen); packed
    (total, heads, head_dim_v) to (heads, total)."""
    return (dout.float() * out).sum(dim=-1).transpose(-1, -2).contiguous()
