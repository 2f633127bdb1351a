"""What may be given as ``attn_bias``: upstream's ``xformers.ops.fmha.attn_bias``.

Every class says which keys a query sees, as a band of each block (:class:`Band`), and as a matrix for those who want to
look (``materialize``). Windows count keys: a window of n holds the query's own position and n - 1 before it, while
``window_left`` and ``window_right`` do not count it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from tessera.compat.xformers.ops.fmha._seqlens import (
    Device,
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
    default_device,
)

AnyOneBlock = TypeVar("AnyOneBlock", bound="_OneBlock")
AnyBlocks = TypeVar("AnyBlocks", bound="_Blocks")


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


def _positive(window_size: int) -> None:
    if window_size <= 0:
        raise ValueError(f"window_size = {window_size}: must be at least 1")


def _check_window(window_left: int, window_right: int) -> None:
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window < 0:
            raise ValueError(f"{name} = {window}: must be at least 0")


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
        _positive(self._window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


@dataclass
class LocalAttentionFromBottomRightMask(_OneBlock):
    """A window, aligned to the bottom right: so many keys on each side of the query's own position."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _check_window(self.window_left, self.window_right)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)


# ---- blocks: sequences packed one after another


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
        _positive(self._window_size)
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
        _positive(self._window_size)

    @property
    def band(self) -> Band:
        return Band(left=self._window_size - 1, right=0)


# ---- blocks of keys that are used in part


_NO_PAGES = (
    "Tessera has no pages yet: gather each sequence's pages into one run of keys, which BlockDiagonal{}Mask takes"
)


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

    def make_paged(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}.make_paged: {_NO_PAGES.format('PaddedKeys')}")

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
        _check_window(self.window_left, self.window_right)

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
        _positive(self._window_size)

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

    def make_paged(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}.make_paged: {_NO_PAGES.format('GappyKeys')}")


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same and causal, aligned to the bottom right of each sequence's keys."""

    @property
    def band(self) -> Band:
        return Band(right=0)


# ---- pages


class _Paged(AttentionBias):
    """Not there: raises NotImplementedError. The names exist because callers ask for them with isinstance."""

    _UNPAGED_TYPE: type[_Blocks]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {_NO_PAGES.format(self._keys())}")

    @classmethod
    def from_seqlens(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__}.from_seqlens: {_NO_PAGES.format(cls._keys())}")

    @classmethod
    def _keys(cls) -> str:
        return "PaddedKeys" if issubclass(cls._UNPAGED_TYPE, BlockDiagonalPaddedKeysMask) else "GappyKeys"


class PagedBlockDiagonalPaddedKeysMask(_Paged):
    __doc__ = _Paged.__doc__
    _UNPAGED_TYPE = BlockDiagonalPaddedKeysMask


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    __doc__ = _Paged.__doc__
    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetPaddedKeysMask


class PagedBlockDiagonalGappyKeysMask(_Paged):
    __doc__ = _Paged.__doc__
    _UNPAGED_TYPE = BlockDiagonalGappyKeysMask


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    __doc__ = _Paged.__doc__
    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetGappyKeysMask


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
