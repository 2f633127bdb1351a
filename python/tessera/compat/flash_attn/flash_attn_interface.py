"""FlashAttention-2's functions on Tessera: upstream's ``flash_attn.flash_attn_interface``.

Names, order and defaults of the arguments, shapes and conventions are upstream's. Shared by all functions:

* q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_k, head_dim), v (batch, seqlen_k, num_heads_k,
  head_dim_v); "packed" or "varlen": (total, heads, head_dim) with int32 ``cu_seqlens`` (batch + 1). num_heads is a
  multiple of num_heads_k.
* ``softmax_scale``: None is 1 / sqrt(head_dim). ``window_size``: (left, right), both ends included, negative: no
  limit. ``causal`` and windows are aligned to the bottom right if seqlen_q != seqlen_k. ``softcap``: 0 is none.
  ``alibi_slopes``: float32 (num_heads) or (batch, num_heads). ``deterministic``: dq is the same bit for bit in every
  run; everything else always is.
* Functions return o, like q with v's head_dim; with ``return_attn_probs`` the tuple (o, lse, S_dmask). lse: float32
  (batch, num_heads, seqlen_q), packed (num_heads, total_q), +inf for queries that see no key (o is 0 there). S_dmask:
  without dropout a tensor of no elements; with dropout (batch, num_heads, seqlen_q, seqlen_k), lengths rounded up to
  128, exp(score - largest score of the row), negative where dropped.
* Errors are those of :func:`tessera.attention`: ValueError and NotImplementedError that name the argument. Both
  dropout and softcap at once are refused, as upstream refuses them.

What differs from upstream:

* float32 and tensors on the CPU are accepted, head dimensions above 256, and a head_dim_v that is not head_dim.
* Dropout: other random numbers, drawn from torch's CPU generator, and a probability that is rounded to 16 bits where
  upstream rounds to 8. ``rng_state`` is an int64 tensor (2) on the CPU, (seed, offset).
* S_dmask is scaled by the final maximum of each row; upstream scales every block of keys by the maximum so far. What
  upstream's tests do to undo that works here, with the block size that :func:`_get_block_size_n` returns.
* lse has the ALiBi term of the formula, -slope * abs(distance), with ``causal`` too (upstream's lse is then shifted by
  slope * position), and it is differentiable (upstream ignores its gradient).
"""

# No deferred annotations here: torch 2.4 reads the operators' schemas from them, and wants types.
from typing import Any

import torch
from torch import Tensor

from tessera.compat import flash_attn_2_cuda as flash_attn_gpu
from tessera.compat._attention import Keywords, attend, attend_packed, packed_keywords
from tessera.compat._caches import attend_with_cache, capacity_of, window_of
from tessera.compat._dropout_matrix import dropout_matrix
from tessera.compat._refusals import refuse_gradients

USE_TRITON_ROCM = False  # upstream's other backend, which some callers ask about


