"""``memory_efficient_attention`` and its relatives; :mod:`tessera.compat.xformers.ops.fmha` says what is what."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import tessera
import tessera.torch
from tessera.compat._attention import Keywords, attend, packed_keywords, without_autocast
from tessera.compat._refusals import refuse_float8, refuse_gradients
from tessera.compat.xformers.ops.fmha import attn_bias as biases
from tessera.compat.xformers.ops.fmha._seqlens import _GappySeqInfo, _PaddedSeqLenInfo
from tessera.compat.xformers.ops.fmha.attn_bias import AttentionBias
from tessera.compat.xformers.ops.fmha.common import AnyOp
from tessera.torch.tensors import rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Classes of their own in somebody's code may mean anything: only these are known.
_ONE_BLOCK = {
    biases.LowerTriangularMask,
    biases.LowerTriangularMaskWithTensorBias,
    biases.LowerTriangularFromBottomRightMask,
    biases.LowerTriangularFromBottomRightLocalAttentionMask,
    biases.LocalAttentionFromBottomRightMask,
}
_BLOCKS = {
    biases.BlockDiagonalMask,
    biases.BlockDiagonalCausalMask,
    biases.BlockDiagonalCausalFromBottomRightMask,
    biases.BlockDiagonalCausalLocalAttentionMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
}
_BLOCKS_OF_SOME_KEYS = {
    biases.BlockDiagonalPaddedKeysMask,
    biases.BlockDiagonalCausalWithOffsetPaddedKeysMask,
    biases.BlockDiagonalLocalAttentionPaddedKeysMask,
    biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    biases.BlockDiagonalGappyKeysMask,
    biases.BlockDiagonalCausalWithOffsetGappyKeysMask,
    biases.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask,
}
_PAGED = {
    biases.PagedBlockDiagonalPaddedKeysMask,
    biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    biases.PagedBlockDiagonalCausalLocalPaddedKeysMask,
    biases.PagedBlockDiagonalGappyKeysMask,
    biases.PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
}

Bias = Tensor | AttentionBias | None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AnyOp = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention, differentiable in query, key, value and the tensor of a bias.

    Args:
        query: (batch, seqlen_q, heads, head_dim); (batch, seqlen_q, head_dim) with one head; (batch, seqlen_q, groups,
            heads, head_dim) with groups of heads.
        key, value: with seqlen_k, in the same form; the heads of a group may be one that is expanded, which is never
            copied. value may have a head_dim of its own.
        attn_bias: what is added to the scores: None, a class of :mod:`.attn_bias`, or a tensor, of float32 or query's
            type, (batch, heads, seqlen_q, seqlen_k); (batch, groups, heads, seqlen_q, seqlen_k) with groups; (batch or
            1, seqlen_q or 1, seqlen_k or 1) with one head. What is expanded is not copied unless it needs a gradient.
        p: probability with which a weight is dropped.
        scale: None is 1 / sqrt(head_dim).
        op: accepted and without effect.
        output_dtype: None, or query's.

    Returns:
        Like query, with the columns of value.
    """
    call = _prepare(query, key, value, attn_bias, p, scale, output_dtype)
    out, _ = call.attend(False)
    return call.output(out)


