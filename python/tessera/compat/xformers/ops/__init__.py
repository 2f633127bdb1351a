"""Upstream's ``xformers.ops``, of which Tessera has attention and what some models call beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.compat.xformers.ops import fmha as fmha
from tessera.compat.xformers.ops.fmha import (
    AttentionBias,
    AttentionOp,
    AttentionOpBase,
    LowerTriangularMask,
    MemoryEfficientAttentionCkOp,
    MemoryEfficientAttentionCutlassFwdFlashBwOp,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    MemoryEfficientAttentionSplitKCkOp,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

AttentionMask = AttentionBias  # its old name

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "AttentionOp",
    "AttentionOpBase",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "fmha",
    "index_select_cat",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "scaled_index_add",
    "unbind",
]

# What upstream has beside attention -> what there is instead.
_INSTEAD = {
    "ColumnParallelLinear": "torch.distributed.tensor.parallel",
    "RMSNorm": "torch.nn.RMSNorm",
    "RowParallelLinear": "torch.distributed.tensor.parallel",
    "Sparse24Tensor": "torch.sparse.to_sparse_semi_structured",
    "SwiGLU": "torch.nn.Linear and torch.nn.functional.silu",
    "rope_padded": "flash_attn.layers.rotary",
    "swiglu": "torch.nn.functional.linear and silu",
}


def __getattr__(name: str) -> Any:
    text = f"Tessera stands in for xformers.ops and has no {name}"
    raise AttributeError(f"{text}: {_INSTEAD[name]} computes the same" if name in _INSTEAD else text)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """torch.unbind. Mirrors ``xformers.ops.unbind``."""
    return x.unbind(dim)


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Adds alpha * scaling * source to rows of `input`, in place. Mirrors ``xformers.ops.scaled_index_add``.

    Args:
        input: (batch, seqlen, columns); returned.
        index: int64 (rows), distinct.
        source: (rows, seqlen, columns).
        scaling: (columns), or None for 1.
    """
    return input.index_add_(0, index, source if scaling is None else scaling * source, alpha=alpha)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """The chosen rows of several (rows, columns), flattened one after another, in one dimension.

    Mirrors ``xformers.ops.index_select_cat``.
    """
    return torch.cat([source[index].flatten() for source, index in zip(sources, indices, strict=True)])
