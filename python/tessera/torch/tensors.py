"""What is done to tensors on their way to the kernels."""

import math

import torch
from torch import Tensor


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that a boolean mask means: 0 where it is True, -inf where it is False; of the mask's own shape."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -math.inf)


def rows(x: Tensor) -> Tensor:
    """x, or one copy of it if its last stride is not 1, which the kernels need."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
