"""FlashAttention-3's functions on Tessera: upstream's top-level ``flash_attn_interface``.

Names, order and defaults of the arguments, shapes and conventions are upstream's. Shared by all functions:

* q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_k, head_dim), v (batch, seqlen_k, num_heads_k,
  head_dim_v); "varlen": (total, heads, head_dim) with int32 ``cu_seqlens`` (batch + 1). num_heads is a multiple of
  num_heads_k; head_dim_v may be any.
* ``softmax_scale``: None is 1 / sqrt(head_dim), with ``qv`` of head_dim + head_dim_v. ``window_size``: (left, right),
  both ends included, negative: no limit. ``causal`` and windows are aligned to the bottom right if seqlen_q !=
  seqlen_k. ``softcap``: 0 is none.
  ``deterministic``: dq is the same bit for bit in every run, at every head dimension; everything else always is.
* ``num_splits``, ``pack_gqa`` and ``sm_margin`` steer upstream's kernels and change no result. They are accepted and
  have no effect: the library splits keys, and packs the heads of a group, where its plan says so, and it leaves no
  multiprocessor free.
* Functions return o, like q with v's head_dim; with ``return_attn_probs`` the tuple (o, lse). lse: float32 (batch,
  num_heads, seqlen_q), varlen (num_heads, total_q), -inf for queries that see no key (o is 0 there). It is
  differentiable; upstream ignores its gradient.
* ``q_descale``, ``k_descale``, ``v_descale``: of q, k and v that are torch.float8_e4m3fn, on a CPU or a Hopper GPU:
  float32 (batch, num_heads_k), of q, too, any strides. A value is an element times its factor; o is bfloat16, and there
  are no gradients. A missing factor is a ValueError, which upstream takes for 1, and so is one of other tensors, which
  it ignores. On a GPU weights are rounded to 8 bits, too, head dims are multiples of 16 up to 256, and rows begin at
  multiples of 16 bytes.
* Errors are those of :func:`tessera.attention`: ValueError and NotImplementedError that name the argument. float32 and
  tensors on the CPU are accepted. ``attention_chunk``: queries see only keys of their own chunk of so many positions;
  with dense k and v that are not float8, and without gradients.
* ``qv``: a second query of each row, like q with v's head_dim and of q's type; scores are q k^T + qv v^T. Any sizes,
  where upstream has limits. Not of float8, and without gradients: those of q, k and v, which upstream computes as if qv
  were not there, are a NotImplementedError.
"""

# No deferred annotations here: torch 2.4 reads the operators' schemas from them, and wants types.
from typing import Any

import torch
from torch import Tensor

