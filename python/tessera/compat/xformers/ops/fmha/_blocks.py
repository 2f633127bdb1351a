"""Biases of blocks: sequences packed one after another, and keys that are used in part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tessera.compat.xformers.ops.fmha._band import AttentionBias, Band, check_positive, check_window
from tessera.compat.xformers.ops.fmha._seqlens import (
    Device,
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
    default_device,
)

if TYPE_CHECKING:
    from tessera.compat.xformers.ops.fmha.attn_bias import (
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
        _Paged,
    )

AnyPaged = TypeVar("AnyPaged", bound="_Paged")
AnyBlocks = TypeVar("AnyBlocks", bound="_Blocks")


class _Blocks(AttentionBias):
    """Block i of the queries sees block i of the keys, or a band of it."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    @property
    def band(self) -> Band:
        return Band()

    def to(self: AnyBlocks, device: Device) -> AnyBlocks:
        q_seqinfo = self.q_seqinfo.to(device)
        k_seqinfo = q_seqinfo if self.k_seqinfo is self.q_seqinfo else self.k_seqinfo.to(device)
        return dataclasses.replace(self, q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo)  # type: ignore[type-var]

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        totals = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if tuple(shape[-2:]) != totals:
            raise ValueError(f"shape = {tuple(shape)}: must end with {totals}, the numbers of queries and keys")
        matrix = torch.full(totals, float("-inf"), dtype=dtype, device=device)
        for (q, q_end), (k, k_end) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            matrix[q:q_end, k:k_end] = self.band.matrix(q_end - q, k_end - k, dtype, device)
        return matrix.expand(tuple(shape))

    def _lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of every block."""
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        return [(q_end - q, k_end - k) for (q, q_end), (k, k_end) in pairs]


def _require_equal(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(f"kv_seqlen has {len(kv_seqlen)} numbers: must have {len(q_seqlen)}, as q_seqlen")


@dataclass(eq=False)
class BlockDiagonalMask(_Blocks):
    """Sequences of any lengths, packed in a batch of 1: query, key and value are (1, total, ...)."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None  # how many neighbours of one length each tensor had, for split

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device = None
    ) -> BlockDiagonalMask:
        """Of the lengths of the sequences; `kv_seqlen` None: the keys' are the queries'."""
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(q_seqinfo=q_seqinfo, k_seqinfo=q_seqinfo)
        _require_equal(q_seqlen, kv_seqlen)
        return cls(q_seqinfo=q_seqinfo, k_seqinfo=_SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """Of tensors (batch_i, length_i, ...), and they one after another, (1, total, ...)."""
        mask = cls.from_seqlens(_lengths_of(tensors))
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _concatenated(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[BlockDiagonalMask, Tensor, Tensor, Tensor | None]:
        """The same of queries, keys and values, whose lengths may differ."""
        for name, others in (("tensors_k", tensors_k), ("tensors_v", tensors_v)):
            if others is None:
                continue
            if len(others) != len(tensors_q):
                raise ValueError(f"{name} has {len(others)} tensors: must have {len(tensors_q)}, as tensors_q")
            for i, (x, q, k) in enumerate(zip(others, tensors_q, tensors_k, strict=True)):
                expected = q.shape[0], k.shape[1]
                if tuple(x.shape[:2]) != expected:
                    raise ValueError(f"{name}[{i}] has shape {tuple(x.shape)}: must begin with {expected}")
        mask = cls.from_seqlens(_lengths_of(tensors_q), _lengths_of(tensors_k))
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        values = None if tensors_v is None else _concatenated(tensors_v)
        return mask, _concatenated(tensors_q), _concatenated(tensors_k), values

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """(1, total, ...) to the tensors that it was made of."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("split: queries and keys have lengths of their own; call split_queries or split_kv")
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _lengths_of(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


@dataclass(eq=False)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block is causal, aligned to the top left."""

    @property
    def band(self) -> Band:
        return Band(right=0, top_left=True)


@dataclass(eq=False)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block is causal, aligned to the bottom right. No block may have more queries than keys, as upstream."""

    def __post_init__(self) -> None:
        for i, (queries, keys) in enumerate(self._lengths()):
            if queries > keys:
                raise ValueError(f"block {i} has {queries} queries and {keys} keys: must have no fewer keys")

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each block is causal, aligned to the top left: query i sees keys i - `_window_size` + 1...i."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_positive(self._window_size)
        for i, (queries, keys) in enumerate(self._lengths()):
            if queries - self._window_size >= keys:
                raise RuntimeError(  # upstream's kind of error
                    f"block {i} has {queries} queries and {keys} keys: with window_size = {self._window_size} its last "
                    "query would see no key"
                )

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0, top_left=True)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same, aligned to the bottom right."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self._window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


# ---- blocks of keys that are used in part


@dataclass(eq=False)
class BlockDiagonalPaddedKeysMask(_Blocks):
    """Keys in places of one size, each filled from its beginning; what is not filled is not seen."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> BlockDiagonalPaddedKeysMask:
        """Of the queries' lengths, the size of a place and how much of each is filled.

        Args:
            causal_diagonal: accepted and not used, as upstream.
        """
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(
        self, block_tables: Tensor, page_size: int, paged_type: type[PagedBlockDiagonalPaddedKeysMask]
    ) -> PagedBlockDiagonalPaddedKeysMask:
        """The same of keys in pages: `paged_type` must be the class of pages that means the same band."""
        k_seqinfo = dataclasses.replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return _make_paged(self, paged_type, k_seqinfo, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Device
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    _require_equal(q_seqlen, kv_seqlen)
    return (
        _SeqLenInfo.from_seqlens(q_seqlen, device=device),
        _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device),
    )


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same and causal, aligned to the bottom right of what is filled."""

    causal_diagonal: Any = None  # not used, as upstream

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """A window, aligned to the bottom right of what is filled."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_window(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: Device = None,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device), window_left, window_right)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, aligned to the bottom right of what is filled, and only the nearest `_window_size` keys."""

    _window_size: int

    def __post_init__(self) -> None:
        check_positive(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
        *,
        device: Device = None,
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device), window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


@dataclass(eq=False)
class BlockDiagonalGappyKeysMask(_Blocks):
    """Keys that begin anywhere: with gaps between the sequences, in any order, shared by several of them."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
    ) -> BlockDiagonalGappyKeysMask:
        """Of the queries' lengths, where each sequence's keys begin, with their total at the end, and how many."""
        _require_equal(q_seqlen, kv_seqlen)
        device = default_device(device)
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device),
        )

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedBlockDiagonalGappyKeysMask],
    ) -> PagedBlockDiagonalGappyKeysMask:
        """The same of keys in pages, where sequence i is described as beginning behind i * `notional_padding`."""
        if notional_padding % page_size != 0:
            raise ValueError(f"notional_padding = {notional_padding}: must be a multiple of page_size = {page_size}")
        k_seqinfo = self.k_seqinfo.in_places_of(notional_padding)
        return _make_paged(self, paged_type, k_seqinfo, block_tables, page_size)


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same and causal, aligned to the bottom right of each sequence's keys."""

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass(eq=False)
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(BlockDiagonalGappyKeysMask):
    """A window, aligned to the bottom right of each sequence's keys."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_window(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local_gappy(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        device: Device = None,
    ) -> BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask:
        whole = BlockDiagonalGappyKeysMask.from_seqlens(q_seqlen, kv_seqstarts, kv_seqlen, device=device)
        return cls(whole.q_seqinfo, whole.k_seqinfo, window_left, window_right)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)


def _make_paged(
    bias: _Blocks, paged_type: type[AnyPaged], k_seqinfo: Any, block_tables: Tensor, page_size: int
) -> AnyPaged:
    if getattr(paged_type, "_UNPAGED_TYPE", None) is not type(bias):
        raise ValueError(
            f"paged_type = {paged_type.__name__}: its keys or its band are not those of {type(bias).__name__}"
        )
    window = {"_window_size": bias._window_size} if hasattr(bias, "_window_size") else {}
    return paged_type(bias.q_seqinfo, k_seqinfo, block_tables, page_size, **window)
