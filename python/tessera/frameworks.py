"""Which module serves a tensor's framework. torch's are imported once torch is there."""

import sys
from typing import Any

# torch.Tensor and what computes with it.
Tensor: Any = ()
torch_ops: Any = None
torch_cache: Any = None
torch_scaled: Any = None
torch_quantize: Any = None
torch_precision: Any = None
torch_latent: Any = None


def bind_torch() -> None:
    global Tensor, torch_ops, torch_cache, torch_scaled, torch_quantize, torch_precision, torch_latent
    import torch

    from .torch import cache, latent, ops, precision, quantize, scaled

    Tensor, torch_ops, torch_cache, torch_scaled = torch.Tensor, ops, cache, scaled
    torch_quantize, torch_precision, torch_latent = quantize, precision, latent


def framework_of(tensor: Any, name: str = "q") -> Any:
    """The module that serves a tensor's framework."""
    if isinstance(tensor, Tensor):
        return torch_ops
    if "torch" in sys.modules and torch_ops is None:
        bind_torch()
        return framework_of(tensor, name)
    if hasattr(tensor, "__dlpack__"):
        from . import arrays

        return arrays
    raise TypeError(
        f"{name} is of type {type(tensor).__name__!r}: must be a torch tensor, a NumPy array, or a JAX array on the CPU"
    )


def cache_module(tensor: Any, name: str) -> Any:
    """The module of caches, which are torch tensors."""
    if framework_of(tensor, name) is not torch_ops:
        raise TypeError(f"{name} is of type {type(tensor).__name__!r}: a cache must be of torch tensors")
    return torch_cache


def latent_module(tensor: Any) -> Any:
    """The module of attention with a second query."""
    framework = framework_of(tensor)
    return torch_latent if framework is torch_ops else framework


def scaled_module(tensor: Any) -> Any:
    """The module of 8-bit tensors."""
    framework = framework_of(tensor)
    return torch_scaled if framework is torch_ops else framework


def quantize_module(tensor: Any, name: str) -> Any:
    """The module that makes 8-bit tensors."""
    if framework_of(tensor, name) is torch_ops:
        return torch_quantize
    from . import array_quantize

    return array_quantize


def precision_module(tensor: Any) -> Any:
    """The module of attention that computes with 8 bits."""
    return torch_precision if framework_of(tensor) is torch_ops else quantize_module(tensor, "q")
