"""What may be given as ``attn_bias``: upstream's ``xformers.ops.fmha.attn_bias``.

Every class says which keys a query sees, as a band of each block (:class:`Band`), and as a matrix for those who want to
look (``materialize``). Windows count keys: a window of n holds the query's own position and n - 1 before it, while
``window_left`` and ``window_right`` do not count it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tessera.compat.xformers.ops.fmha._band import AttentionBias, Band, check_positive, check_window
from tessera.compat.xformers.ops.fmha._blocks import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    _Blocks,
    _padded,
    _require_equal,
)
from tessera.compat.xformers.ops.fmha._seqlens import Device, _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "PagedBlockDiagonalCausalLocalPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "VARLEN_BIASES",
    "_Blocks",
    "_GappySeqInfo",
    "_PaddedSeqLenInfo",
    "_Paged",
    "_SeqLenInfo",
]

AnyOneBlock = TypeVar("AnyOneBlock", bound="_OneBlock")
AnyPaged = TypeVar("AnyPaged", bound="_Paged")


# ---- one block


class _OneBlock(AttentionBias):
    """A band of all queries and keys."""

    def to(self: AnyOneBlock, device: Device) -> AnyOneBlock:
        """Itself: it holds no tensor."""
        return self

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        return self.band.matrix(shape[-2], shape[-1], dtype, device).expand(tuple(shape))


class LowerTriangularMask(_OneBlock):
    """Causal, aligned to the top left: query i sees keys 0...i.

    Args:
        device: accepted and not needed.
    """

    def __init__(self, device: Device = None) -> None:
        pass

    @property
    def band(self) -> Band:
        return Band(right=0, top_left=True)

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """The same with a tensor added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """:class:`LowerTriangularMask` and a tensor that is added to the scores; its gradient reaches the tensor.

    Args:
        bias: as a tensor given as ``attn_bias``.
    """

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Device) -> LowerTriangularMaskWithTensorBias:
        return type(self)(self._bias.to(device))

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(_OneBlock):
    """Causal, aligned to the bottom right: the last query sees all keys."""

    @property
    def band(self) -> Band:
        return Band(right=0)

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The same, and of those keys only the nearest `_window_size`."""

    _window_size: int

    def __post_init__(self) -> None:
        check_positive(self._window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


@dataclass
class LocalAttentionFromBottomRightMask(_OneBlock):
    """A window, aligned to the bottom right: so many keys on each side of the query's own position."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_window(self.window_left, self.window_right)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)


# ---- pages


@dataclass(eq=False)
class _Paged(AttentionBias):
    """Keys in pages: slot s of sequence i is slot s % `page_size` of page `block_tables[i, s // page_size]`. key and
    value are (1, num_pages * page_size, ...). Forward only."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any
    block_tables: Tensor
    page_size: int

    @property
    def band(self) -> Band:
        return Band()

    def to(self: AnyPaged, device: Device) -> AnyPaged:
        infos = {"q_seqinfo": self.q_seqinfo.to(device), "k_seqinfo": self.k_seqinfo.to(device)}
        return dataclasses.replace(self, **infos, block_tables=self.block_tables.to(device))

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """`shape` ends with the queries and the slots of all rows of the table; the result has a column for every slot
        of the pages up to the highest number in the table instead."""
        table = self.block_tables.cpu().long()
        expected = self.q_seqinfo.seqstart_py[-1], table.numel() * self.page_size
        if tuple(shape[-2:]) != expected:
            raise ValueError(f"shape = {tuple(shape)}: must end with {expected}, the numbers of queries and slots")
        slots = (int(table.max()) + 1) * self.page_size if table.numel() > 0 else 0
        matrix = torch.full((expected[0], slots), float("-inf"), dtype=dtype, device=device)
        spans = zip(self.q_seqinfo.intervals(), self.k_seqinfo.slots(), table, strict=True)
        for (q, q_end), (first, end), pages in spans:
            at = torch.arange(first, end)
            columns = pages[at // self.page_size] * self.page_size + at % self.page_size
            matrix[q:q_end, columns.to(matrix.device)] = self.band.matrix(q_end - q, end - first, dtype, device)
        return matrix.expand(*shape[:-1], slots)


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """:class:`BlockDiagonalPaddedKeysMask` of keys in pages."""

    k_seqinfo: _PaddedSeqLenInfo
    _UNPAGED_TYPE: ClassVar[type[_Blocks]] = BlockDiagonalPaddedKeysMask

    @classmethod
    def from_seqlens(
        cls: type[AnyPaged],
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> AnyPaged:
        """Of the lengths of queries and keys, and where the keys' pages are."""
        return cls(*_padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device), block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalCausalWithOffsetPaddedKeysMask` of keys in pages."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetPaddedKeysMask

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass(eq=False)
class PagedBlockDiagonalCausalLocalPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalCausalLocalAttentionPaddedKeysMask` of keys in pages."""

    _window_size: int
    _UNPAGED_TYPE = BlockDiagonalCausalLocalAttentionPaddedKeysMask

    def __post_init__(self) -> None:
        check_positive(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        window_size: int,
        *,
        device: Device = None,
    ) -> PagedBlockDiagonalCausalLocalPaddedKeysMask:
        infos = _padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device)
        return cls(*infos, block_tables, page_size, window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


@dataclass(eq=False)
class PagedBlockDiagonalGappyKeysMask(_Paged):
    """:class:`BlockDiagonalGappyKeysMask` of keys in pages, whose starts count from each sequence's first page."""

    k_seqinfo: _GappySeqInfo
    _UNPAGED_TYPE: ClassVar[type[_Blocks]] = BlockDiagonalGappyKeysMask

    @classmethod
    def from_seqlens(
        cls: type[AnyPaged],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> AnyPaged:
        """Of the queries' lengths, where each sequence's keys begin among its own slots, and how many there are."""
        _require_equal(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        k_seqinfo = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), k_seqinfo, block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """:class:`BlockDiagonalCausalWithOffsetGappyKeysMask` of keys in pages."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetGappyKeysMask

    @property
    def band(self) -> Band:
        return Band(right=0)


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
