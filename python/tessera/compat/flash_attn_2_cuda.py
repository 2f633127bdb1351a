"""The four functions of upstream's extension module ``flash_attn_2_cuda``, on which its Python functions are built.

Some projects call them directly, with upstream's positional arguments. Conventions, shapes and errors are those of
:mod:`tessera.compat.flash_attn.flash_attn_interface`; there is no autograd here. In spite of the name they run on the
CPU, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tessera.torch
from tessera.compat._attention import (
    Keywords,
    packed_keywords,
    row_products,
    score_keywords,
    without_autocast,
)
from tessera.compat._caches import attend_with_cache, capacity_of, window_of
from tessera.compat._dropout_matrix import dropout_matrix
from tessera.compat._refusals import refuse, refuse_float8
from tessera.torch.ops import draw_rng_state
from tessera.torch.tensors import rows


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any = None,
) -> list[Tensor]:
    """Dense forward pass: [out, lse, S_dmask, rng_state].

    Args:
        out: where to write the result, or None.
        return_softmax: S_dmask is computed, else of no elements; needs dropout.
        generator: must be None.

    Raises:
        RuntimeError: `generator` is given. Upstream's words for it.
    """
    window = window_size_left, window_size_right
    keywords = attention_keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _forward(q, k, v, out, keywords, return_softmax, generator)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any = None,
    num_splits: int = 0,
) -> list[Tensor]:
    """Packed forward pass: [out, lse, S_dmask, rng_state]; arguments as in :func:`fwd`, and

    Args:
        seqused_k: int32 (batch), how many keys of each sequence are used; not with dropout, and with slopes only if
            `block_table` is given.
        block_table: int32 (batch, blocks): k and v are (num_blocks, block_size, num_heads_k, head_dim), and the blocks
            of a sequence hold its keys; cu_seqlens_k or `seqused_k` says how many. Not with dropout.
        leftpad_k: int32 (batch), at which key of its blocks a sequence begins; only with `block_table`.
        zero_tensors: tokens that belong to no sequence get o = 0 instead of anything.
        num_splits: accepted; the library decides itself how to split keys.

    Raises:
        NotImplementedError: an argument is given that must not be.
    """
    window = window_size_left, window_size_right
    if zero_tensors:
        out = q.new_zeros(q.shape[:-1] + v.shape[-1:]) if out is None else out.zero_()
    if block_table is not None:
        _refuse_generator(generator)
        out, lse = attend_blocks(
            q, k, v, cu_seqlens_q, cu_seqlens_k.diff() if seqused_k is None else seqused_k, block_table, max_seqlen_q,
            dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, leftpad_k, out,
        )  # fmt: skip
        return [out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device="cpu")]
    refuse("varlen_fwd without block_table", leftpad_k=leftpad_k)
    if seqused_k is not None:  # its pieces would count as sequences of their own
        refuse("varlen_fwd with seqused_k", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    keywords = attention_keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    keywords |= packed_keywords(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    return _forward(q, k, v, out, keywords, return_softmax, generator)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Dense backward pass: [dq, dk, dv, softmax_d].

    Args:
        softmax_lse: with -inf or +inf in empty rows.
        dq, dk, dv: where to write the gradients, or None.
        generator: must be None.
        rng_state: what the forward pass returned.

    Returns:
        The gradients, and softmax_d: float32 (batch, heads, seqlen_q rounded up to 128), the sum over columns of
        dout * out * (1 - dropout_p), 0 in the added rows.
    """
    window = window_size_left, window_size_right
    keywords = attention_keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    keywords["rng_state"] = rng_state
    gradients = _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, keywords, generator)
    softmax_d = (1.0 - dropout_p) * row_products(dout, out)
    return [*gradients, torch.nn.functional.pad(softmax_d, (0, -q.shape[1] % 128))]


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Packed backward pass: [dq, dk, dv, softmax_d]; arguments as in :func:`bwd`, and

    Args:
        zero_tensors: tokens that belong to no sequence get gradients 0 instead of anything.

    Returns:
        As :func:`bwd`; softmax_d is (heads, total_q + 128 * batch) with the tokens at its start.
    """
    window = window_size_left, window_size_right
    keywords = attention_keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    keywords |= packed_keywords(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    keywords["rng_state"] = rng_state
    if zero_tensors:
        dq, dk, dv = (torch.zeros_like(x) if dx is None else dx.zero_() for x, dx in ((q, dq), (k, dk), (v, dv)))
    gradients = _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, keywords, generator)
    softmax_d = (1.0 - dropout_p) * row_products(dout, out)
    return [*gradients, torch.nn.functional.pad(softmax_d, (0, 128 * (cu_seqlens_q.shape[0] - 1)))]


def attention_keywords(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> Keywords:
    """FlashAttention-2's arguments as Tessera's. With dropout, the state of its random numbers is drawn here."""
    if softcap > 0.0 and dropout_p > 0.0:
        raise NotImplementedError(f"softcap = {softcap} with dropout_p = {dropout_p}: one of the two must be 0")
    keywords = score_keywords(softmax_scale, causal, window_size, softcap, deterministic)
    keywords["alibi_slopes"] = alibi_slopes
    keywords["dropout_p"] = dropout_p
    keywords["rng_state"] = draw_rng_state() if dropout_p > 0.0 else None
    return keywords


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqlens: Tensor, block_table: Tensor, max_seqlen_q: int,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None, leftpad_k: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse with +inf in empty rows) of packed queries over blocks of keys; without gradients.

    Args:
        seqlens: int32 (batch), how many keys each sequence has.
    """
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p = {dropout_p} with block_table: must be 0, blocks have no dropout")
    capacity = capacity_of(k, block_table)
    out, lse = attend_with_cache(
        q, k, v, None, None, cache_seqlens=seqlens, causal=causal,
        window=window_of(causal, window_size, capacity, capacity), leftpad=leftpad_k, page_table=block_table,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, softcap=max(softcap, 0.0),
        alibi_slopes=alibi_slopes, out=out,
    )  # fmt: skip
    return out, infinite_lse(lse)


def infinite_lse(lse: Tensor) -> Tensor:
    """lse with FlashAttention-2's +inf in empty rows, where Tessera has -inf."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, keywords: Keywords, return_softmax: bool, generator: Any
) -> list[Tensor]:
    _refuse_generator(generator)
    if return_softmax and keywords["rng_state"] is None:
        raise ValueError("return_softmax is True, but dropout_p = 0: there is a matrix only with dropout_p > 0")
    refuse_float8(q=q, k=k, v=v)
    with without_autocast(q):
        q, k, v = rows(q), rows(k), rows(v)
        out, lse, _ = tessera.torch.forward(q, k, v, out=out, **keywords)
        matrix = dropout_matrix(q, k, keywords) if return_softmax else q.new_empty(0)
    state = keywords["rng_state"]
    return [out, infinite_lse(lse), matrix, torch.zeros(2, dtype=torch.int64, device="cpu") if state is None else state]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, keywords: Keywords, generator: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse_generator(generator)
    refuse_float8(q=q, k=k, v=v)
    with without_autocast(q):
        q, k, v, out = rows(q), rows(k), rows(v), rows(out)
        return tessera.torch.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **keywords)


def _refuse_generator(generator: Any) -> None:
    if generator is not None:
        raise RuntimeError("the `generator` argument is no longer supported: seed torch's CPU generator instead")
