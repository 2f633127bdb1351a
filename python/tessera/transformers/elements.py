"""Masks that have elements, as tensors."""

import torch
from torch import Tensor

from ..torch.tensors import additive, rows


def total_bias(mask: Tensor | None, position_bias: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores of q: the elements of a mask, a position bias, or both."""
    if mask is not None and mask.dtype is torch.bool:
        mask = additive(mask, q.dtype)
    bias = position_bias if mask is None else mask if position_bias is None else mask + position_bias
    if bias is None:
        return None
    return rows(bias if bias.dtype in (torch.float32, q.dtype) else bias.to(q.dtype))


def check_keys(shape: tuple[int, ...], k: Tensor) -> None:
    """A mask (..., seqlen_k) must be one of the keys (batch, seqlen_k, num_heads_k, head_dim)."""
    if shape[-1] != k.shape[1]:
        raise ValueError(
            f"attention_mask has shape {tuple(shape)}, but there are {k.shape[1]} keys: its last dimension must be as "
            "many. A model that makes it otherwise hides the wrong keys where there is padding"
        )
