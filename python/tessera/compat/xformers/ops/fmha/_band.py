"""Which keys a query sees, and the base class of all biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.compat.xformers.ops.fmha._seqlens import Device


class Band(NamedTuple):
    """The keys that a query sees in its block, beside its own position: so many to the left and right, -1 no limit."""

    left: int = -1
    right: int = -1
    top_left: bool = False  # query i stands at key i; else the last query stands at the last key

    def matrix(self, queries: int, keys: int, dtype: torch.dtype, device: Device) -> Tensor:
        """(queries, keys): 0 where the query sees the key, -inf elsewhere."""
        shift = 0 if self.top_left else keys - queries
        at = torch.arange(queries, device=device)[:, None] + shift
        key = torch.arange(keys, device=device)
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        if self.left >= 0:
            hidden |= key < at - self.left
        if self.right >= 0:
            hidden |= key > at + self.right
        return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


class AttentionBias:
    """Base class of what may be given as ``attn_bias`` instead of a tensor."""

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """What is added to the scores, (..., queries, keys) as `shape` says: O(queries * keys), to look at."""
        raise NotImplementedError(f"{type(self).__name__}.materialize")

    @property
    def band(self) -> Band:
        """Of every block."""
        raise NotImplementedError(f"{type(self).__name__}.band")


def check_positive(window_size: int) -> None:
    if window_size <= 0:
        raise ValueError(f"window_size = {window_size}: must be at least 1")


def check_window(window_left: int, window_right: int) -> None:
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window < 0:
            raise ValueError(f"{name} = {window}: must be at least 0")
