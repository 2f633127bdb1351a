"""FlashMLA's functions on Tessera: decoding of latent attention (MLA, DeepSeek-V2 and -V3) with absorbed weights.

Names, order and defaults of the arguments are upstream's, those of 2025 and those of 2026 alike. What differs:

* A row of q or of the cache may have any number of columns, of which the first ``head_dim_v`` are the latent ones,
  where upstream has 576 and 512. So may there be any number of heads, and pages of any size.
* float32, and tensors on the CPU, are accepted.
* No schedule is needed: what :func:`get_mla_metadata` returns is accepted and not looked at, as is any other object.
* ``indices`` may have any number of columns; ``attn_sink`` goes with dense attention, too. An index below 0 is skipped.
  One beyond the cache reads zeros on a GPU, and is a ValueError on a CPU.
* Caches of 16 bits alone are there. ``is_fp8_kvcache`` and a second cache, ``extra_k_cache`` and what comes with it,
  raise NotImplementedError, as do the functions of the package that are not about decoding.
* Errors are those of :func:`tessera.cached_attention`, which has ``block_table`` as page_table and ``cache_seqlens`` as
  seqlens, and the latent columns of q as qv.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from tessera.compat._refusals import refuse
from tessera.torch import cache


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
        k_cache: (num_blocks, page_size, num_heads_k, head_dim), of q's type. It is read where it lies.
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

    Returns:
        (out, softmax_lse): (batch, seqlen_q, num_heads, head_dim_v), and float32 (batch, num_heads, seqlen_q), +inf for
        queries that see no key, whose out is 0.
    """
    if is_fp8_kvcache or not (extra_k_cache is extra_indices_in_kvcache is extra_topk_length is None):
        refuse(
            "flash_mla_with_kvcache", is_fp8_kvcache=is_fp8_kvcache, extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
        )  # fmt: skip
    batch, seqlen_q, heads, columns = q.shape
    if indices is not None:
        if causal:
            raise ValueError("causal = True together with indices, which say what each query sees: must be False")
        q, k_cache, block_table, cache_seqlens = _one_query_each(q, k_cache, indices, topk_length)
    elif topk_length is not None:
        raise ValueError("topk_length is given, but indices is None: both or neither")
    elif block_table is None or cache_seqlens is None:
        name = "block_table" if block_table is None else "cache_seqlens"
        raise ValueError(f"{name} is None: a tensor is required, as indices is None, too")
    if k_cache.shape[-1] != columns:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}: its rows must have {columns} columns, as q's have")
    if not 0 < head_dim_v < columns:
        raise ValueError(f"head_dim_v = {head_dim_v}: must lie in [1, {columns - 1}], as rows have {columns} columns")
    # By position: keywords cost a microsecond.
    out, lse = cache.cached_attention(
        q[..., head_dim_v:], k_cache[..., head_dim_v:], k_cache[..., :head_dim_v], cache_seqlens, "after", None, None,
        block_table, None, None, None, None, causal, (-1, -1), 0, 0, None, softmax_scale, 0.0, None, None, False, None,
        None, None, None, None, False, None, False, None, True, True, None, None, q[..., :head_dim_v],
        indices is not None,
    )  # fmt: skip
    if indices is not None:
        out = out.view(batch, seqlen_q, heads, head_dim_v)
        lse = lse.view(batch, seqlen_q, heads).transpose(1, 2).contiguous()
    if attn_sink is not None:
        if attn_sink.shape != (heads,):
            raise ValueError(f"attn_sink has shape {tuple(attn_sink.shape)}: must be (num_heads,) = ({heads},)")
        # What the sink takes away from a row whose sum is exp(lse).
        out *= torch.sigmoid(lse - attn_sink[:, None]).transpose(1, 2)[..., None]
    return out, torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def _one_query_each(
    q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Every query as a sequence of its own, whose keys are pages of one slot."""
    batch, seqlen_q, heads, columns = q.shape
    if indices.dim() != 3 or indices.shape[:2] != (batch, seqlen_q):
        shape = tuple(indices.shape)
        raise ValueError(f"indices has shape {shape}: must be (batch, seqlen_q, topk) = ({batch}, {seqlen_q}, topk)")
    pages, page_size, heads_k, _ = k_cache.shape
    if pages > 1 and k_cache.stride(0) != page_size * k_cache.stride(1):
        raise ValueError(
            f"k_cache has strides {k_cache.stride()}: with indices slots of neighbouring pages must lie as those of "
            f"one page do, so the first must be {page_size * k_cache.stride(1)}"
        )
    slots = k_cache.as_strided(
        (pages * page_size, 1, heads_k, k_cache.shape[3]),
        (k_cache.stride(1), k_cache.stride(1), k_cache.stride(2), k_cache.stride(3)),
    )
    if topk_length is not None:
        if topk_length.shape != (batch,):
            raise ValueError(f"topk_length has shape {tuple(topk_length.shape)}: must be (batch,) = ({batch},)")
        topk_length = topk_length[:, None].expand(batch, seqlen_q).reshape(-1)
    table = indices.reshape(batch * seqlen_q, indices.shape[2])
    return q.reshape(batch * seqlen_q, 1, heads, columns), slots, table, topk_length


def _refuse_function(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name}: Tessera's flash_mla decodes over dense keys only; {instead}")


_PACKED = "tessera.attention with cu_seqlens_q, cu_seqlens_k and return_lse=True has its result, and its gradients"


def flash_mla_sparse_fwd(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function(
        "flash_mla_sparse_fwd",
        "tessera.cached_attention with skip_pages and a page_table of pages of one key for each query has its result",
    )


def flash_attn_varlen_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_func", _PACKED)


def flash_attn_varlen_qkvpacked_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_qkvpacked_func", _PACKED)


def flash_attn_varlen_kvpacked_func(*_: Any, **__: Any) -> NoReturn:
    """Not there: raises NotImplementedError."""
    _refuse_function("flash_attn_varlen_kvpacked_func", _PACKED)
