"""What masks without elements have of a tensor: a shape."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import Self


class ShapedMask(BlockMask):
    """It is a BlockMask because that is the one prepared mask besides a tensor that transformers hands on untouched."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        # Not BlockMask.__init__: there are no blocks.
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self._shape) if dim is None else self._shape[dim]

    def contiguous(self) -> Self:
        return self