# ---- functions with autograd


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over dense tensors. Mirrors ``flash_attn.flash_attn_func``; the module says what is what."""
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    out, lse = attend(q, k, v, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(q, k, lse, keywords))


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The same with keys and values in one tensor, kv (batch, seqlen_k, 2, num_heads_k, head_dim).

    Neither they nor their gradient are copied. Mirrors ``flash_attn.flash_attn_kvpacked_func``.
    """
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    out, lse = attend_packed(q, kv, _unbind, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(q, kv[..., 0, :, :], lse, keywords))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The same with everything in one tensor, qkv (batch, seqlen, 3, num_heads, head_dim).

    Neither it nor its gradient is copied. Mirrors ``flash_attn.flash_attn_qkvpacked_func``.
    """
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    out, lse = attend_packed(None, qkv, _unbind, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(qkv[..., 0, :, :], qkv[..., 1, :, :], lse, keywords))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over packed tensors. Mirrors ``flash_attn.flash_attn_varlen_func``.

    Args:
        block_table: int32 (batch, blocks): k and v are (num_blocks, block_size, num_heads_k, head_dim), blocks of any
            size, and cu_seqlens_k says how many keys in its blocks each sequence has. Without dropout and gradients.
    """
    if block_table is not None:
        refuse_gradients("flash_attn_varlen_func with block_table", q=q, k=k, v=v)
        blocks = flash_attn_gpu.attend_blocks(
            q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, max_seqlen_q, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes,
        )  # fmt: skip
        return (*blocks, q.new_empty(0)) if return_attn_probs else blocks[0]
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    keywords |= packed_keywords(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend(q, k, v, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(q, k, lse, keywords))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Packed, with kv (total_k, 2, num_heads_k, head_dim). Mirrors ``flash_attn.flash_attn_varlen_kvpacked_func``."""
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    keywords |= packed_keywords(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend_packed(q, kv, _unbind, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(q, kv[..., 0, :, :], lse, keywords))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Packed, with qkv (total, 3, num_heads, head_dim). Mirrors ``flash_attn.flash_attn_varlen_qkvpacked_func``."""
    keywords = flash_attn_gpu.attention_keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    keywords |= packed_keywords(qkv, qkv, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out, lse = attend_packed(None, qkv, _unbind, keywords, return_attn_probs)
    return out if lse is None else (out, *_probabilities(qkv[..., 0, :, :], qkv[..., 1, :, :], lse, keywords))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which new keys and values are appended first. Outside autograd.

    Mirrors ``flash_attn.flash_attn_with_kvcache``.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache, v_cache: (batch_cache, capacity, num_heads_k, head_dim), written in place; with `block_table`
            (num_blocks, block_size, num_heads_k, head_dim), blocks of any size.
        k, v: (batch, seqlen_new, num_heads_k, head_dim); they go behind what `cache_seqlens` counts.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or q's type. New keys get the positions from
            `cache_seqlens` on, left padding counted; so do queries with `causal` or a window, and otherwise all queries
            of a sequence get the first one. A window of at least the capacity is none in this.
        cache_seqlens: filled slots before the append, an int for all sequences or int32 (batch). A negative one is left
            alone: nothing is written, its queries see no key. None: all slots are filled.
        cache_batch_idx: int32 (batch): the row of the cache, or of `block_table`, that a sequence has.
        cache_leftpad: int32 (batch): the slot at which the keys of a sequence begin.
        block_table: int32 (batch, blocks). What is beyond the lengths is not read.
        num_splits: accepted, changes nothing.

    Returns:
        o; with `return_softmax_lse` (o, lse), lse +inf for queries that see no key.
    """
    window = (-1, -1)
    if window_size != window:  # hardly ever
        capacity = capacity_of(k_cache, block_table)
        window = window_of(causal, window_size, capacity, capacity)
    result = attend_with_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, window, causal, 0, cache_batch_idx, cache_leftpad, block_table, None,
        None, None, rotary_cos, rotary_sin, None, rotary_interleaved, softmax_scale, softcap if softcap > 0.0 else 0.0,
        alibi_slopes, None, return_softmax_lse,
    )  # fmt: skip
    if not return_softmax_lse:
        return result
    out, lse = result
    return out, flash_attn_gpu.infinite_lse(lse)


def _unbind(packed: Tensor) -> tuple[Tensor, ...]:
    """k and v, or q, k and v, of (..., 2 or 3, heads, head_dim)."""
    return packed.unbind(dim=-3)


def _probabilities(q: Tensor, k: Tensor, lse: Tensor, keywords: Keywords) -> tuple[Tensor, Tensor]:
    """lse and S_dmask as upstream returns them."""
    matrix = dropout_matrix(q, k, keywords) if keywords["dropout_p"] > 0.0 else q.new_empty(0)
    return flash_attn_gpu.infinite_lse(lse), matrix


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """In blocks of how many keys S_dmask is scaled: more than there are, because one maximum scales the whole row."""
    return 2**31 - 1


# ---- operators without autograd: torch.ops.flash_attn.*


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state) of dense tensors; S_dmask of no elements unless `return_softmax`."""
    out, lse, matrix, rng_state = flash_attn_gpu.fwd(
        q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        return_softmax,
    )  # fmt: skip
    return out, lse, matrix, rng_state


@_flash_attn_forward.register_fake
def _flash_attn_forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    return _fake_forward(q, v, lse, batch, seqlen_q, k.shape[1], return_softmax)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of packed tensors; the further arguments are those of ``flash_attn_2_cuda.varlen_fwd``."""
    out, lse, matrix, rng_state = flash_attn_gpu.varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        return_softmax,
    )  # fmt: skip
    return out, lse, matrix, rng_state


@_flash_attn_varlen_forward.register_fake
def _flash_attn_varlen_forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total_q, heads, _ = q.shape
    lse = q.new_empty((heads, total_q), dtype=torch.float32)
    return _fake_forward(q, v, lse, cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k, return_softmax)


def _fake_forward(
    q: Tensor, v: Tensor, lse: Tensor, batch: int, seqlen_q: int, seqlen_k: int, return_softmax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = (-(-seqlen // 128) * 128 for seqlen in (seqlen_q, seqlen_k))
    matrix = q.new_empty((batch, q.shape[-2], *lengths)) if return_softmax else q.new_empty(0)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, matrix, torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv (those that are given), and returns softmax_d, as ``flash_attn_2_cuda.bwd`` does."""
    *_, softmax_d = flash_attn_gpu.bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return softmax_d


@_flash_attn_backward.register_fake
def _flash_attn_backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, heads, -(-seqlen_q // 128) * 128), dtype=torch.float32)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same of packed tensors, as ``flash_attn_2_cuda.varlen_bwd`` does."""
    *_, softmax_d = flash_attn_gpu.varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        deterministic, None, rng_state,
    )  # fmt: skip
    return softmax_d


@_flash_attn_varlen_backward.register_fake
def _flash_attn_varlen_backward_fake(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    total_q, heads, _ = q.shape
    return q.new_empty((heads, total_q + 128 * (cu_seqlens_q.shape[0] - 1)), dtype=torch.float32)