import tessera.torch
from tessera.compat._attention import (
    Keywords,
    Split,
    attend,
    attend_packed,
    operands,
    row_products,
    score_keywords,
    without_autocast,
)
from tessera.compat._caches import attend_with_cache, capacity_of, window_of
from tessera.compat._descales import E4M3, factors_of, factors_of_cache, of_pieces
from tessera.compat._layouts import keywords_of_layouts
from tessera.compat._refusals import refuse, refuse_float8
from tessera.torch import ops
from tessera.torch.tensors import rows


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over dense tensors. Mirrors ``flash_attn_interface.flash_attn_func``; the module says what is what."""
    factors = factors_of(q, k, v, q_descale, k_descale, v_descale, q.shape[0])
    keywords = score_keywords(softmax_scale, causal, window_size, softcap, deterministic)
    keywords |= _second_query("flash_attn_func", q, qv)
    if attention_chunk > 0:
        return _attend_in_chunks("flash_attn_func", attention_chunk, q, k, v, keywords, return_attn_probs)
    out, lse = attend(q, k, v, keywords, return_attn_probs, factors)
    return out if lse is None else (out, lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """The same with everything in one tensor. Mirrors ``flash_attn_interface.flash_attn_qkvpacked_func``.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim).
            Neither it nor its gradient is copied.
        num_heads_q: needed by the second form.
    """
    keywords = score_keywords(softmax_scale, causal, window_size, softcap, deterministic)
    split = _split_of(qkv, num_heads_q)
    if attention_chunk > 0:
        q, k, v = split(qkv)
        return _attend_in_chunks("flash_attn_qkvpacked_func", attention_chunk, q, k, v, keywords, return_attn_probs)
    if qkv.dtype is E4M3 or not (q_descale is k_descale is v_descale is None):
        q, k, v = operands(None, qkv, split)
        factors = factors_of(q, k, v, q_descale, k_descale, v_descale, q.shape[0])
        out, lse = attend(q, k, v, keywords, return_attn_probs, factors)
    else:
        out, lse = attend_packed(None, qkv, split, keywords, return_attn_probs)
    return out if lse is None else (out, lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over packed tensors. Mirrors ``flash_attn_interface.flash_attn_varlen_func``.

    Args:
        cu_seqlens_q: int32 (batch + 1); None: q is dense, (batch, seqlen_q, num_heads, head_dim).
        cu_seqlens_k: the same for k and v; one of the two layouts may be dense and the other packed.
        max_seqlen_q, max_seqlen_k: bounds of the lengths; of what is packed, and on a GPU, they must be given, and must
            bound whole sequences, not only what is used of them: unused tokens beyond get an undefined result.
        seqused_q, seqused_k: int32 (batch): only so many tokens at the start of each sequence are used. The others
            get o = 0, lse = -inf and gradients of 0. Causal masks and windows are aligned to the last ones used. More
            than a sequence has is a ValueError on a CPU, and undefined on a GPU, where they are not read.
    """
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    factors = factors_of(q, k, v, q_descale, k_descale, v_descale, batch)
    keywords = score_keywords(softmax_scale, causal, window_size, softcap, deterministic)
    keywords |= _second_query("flash_attn_varlen_func", q, qv)
    if attention_chunk > 0:
        return _attend_in_chunks(
            "flash_attn_varlen_func", attention_chunk, q, k, v, keywords, return_attn_probs, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        )  # fmt: skip
    lengths, layouts = keywords_of_layouts(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    factors = of_pieces(factors, batch, lengths)
    out, lse = attend(*layouts.pack(q, k, v), layouts.pack_keywords(keywords) | lengths, return_attn_probs, factors)
    out = layouts.unpack_rows(out)
    return out if lse is None else (out, layouts.unpack_lse(lse))


@torch.no_grad()
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges results over parts of the keys into the result over all of them; outside autograd, as upstream.

    Mirrors ``flash_attn_interface.flash_attn_combine``.

    Args:
        out_partial: float32, bfloat16 or float16 (parts, batch, seqlen, heads, head_dim) or (parts, total, heads,
            head_dim).
        lse_partial: float32 (parts, batch, seqlen, heads) or (parts, total, heads). A part whose lse is -inf has no
            weight, whatever its values.
        out: where to write the result, or None.
        out_dtype: of the result; None is `out`'s type, or float32.

    Returns:
        o (batch, seqlen, heads, head_dim) or (total, heads, head_dim), and lse of o's shape without the last dimension;
        0 and -inf where every part has -inf.
    """
    dtype = torch.float32 if out_dtype is None else out_dtype
    combined, lse = ops.combine(out_partial, lse_partial.transpose(-1, -2), dtype, out)
    return combined, lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which new keys and values are appended first. Outside autograd.

    Mirrors ``flash_attn_interface.flash_attn_with_kvcache``.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or packed with `cu_seqlens_q` and `max_seqlen_q`.
        k_cache, v_cache: (batch_cache, capacity, num_heads_k, head_dim), written in place; with `page_table`
            (num_pages, page_size, num_heads_k, head_dim), pages of any size.
        k, v: (batch, seqlen_new, num_heads_k, head_dim), or packed with `cu_seqlens_k_new`, which is not looked at
            without them. They go behind what `cache_seqlens` counts. Every row is written, also of a sequence without
            queries.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or q's type. New keys get the positions from
            `rotary_seqlens` on, or from `cache_seqlens`, left padding counted; so do queries with `causal`, a window or
            `attention_chunk`, and otherwise all queries of a sequence get the first one. A window that reaches
            capacity - 1 keys to the left or seqlen_q - 1 to the right is none in this.
        cache_seqlens: filled slots before the append, an int for all sequences or int32 (batch). A negative one is left
            alone: nothing is written, its queries see no key. None: all slots are filled.
        cache_batch_idx: int32 (batch): the row of the cache, or of `page_table`, that a sequence has.
        cache_leftpad: int32 (batch): the slot at which the keys of a sequence begin.
        page_table: int32 (batch, pages). What is beyond the lengths is not read.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: accepted, change nothing.
        q_descale, k_descale, v_descale: of a cache of torch.float8_e4m3fn, as the module says. Beside one q is float8,
            too, with k and v, whose elements are copied; or it has 16 bits, which upstream refuses, and no q_descale:
            then k and v, of q's type, are divided by k_descale and v_descale and rounded to float8, those beyond
            its range to its end. Queries and weights are not rounded to 8 bits. With rotary tables new keys and
            queries of float8 are widened, rotated, and keys rounded again.
        qv: as the module says. It is not rotated.

    Returns:
        o, of float8 queries bfloat16; with `return_softmax_lse` (o, lse, and two tensors of no elements where upstream
        has the results of splits). lse is -inf for queries that see no key.
    """
    if qv is not None and E4M3 in (q.dtype, k_cache.dtype):
        refuse("flash_attn_with_kvcache", qv=qv)
    factors = None
    if k_cache.dtype is E4M3 or not (q_descale is k_descale is v_descale is None):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        factors = factors_of_cache(q, k_cache, v_cache, q_descale, k_descale, v_descale, batch)
    window = (-1, -1)
    if window_size != window:  # hardly ever
        seqlen_q = q.shape[1] if cu_seqlens_q is None else q.shape[0] if max_seqlen_q is None else max_seqlen_q
        window = window_of(causal, window_size, capacity_of(k_cache, page_table) - 1, seqlen_q - 1)
    result = attend_with_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, window, causal, attention_chunk, cache_batch_idx, cache_leftpad,
        page_table, cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens,
        rotary_interleaved, softmax_scale, softcap if softcap > 0.0 else 0.0, None, None, return_softmax_lse,
        factors, qv,
    )  # fmt: skip
    if not return_softmax_lse:
        return result
    out, lse = result
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A schedule for :func:`flash_attn_with_kvcache`, which needs none: int32 (1), zero, where `cache_seqlens` is.

    Mirrors ``flash_attn_interface.get_scheduler_metadata``.
    """
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def _attend_in_chunks(
    function: str,
    chunk: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    return_lse: bool,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Any:
    """Dense keys as a cache that is full, or filled as far as `seqused_k` says: chunks are a matter of those."""
    qv = keywords.get("qv")
    needs_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, qv))
    if needs_gradients or q.dtype is E4M3 or cu_seqlens_k is not None or seqused_q is not None:
        refuse(function, attention_chunk=chunk)
    return attend_with_cache(
        q, rows(k), rows(v), None, None, cache_seqlens=seqused_k, window=keywords["window"], chunk=chunk,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=keywords["softmax_scale"],
        softcap=keywords["softcap"], return_lse=return_lse, qv=qv,
    )  # fmt: skip


def _second_query(function: str, q: Tensor, qv: Tensor | None) -> Keywords:
    """What :func:`tessera.attention` is told of qv."""
    if qv is None:
        return {}
    if q.dtype is E4M3:
        refuse(function, qv=qv)
    return {"qv": qv}


def _split_of(qkv: Tensor, num_heads_q: int | None) -> Split:
    """How to make q, k and v of a tensor that holds them."""
    if qkv.dim() == 5:
        return lambda packed: packed.unbind(dim=-3)
    heads = qkv.shape[2]
    if num_heads_q is None or num_heads_q > heads or (heads - num_heads_q) % 2 != 0:
        raise ValueError(f"num_heads_q is {num_heads_q}: of the {heads} heads in qkv, the rest must be even in number")
    num_heads_k = (heads - num_heads_q) // 2
    return lambda packed: torch.split(packed, [num_heads_q, num_heads_k, num_heads_k], dim=-2)


# ---- operators without autograd: torch.ops.flash_attn_3.*


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, and two tensors of no elements where upstream has the results of splits).

    q, and k with v, are dense, or packed if their cu_seqlens are given; lse has the layout of q. With `page_table`,
    `kv_batch_idx`, `leftpad_k` or `attention_chunk` k and v are a cache, as :func:`flash_attn_with_kvcache` takes it,
    and `seqused_k` its lengths. Nothing is appended: this operator changes no argument. `cu_seqlens_k_new` and
    `scheduler_metadata` are not looked at. What the public functions refuse is refused here as well.
    """
    refuse(
        "_flash_attn_forward", k_new=k_new, v_new=v_new, out_=out_, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
    )  # fmt: skip
    keywords = score_keywords(softmax_scale, causal, (window_size_left, window_size_right), softcap, False)
    keywords |= _second_query("_flash_attn_forward", q, qv)
    if page_table is not None or kv_batch_idx is not None or leftpad_k is not None or attention_chunk > 0:
        refuse(
            "_flash_attn_forward over a cache", cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        )  # fmt: skip
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        out, lse = attend_with_cache(
            q, k, v, None, None, cache_seqlens=seqused_k, window=keywords["window"], chunk=attention_chunk,
            cache_index=kv_batch_idx, leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, softcap=keywords["softcap"],
            factors=factors_of_cache(q, k, v, q_descale, k_descale, v_descale, batch), qv=qv,
        )  # fmt: skip
        return out, lse, lse.new_empty(0), lse.new_empty(0)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    factors = factors_of(q, k, v, q_descale, k_descale, v_descale, batch)
    lengths, layouts = keywords_of_layouts(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    with torch.no_grad():
        keywords = layouts.pack_keywords(keywords) | lengths
        out, lse = attend(*layouts.pack(q, k, v), keywords, True, of_pieces(factors, batch, lengths))
    assert lse is not None  # it was asked for
    return layouts.unpack_rows(out), layouts.unpack_lse(lse), lse.new_empty(0), lse.new_empty(0)


@_flash_attn_forward.register_fake
def _flash_attn_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, *others: object, **named: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rows, heads, _ = q.shape
    lse = q.new_empty((heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1]), dtype=torch.float32)
    dtype = torch.bfloat16 if q.dtype is E4M3 else q.dtype
    return q.new_empty((*rows, heads, v.shape[-1]), dtype=dtype), lse, lse.new_empty(0), lse.new_empty(0)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk and dv (those that are given). `sequed_q` and `sequed_k` are spelt as upstream spells them.

    Returns:
        softmax_d: float32 (batch, heads, seqlen_q), packed (heads, total_q): the sum over columns of dout * out. Unlike
        upstream's it is not padded, whose padding depends on the tiles of its kernels.
    """
    keywords = score_keywords(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, deterministic)
    refuse_float8(q=q, k=k, v=v)
    lengths, layouts = keywords_of_layouts(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sequed_q, sequed_k
    )
    # Gradients of what is packed here are made in tensors of their own: dense ones may have any strides.
    here_q, here_k = layouts.q is not None, layouts.k is not None
    with without_autocast(q):
        q, k, v = (rows(x) for x in layouts.pack(q, k, v))
        made = tessera.torch.backward(
            layouts.pack_rows(dout), q, k, v, layouts.pack_rows(rows(out)), layouts.pack_lse(softmax_lse),
            dq=None if here_q else dq, dk=None if here_k else dk, dv=None if here_k else dv, **keywords, **lengths,
        )  # fmt: skip
        for given, gradient, here in zip((dq, dk, dv), made, (here_q, here_k, here_k), strict=True):
            if here and given is not None:
                given.copy_(gradient.view(given.shape))
        return row_products(dout, out)


@_flash_attn_backward.register_fake
def _flash_attn_backward_fake(dout: Tensor, q: Tensor, *others: object, **named: object) -> Tensor:
    *rows, heads, _ = q.shape
    return q.new_empty((heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1]), dtype=torch.float32)