@torch.no_grad()
def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AnyOp = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`memory_efficient_attention` outside autograd."""
    return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


@torch.no_grad()
def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AnyOp = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) outside autograd, for :func:`memory_efficient_attention_backward`; no dropout, as upstream.

    Returns:
        o, and lse: float32 (batch, heads, seqlen_q), or (batch, groups, heads, seqlen_q) with groups; with blocks
        (1, heads, total) or (1, groups, heads, total). -inf where a query sees no key.
    """
    _refuse_dropout("memory_efficient_attention_forward_requires_grad", p)
    call = _prepare(query, key, value, attn_bias, p, scale, output_dtype)
    out, lse = call.attend(True)
    assert lse is not None
    return call.output(out), call.output_lse(lse)


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AnyOp = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the forms of query, key and value, which an expanded head's gradient has, too.

    Args:
        grad: the gradient of output.
        output, lse: what :func:`memory_efficient_attention_forward_requires_grad` returned.
    """
    _refuse_dropout("memory_efficient_attention_backward", p)
    if isinstance(attn_bias, biases._Paged):
        raise NotImplementedError(f"attn_bias is a {type(attn_bias).__name__}: keys in pages have no gradients")
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        call = _prepare(leaves[0], leaves[1], leaves[2], attn_bias, p, scale, None, share_heads=False)
    for name, x in (("grad", grad), ("output", output)):
        if tuple(x.shape) != call.output_shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be {call.output_shape}")
    with torch.no_grad(), without_autocast(query):
        q, k, v = (rows(x) for x in (call.q, call.k, call.v))
        o_shape = (*q.shape[:-1], v.shape[-1])
        gradients = tessera.torch.backward(
            grad.reshape(o_shape), q, k, v, rows(output.reshape(o_shape)), call.kernel_lse(lse), **call.keywords
        )
    # From what the kernels were given back to what the caller gave.
    dq, dk, dv = torch.autograd.grad((call.q, call.k, call.v), leaves, gradients)
    return dq, dk, dv


class _Call(NamedTuple):
    """Operands as the kernels take them, and the shapes of what the caller gets."""

    q: Tensor
    k: Tensor
    v: Tensor
    keywords: Keywords
    output_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    cached: bool = False  # k and v are a cache, and the keywords those of cached_attention

    def attend(self, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        if not self.cached:
            return attend(self.q, self.k, self.v, self.keywords, return_lse)
        result = tessera.cached_attention(self.q, self.k, self.v, **self.keywords, return_lse=return_lse)
        return result if return_lse else (result, None)

    def output(self, out: Tensor) -> Tensor:
        return out.reshape(self.output_shape)

    def output_lse(self, lse: Tensor) -> Tensor:
        return lse.reshape(self.lse_shape)

    def kernel_lse(self, lse: Tensor) -> Tensor:
        if tuple(lse.shape) != self.lse_shape:
            raise ValueError(f"lse has shape {tuple(lse.shape)}: must be {self.lse_shape}")
        q = self.q
        return lse.reshape((q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0]))


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    p: float,
    scale: float | None,
    output_dtype: torch.dtype | None,
    share_heads: bool = True,
) -> _Call:
    """`share_heads`: an expanded head is given to the kernels once, whose gradient then counts for all of its group."""
    _check(query, key, value, attn_bias, p, output_dtype)
    keywords: Keywords = {
        "softmax_scale": scale,
        "dropout_p": p,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    groups = query.shape[2:-1]
    q = query.unsqueeze(2) if query.dim() == 3 else query.flatten(2, -2)
    k, v = _key_heads(key, value, share_heads)

    tensor = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
    if tensor is not None:
        keywords["bias"] = _kernel_bias(tensor, query, key)
    if isinstance(attn_bias, AttentionBias):
        band = attn_bias.band
        keywords["window"] = band.left, band.right
        keywords["alignment"] = "top_left" if band.top_left else "bottom_right"
    output_shape = (*query.shape[:-1], value.shape[-1])
    if isinstance(attn_bias, biases._Blocks):
        lse_shape = (1, *groups, query.shape[0] * query.shape[1])
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        _check_tokens(attn_bias, q, k)
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if p == 0.0 and not needs_gradients:
            k_cache, v_cache, place = _cache_of_blocks(attn_bias, q, k, v)
            if place:
                place |= {"softmax_scale": scale, "window": keywords["window"]}
                return _Call(rows(q), k_cache, v_cache, place, output_shape, lse_shape, cached=True)
        k, v, lengths = _block_keywords(attn_bias, q, k, v)
        return _Call(q, k, v, keywords | lengths, output_shape, lse_shape)
    if isinstance(attn_bias, biases._Paged):
        lse_shape = (1, *groups, query.shape[1])
        keywords = {"softmax_scale": scale, "window": keywords["window"]}
        keywords |= _page_keywords(attn_bias, query.shape[1], key.shape[1])
        k, v = (x[0].unflatten(0, (-1, attn_bias.page_size)) for x in (k, v))
        return _Call(rows(q[0]), rows(k), rows(v), keywords, output_shape, lse_shape, cached=True)
    lse_shape = (query.shape[0], *(groups or (1,)), query.shape[1])
    return _Call(q, k, v, keywords, output_shape, lse_shape)


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Bias, p: float, output_dtype: torch.dtype | None
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__!r}: must be a torch tensor")
    refuse_float8(query=query, key=key, value=value)
    if query.dtype not in _DTYPES:
        raise NotImplementedError(f"query.dtype = {query.dtype}: must be float32, bfloat16 or float16")
    if key.dtype == value.dtype == torch.int32 != query.dtype:
        raise NotImplementedError("key.dtype = torch.int32: Tessera has no quantised keys and values yet")
    if query.dim() not in (3, 4, 5):
        raise ValueError(
            f"query has shape {tuple(query.shape)}: must be (batch, seqlen_q, heads, head_dim), (batch, seqlen_q, "
            "head_dim) or (batch, seqlen_q, groups, heads, head_dim)"
        )
    middle = query.shape[2:-1]
    if key.dim() != query.dim() or key.shape[0] != query.shape[0] or key.shape[2:] != query.shape[2:]:
        expected = (query.shape[0], "seqlen_k", *query.shape[2:])
        raise ValueError(
            f"key has shape {tuple(key.shape)}: must be {expected}; expand its heads where they are shared"
        )
    if value.dim() != query.dim() or value.shape[:2] != key.shape[:2] or value.shape[2:-1] != middle:
        expected = (*key.shape[:2], *middle, "head_dim_v")
        raise ValueError(f"value has shape {tuple(value.shape)}: must be {expected}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(f"{name}.dtype = {x.dtype}: must be {query.dtype}, as query's")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}: must be on {query.device}, as query")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p = {p}: must lie in [0, 1)")
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError(f"output_dtype = {output_dtype}: must be None or {query.dtype}, as query's")
    _check_bias_kind(attn_bias, query)
    if isinstance(attn_bias, biases._Paged):
        name = type(attn_bias).__name__
        if p > 0.0:
            raise NotImplementedError(f"p = {p} with a {name}: must be 0, keys in pages have no dropout")
        refuse_gradients(f"memory_efficient_attention with a {name}", query=query, key=key, value=value)


def _check_bias_kind(attn_bias: Bias, query: Tensor) -> None:
    if attn_bias is None or isinstance(attn_bias, Tensor):
        return
    if not isinstance(attn_bias, AttentionBias):
        raise TypeError(
            f"attn_bias is of type {type(attn_bias).__name__!r}: must be None, a tensor, or an AttentionBias"
        )
    kind = type(attn_bias)
    if kind not in _ONE_BLOCK | _BLOCKS | _BLOCKS_OF_SOME_KEYS | _PAGED:
        raise NotImplementedError(
            f"attn_bias is a {kind.__name__}, which Tessera does not know: give what its materialize returns as a "
            "tensor, which holds a number for every pair of query and key"
        )
    if query.dim() == 3 and kind is not biases.LowerTriangularMask:
        raise ValueError(
            f"attn_bias is a {kind.__name__}, with a query of 3 dimensions: give query, key and value their heads, "
            "(batch, seqlen, heads, head_dim)"
        )
    if isinstance(attn_bias, (biases._Blocks, biases._Paged)):
        device = attn_bias.q_seqinfo.seqstart.device
        if device != query.device:
            raise ValueError(f"attn_bias is on {device}: must be on {query.device}, as query; attn_bias.to() moves it")
        if kind in _BLOCKS | _PAGED and query.shape[0] != 1:
            raise ValueError(f"query has a batch of {query.shape[0]}: must be 1, with the sequences of {kind.__name__}")


def _key_heads(key: Tensor, value: Tensor, share: bool) -> tuple[Tensor, Tensor]:
    """(batch, seqlen_k, heads, head_dim); with `share` one head for all that are the same memory."""
    if key.dim() == 3:
        return key.unsqueeze(2), value.unsqueeze(2)
    heads = key.shape[-2]
    if share and heads > 1 and key.stride(-2) == 0 and value.stride(-2) == 0:
        if key.dim() == 5:
            return key[:, :, :, 0], value[:, :, :, 0]
        return key[:, :, :1], value[:, :, :1]
    return key.flatten(2, -2), value.flatten(2, -2)


def _kernel_bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)."""
    if bias.dtype not in (torch.float32, query.dtype):
        hint = "; bias.masked_fill(~mask, -inf) of zeros hides keys" if bias.dtype == torch.bool else ""
        raise ValueError(f"attn_bias.dtype = {bias.dtype}: must be float32 or {query.dtype}, as query's{hint}")
    if bias.device != query.device:
        raise ValueError(f"attn_bias is on {bias.device}: must be on {query.device}, as query")
    expected = (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])
    given = tuple(bias.shape)
    one_head = query.dim() == 3
    if len(given) != len(expected) or any(
        n != m and not (one_head and n == 1) for n, m in zip(given, expected, strict=True)
    ):
        raise ValueError(f"attn_bias has shape {given}: must be {expected}")
    if not bias.requires_grad:
        # What is the same memory is broadcast by the kernels; a gradient has a number for every element.
        for dim, stride in enumerate(bias.stride()):
            if stride == 0:
                bias = bias.narrow(dim, 0, min(bias.shape[dim], 1))
    if one_head:
        bias = bias.unsqueeze(1)
    elif bias.dim() == 5:
        if bias.shape[1:3] != (1, 1):
            bias = bias.expand(-1, *query.shape[2:-1], -1, -1)
        bias = bias.flatten(1, 2)
    return rows(bias)


