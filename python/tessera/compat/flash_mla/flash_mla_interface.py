"""FlashMLA's functions on Tessera: decoding of latent attention (MLA, DeepSeek-V2 and -V3) with absorbed weights.

Names, order and defaults of the arguments are upstream's, those of 2025 and those of 2026 alike. What differs:

* A row of q or of the cache may have any number of columns, of which the first ``head_dim_v`` are the latent ones,
  where upstream has 576 and 512. So may there be any number of heads, and pages of any size.
* float32, and tensors on the CPU, are accepted.
* No schedule is needed: what :func:`get_mla_metadata` returns is accepted and not looked at, as is any other object.
* ``indices`` may have any number of columns; ``attn_sink`` goes with dense attention, too. An index below 0 is skipped.
  One beyond the cache reads zeros on a GPU, and is a ValueError on a CPU.
* Rows of 8 bits may be attended to densely, too, by pages and lengths. They are those of DeepSeek-V3.2, of e4m3, scales
  of 128 columns and the rotated columns of bfloat16; values times their scales are rounded to bfloat16, as upstream
  does, by scales of float32. Rows whose rotated columns are values, too (584 bytes, DeepSeek-V4), are refused.
* A second cache, ``extra_k_cache``, is a second launch and a third that merges.
* ``flash_mla_sparse_fwd`` returns None for max_logits: that number is never formed. It decodes, query by query.
* The functions that are not about latent rows raise NotImplementedError.
* Errors are those of :func:`tessera.cached_attention`, which has ``block_table`` as page_table and ``cache_seqlens`` as
  seqlens, and the latent columns of q as qv.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from tessera.torch import cache as cached
from tessera.torch import ops as combine


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Where upstream keeps a schedule from call to call. It stays empty."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


# Columns of upstream's int32 schedule.
_SCHEDULE_COLUMNS = 8


def get_mla_metadata(cache_seqlens: Tensor | None = None, *_: Any, **__: Any) -> tuple[Any, Tensor | None]:
    """A schedule for :func:`flash_mla_with_kvcache`, which needs none.

    Args:
        cache_seqlens: int32 (batch). The other arguments of upstream's, ``num_heads_per_head_k``, ``num_heads_k``,
            ``num_heads_q``, ``is_fp8_kvcache``, ``topk``, are accepted and not looked at.

    Returns:
        As upstream's of 2025 (tile_scheduler_metadata, num_splits), int32 zeros of shape (1, 8) and (batch + 1), which
        depend on nothing but the batch, so a captured CUDA graph may go on with them. As upstream's of 2026, without
        arguments, (FlashMLASchedMeta(), None).
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    shapes = (1, _SCHEDULE_COLUMNS), (cache_seqlens.shape[0] + 1,)
    schedule, num_splits = (torch.zeros(shape, dtype=torch.int32, device=cache_seqlens.device) for shape in shapes)
    return schedule, num_splits


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over latent rows in pages, each of which is key and, in its first columns, value. Outside autograd.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), in the order of the cache's columns: the latent ones, then those that
            are rotated.
        k_cache: (num_blocks, page_size, num_heads_k, head_dim), of q's type. It is read where it lies. With
            `is_fp8_kvcache` rows of bytes, of any type of 8 bits: head_dim_v values of e4m3, a scale of float32 for
            each 128 of them, and the other columns in bfloat16; 656 of 576 columns.
        block_table: int32 (batch, pages). What is beyond the lengths is not read. None with `indices`.
        cache_seqlens: int32 (batch), on the device: the keys of each sequence, this step's among them. With `indices`
            it is not looked at.
        head_dim_v: columns of a value, at the start of a row; less than head_dim.
        tile_scheduler_metadata, num_splits: accepted, change nothing.
        softmax_scale: None is 1 / sqrt(head_dim).
        causal: the last query sees all keys, the one before it all but the last, and so on. False with `indices`.
        indices: int32 (batch, seqlen_q, topk): the keys that a query sees, each the number of a slot, which is its
            page's number * page_size + its place there; below 0 is none. All slots of the cache must lie at one
            distance.
        attn_sink: float32 (num_heads): one more logit of each head, with a value of 0. softmax_lse does not count it.
        topk_length: int32 (batch): so many of the first `indices` count; None: all.
        is_fp8_kvcache: rows are of 8 bits, those of `extra_k_cache`, too.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: with `indices`, a second cache and what queries see
            of it, like k_cache, indices and topk_length.

    Returns:
        (out, softmax_lse): (batch, seqlen_q, num_heads, head_dim_v), and float32 (batch, num_heads, seqlen_q), +inf for
        queries that see no key, whose out is 0.
    """
    batch, seqlen_q, heads, columns = q.shape
    if not 0 < head_dim_v < columns:
        raise ValueError(f"head_dim_v = {head_dim_v}: must lie in [1, {columns - 1}], as rows have {columns} columns")
    if indices is None:
        for name, given in (("topk_length", topk_length), ("extra_k_cache", extra_k_cache)):
            if given is not None:
                raise ValueError(f"{name} is given, but indices is None: both or neither")
        if block_table is None or cache_seqlens is None:
            name = "block_table" if block_table is None else "cache_seqlens"
            raise ValueError(f"{name} is None: a tensor is required, as indices is None, too")
    elif causal:
        raise ValueError("causal = True together with indices, which say what each query sees: must be False")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache: both or neither must be given")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length is given, but extra_k_cache is None: both or neither")
    scale = softmax_scale
    if indices is None:
        out, lse = _attend(q, k_cache, block_table, cache_seqlens, head_dim_v, is_fp8_kvcache, scale, causal, False)
    else:
        out, lse = _attend_listed(q, k_cache, indices, topk_length, head_dim_v, is_fp8_kvcache, scale)
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            extra = _attend_listed(
                q,
                extra_k_cache,
                extra_indices_in_kvcache,
                extra_topk_length,
                head_dim_v,
                is_fp8_kvcache,
                scale,
                "extra_",
            )
            out, lse = combine.combine(torch.stack((out, extra[0])), torch.stack((lse, extra[1])), None)
    if attn_sink is not None:
        _apply_sink(out, lse, attn_sink, heads)
    return out, torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def _apply_sink(out: Tensor, lse: Tensor, attn_sink: Tensor, heads: int) -> None:
    """What the sink takes away from a row whose sum is exp(lse)."""
    if attn_sink.shape != (heads,):
        raise ValueError(f"attn_sink has shape {tuple(attn_sink.shape)}: must be (num_heads,) = ({heads},)")
    out *= torch.sigmoid(lse - attn_sink[:, None]).transpose(1, 2)[..., None]


def _attend(
    q: Tensor, cache: Tensor, table: Tensor | None, lengths: Tensor | None, head_dim_v: int, is_fp8: bool,
    scale: float | None, causal: bool, skips: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to rows of either kind, with -inf for the lse of queries that see no key."""
    if is_fp8:
        k, v, scales = _parts_of_bytes(q, cache, head_dim_v)
    elif cache.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k_cache has shape {tuple(cache.shape)}: its rows must have {q.shape[-1]} columns, as q's have"
        )
    else:
        k, v, scales = cache[..., head_dim_v:], cache[..., :head_dim_v], None
    # By position: keywords cost a microsecond.
    result: tuple[Tensor, Tensor] = cached.cached_attention(
        q[..., head_dim_v:], k, v, lengths, "after", None, None,
        table, None, None, None, None, causal, (-1, -1), 0, 0, None, scale, 0.0, None, None, False, None,
        None, None, None, None, False, None, False, None, True, True, None, scales, q[..., :head_dim_v],
        skips,
    )  # fmt: skip
    return result


