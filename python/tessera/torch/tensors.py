"""What is done to tensors on their way to the kernels."""

import math
from typing import Any

import torch
from torch import Tensor


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that a boolean mask means: 0 where it is True, -inf where it is False; of the mask's own shape."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -math.inf)


def refuse_gradients(function: str, instead: str = "", **tensors: Tensor | None) -> None:
    """Refuses tensors whose gradient autograd would ask for. instead: ends the error's text."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient: {function} has none; call it under torch.no_grad(){instead}"
            )


def signed(x: Any) -> Any:
    """x with the sign that torch has put off: the library reads memory as it lies."""
    return x.resolve_neg() if isinstance(x, Tensor) and x.is_neg() else x


def rows(x: Tensor) -> Tensor:
    """x, or one copy of it if its last stride is not 1, which the kernels need."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