def _check_tokens(bias: biases._Blocks, q: Tensor, k: Tensor) -> None:
    """Of q and k as (total, heads, head_dim)."""
    of_k = bias.k_seqinfo
    total_q, total_k = bias.q_seqinfo.seqstart_py[-1], of_k.seqstart_py[-1]
    if q.shape[0] != total_q:
        raise ValueError(f"query has {q.shape[0]} tokens: must have {total_q}, the lengths in attn_bias together")
    used = isinstance(of_k, (_PaddedSeqLenInfo, _GappySeqInfo))
    if k.shape[0] < total_k or (k.shape[0] > total_k and not used):
        raise ValueError(f"key has {k.shape[0]} tokens: must have {total_k}, as attn_bias says")
    if isinstance(of_k, _GappySeqInfo):
        for i, (begin, end) in enumerate(of_k.intervals()):
            if end > total_k:
                raise ValueError(f"the keys {begin}...{end - 1} of block {i}: must lie within {total_k}")


def _is_in_order(info: _GappySeqInfo) -> bool:
    return all(end <= begin for (_, end), begin in zip(info.intervals(), info.seqstart_py[1:], strict=True))


# Rows of queries a key head up to which a cache is read as fast as anything else.
_FEW_ROWS = 16


def _cache_of_blocks(bias: biases._Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Keywords]:
    """k and v as a cache, and the arguments of :func:`tessera.cached_attention`; none where packed tensors do better:
    with many queries, and where keys are used whole or lie in order."""
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    count, total_k = len(of_q.seqstart_py) - 1, of_k.seqstart_py[-1]
    if count == 0 or total_k == 0 or of_q.max_seqlen * (q.shape[1] // k.shape[1]) > _FEW_ROWS:
        return k, v, {}
    keywords: Keywords = {"cu_seqlens_q": of_q.seqstart, "max_seqlen_q": max(of_q.max_seqlen, 0)}
    if isinstance(of_k, _PaddedSeqLenInfo):
        k, v = (rows(x[:total_k]).unflatten(0, (count, of_k.padding)) for x in (k, v))
        return k, v, keywords | {"seqlens": of_k.seqlen}
    if isinstance(of_k, _GappySeqInfo) and not _is_in_order(of_k):
        # Every key is a page of its own: a table of slots instead of a copy of the keys.
        k, v = (rows(x[:total_k]).unsqueeze(1) for x in (k, v))
        slots = torch.arange(max(of_k.max_seqlen, 1), dtype=torch.int32, device=k.device)
        return k, v, keywords | {"seqlens": of_k.seqlen, "page_table": of_k.seqstart[:-1, None] + slots}
    return k, v, {}


def _block_keywords(bias: biases._Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Keywords]:
    """k, v and the arguments of packed tensors; q, k and v are (total, heads, head_dim)."""
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    total_k = of_k.seqstart_py[-1]
    starts_q, starts_k = of_q.seqstart, of_k.seqstart
    longest_q, longest_k = max(of_q.max_seqlen, 0), max(of_k.max_seqlen, 0)
    seqused_k = None
    if isinstance(of_k, _PaddedSeqLenInfo):
        seqused_k, longest_k = of_k.seqlen, of_k.padding
        k, v = k[:total_k], v[:total_k]
    elif isinstance(of_k, _GappySeqInfo):
        begins = of_k.seqstart_py
        if _is_in_order(of_k):
            # In order: cut into pieces. The first one, of no queries, has the keys before the first sequence's.
            k, v = k[:total_k], v[:total_k]
            none = starts_q.new_zeros(1)
            starts_q, starts_k = torch.cat((none, starts_q)), torch.cat((none, starts_k))
            seqused_k = torch.cat((starts_k[1:2], of_k.seqlen))
            longest_k = max(b - a for a, b in zip([0, *begins[:-1]], begins, strict=True))
        else:
            starts_k, index = _gathered(of_k)
            k, v = k.index_select(0, index), v.index_select(0, index)
    return k, v, packed_keywords(q, k, starts_q, starts_k, longest_q, longest_k, seqused_k=seqused_k)


def _page_keywords(bias: biases._Paged, total_q: int, total_k: int) -> Keywords:
    """Where the sequences of a cache of pages are, for :func:`tessera.cached_attention`."""
    of_q, of_k, table, size = bias.q_seqinfo, bias.k_seqinfo, bias.block_tables, bias.page_size
    if total_q != of_q.seqstart_py[-1]:
        raise ValueError(f"query has {total_q} tokens: must have {of_q.seqstart_py[-1]}, the lengths in attn_bias")
    if size < 1 or total_k % size != 0:
        raise ValueError(f"key has {total_k} tokens: must have whole pages of attn_bias.page_size = {size}")
    count = len(of_q.seqstart_py) - 1
    if table.dim() != 2 or table.shape[0] != count:
        raise ValueError(f"attn_bias.block_tables has shape {tuple(table.shape)}: must be ({count}, pages)")
    keywords: Keywords = {
        "seqlens": of_k.seqlen,
        "page_table": table,
        "cu_seqlens_q": of_q.seqstart,
        "max_seqlen_q": max(of_q.max_seqlen, 0),
    }
    if isinstance(of_k, _GappySeqInfo):
        keywords["leftpad"] = of_k.seqstart[:-1]
    return keywords


def _gathered(info: _GappySeqInfo) -> tuple[Tensor, Tensor]:
    """cu_seqlens of the sequences one after another, and the tokens that they are made of."""
    ends = info.seqlen.cumsum(0, dtype=torch.int32)
    starts = torch.cat((ends.new_zeros(1), ends))
    total = sum(info.seqlen_py)
    shift = torch.repeat_interleave(info.seqstart[:-1] - starts[:-1], info.seqlen, output_size=total)
    return starts, shift + torch.arange(total, dtype=torch.int32, device=shift.device)


def _refuse_dropout(function: str, p: float) -> None:
    if p != 0.0:
        raise NotImplementedError(
            f"{function}: p = {p}, must be 0, as upstream; memory_efficient_attention has dropout"
        )