#: Columns of e4m3 that share a scale, and bytes of a scale and of a rotated column.
_GROUP, _SCALE_BYTES, _ROTATED_BYTES = 128, 4, 2


def _parts_of_bytes(q: Tensor, cache: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and v's scales in rows of bytes: all values, a scale of float32 for each 128 of them, rotated columns."""
    if q.dtype is not torch.bfloat16:
        raise ValueError(f"q.dtype = {q.dtype}: must be torch.bfloat16, as the rotated columns of rows of 8 bits are")
    if head_dim_v % _GROUP != 0:
        raise ValueError(f"head_dim_v = {head_dim_v}: must be a multiple of {_GROUP}, which share a scale")
    scales_end = head_dim_v + head_dim_v // _GROUP * _SCALE_BYTES
    row_bytes = scales_end + (q.shape[-1] - head_dim_v) * _ROTATED_BYTES
    if cache.element_size() != 1 or cache.shape[-1] != row_bytes:
        raise ValueError(
            f"k_cache has shape {tuple(cache.shape)} of {cache.dtype}: with is_fp8_kvcache its rows must have "
            f"{row_bytes} bytes: {head_dim_v} of values, {scales_end - head_dim_v} of scales, the rest rotated columns"
        )
    values, scales, rotated = cache.split((head_dim_v, scales_end - head_dim_v, row_bytes - scales_end), dim=-1)
    return rotated.view(torch.bfloat16), values.view(torch.float8_e4m3fn), scales.view(torch.float32)


def _attend_listed(
    q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor | None, head_dim_v: int, is_fp8: bool,
    scale: float | None, prefix: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every query as a sequence of its own, whose keys are pages of one slot. prefix: of names in errors."""
    batch, seqlen_q, heads, columns = q.shape
    if indices.dim() != 3 or indices.shape[:2] != (batch, seqlen_q):
        name, shape = ("extra_indices_in_kvcache" if prefix else "indices"), tuple(indices.shape)
        raise ValueError(f"{name} has shape {shape}: must be (batch, seqlen_q, topk) = ({batch}, {seqlen_q}, topk)")
    pages, page_size, heads_k, width = k_cache.shape
    if pages > 1 and k_cache.stride(0) != page_size * k_cache.stride(1):
        raise ValueError(
            f"{prefix}k_cache has strides {k_cache.stride()}: with indices slots of neighbouring pages must lie as "
            f"those of one page do, so the first must be {page_size * k_cache.stride(1)}"
        )
    slots = k_cache.as_strided(
        (pages * page_size, 1, heads_k, width),
        (k_cache.stride(1), k_cache.stride(1), k_cache.stride(2), k_cache.stride(3)),
    )
    if topk_length is not None:
        if topk_length.shape != (batch,):
            shape = tuple(topk_length.shape)
            raise ValueError(f"{prefix}topk_length has shape {shape}: must be (batch,) = ({batch},)")
        topk_length = topk_length[:, None].expand(batch, seqlen_q).reshape(-1)
    table = indices.reshape(batch * seqlen_q, indices.shape[2])
    rows = q.reshape(batch * seqlen_q, 1, heads, columns)
    out, lse = _attend(rows, slots, table, topk_length, head_dim_v, is_fp8, scale, False, True)
    out = out.view(batch, seqlen_q, heads, head_dim_v)
    return out, lse.view(batch, seqlen_q, heads).transpose(1, 2).contiguous()


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, None, Tensor] | tuple[Tensor, None, Tensor, Tensor]:
    """Attention of many queries, each to latent rows of its own choice. Outside autograd.

    Args:
        q: (seqlen_q, num_heads, head_dim).
        kv: (seqlen_k, 1, head_dim), of q's type; the first `d_v` columns of a row are its value.
        indices: int32 (seqlen_q, 1, topk): the rows that a query sees; numbers below 0, and those of no row, are none.
        sm_scale: what scores are multiplied by.
        d_v: columns of a value, less than head_dim.
        attn_sink: float32 (num_heads): one more logit of each head, with a value of 0. lse does not count it.
        topk_length: int32 (seqlen_q): so many of the first indices of a query count; None: all.
        indexer_topk: > 0: the last result is the lse over the first so many indices alone.

    Returns:
        (out, None, lse), with indexer_topk > 0 (out, None, lse, lse_indexer): (seqlen_q, num_heads, d_v), and float32
        (seqlen_q, num_heads), +inf for queries that see no row, whose out is 0.
    """
    if q.dim() != 3 or kv.dim() != 3 or kv.shape[1] != 1:
        shapes = f"q has shape {tuple(q.shape)}, kv {tuple(kv.shape)}"
        raise ValueError(f"{shapes}: must be (seqlen_q, num_heads, head_dim) and (seqlen_k, 1, head_dim)")
    seqlen_q, heads, columns = q.shape
    if not 0 < d_v < columns:
        raise ValueError(f"d_v = {d_v}: must lie in [1, {columns - 1}], as rows have {columns} columns")
    if indices.dim() != 3 or indices.shape[:2] != (seqlen_q, 1):
        shape = tuple(indices.shape)
        raise ValueError(f"indices has shape {shape}: must be (seqlen_q, 1, topk) = ({seqlen_q}, 1, topk)")
    if topk_length is not None and topk_length.shape != (seqlen_q,):
        shape = tuple(topk_length.shape)
        raise ValueError(f"topk_length has shape {shape}: must be (seqlen_q,) = ({seqlen_q},)")
    if not 0 <= indexer_topk <= indices.shape[2]:
        raise ValueError(f"indexer_topk = {indexer_topk}: must lie in [0, topk] = [0, {indices.shape[2]}]")
    rows, lists = q[:, None], torch.where(indices < kv.shape[0], indices, -1)
    cache = kv[:, None]

    def attend(first: int, end: int) -> tuple[Tensor, Tensor]:
        lengths = None if topk_length is None else (topk_length - first).clamp(0, end - first)
        return _attend_listed(rows, cache, lists[:, :, first:end], lengths, d_v, False, sm_scale)

    topk, indexer = indices.shape[2], None
    if 0 < indexer_topk < topk:
        parts = attend(0, indexer_topk), attend(indexer_topk, topk)
        indexer = parts[0][1]
        out, lse = combine.combine(torch.stack([o for o, _ in parts]), torch.stack([part for _, part in parts]), None)
    else:
        out, lse = attend(0, topk)
        indexer = lse if indexer_topk else None
    if attn_sink is not None:
        _apply_sink(out, lse, attn_sink, heads)

    def finished(x: Tensor) -> Tensor:
        return torch.nan_to_num(x[:, :, 0], nan=math.nan, posinf=math.inf, neginf=math.inf)

    if indexer is None:
        return out[:, 0], None, finished(lse)
    return out[:, 0], None, finished(lse), finished(indexer)


def _refuse_function(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name}: Tessera's flash_mla is about latent rows only; {instead}")


_PACKED = "tessera.attention with cu_seqlens_q, cu_seqlens_k and return_lse=True has its result, and its gradients"


def flash_attn_varlen_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_func", _PACKED)


def flash_attn_varlen_qkvpacked_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_qkvpacked_func", _PACKED)


def flash_attn_varlen_kvpacked_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_kvpacked_func", _PACKED)
