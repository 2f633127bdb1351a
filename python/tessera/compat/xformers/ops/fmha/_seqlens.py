"""How a dimension of tokens is divided into sequences: upstream's ``_SeqLenInfo``, ``_PaddedSeqLenInfo`` and
``_GappySeqInfo``. Every number is kept twice, for the host and on the device, so that nobody waits for the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Device = torch.device | str | None


def default_device(device: Device) -> torch.device:
    """Upstream puts a bias on the GPU if there is one, whatever tensors it will meet."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _lengths(name: str, seqlens: Iterable[int]) -> list[int]:
    if isinstance(seqlens, Tensor):
        raise TypeError(f"{name} is a tensor: must be a sequence of int, e.g. {name}.tolist()")
    lengths = list(seqlens)
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name}[{i}] = {length}: must be at least 0")
    return lengths


def _tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int32)
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@dataclass(eq=False)
class _SeqLenInfo:
    """Sequences one after another.

    Attributes:
        seqstart: int32 (sequences + 1), where each begins, and the total.
        max_seqlen, min_seqlen: the longest and the shortest; -1 without sequences.
        seqstart_py: seqstart for the host.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> _SeqLenInfo:
        lengths = _lengths("seqlens", seqlens)
        starts = _starts(lengths)
        return cls(_tensor(starts, default_device(device)), max(lengths, default=-1), min(lengths, default=-1), starts)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths, as many and none longer, in the same tensor: for CUDA graphs."""
        lengths = _lengths("seqlens", seqlens)
        _check_inplace(lengths, len(self.seqstart_py) - 1, self.max_seqlen)
        self.seqstart_py[:] = _starts(lengths)
        self.seqstart.copy_(torch.tensor(self.seqstart_py, dtype=torch.int32), non_blocking=True)

    def to(self, device: Device) -> _SeqLenInfo:
        return type(self)(self.seqstart.to(device), self.max_seqlen, self.min_seqlen, self.seqstart_py)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of every sequence."""
        yield from itertools.pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """(1, total, ...) to one tensor for every sequence, (1, length, ...); with `batch_sizes`, (size, length, ...)
        for so many neighbours of one length each."""
        total = self.seqstart_py[-1]
        if x.shape[0] != 1 or x.shape[1] != total:
            raise ValueError(f"the tensor to split has shape {tuple(x.shape)}: must be (1, {total}, ...)")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[i] for i in _starts(sizes)]
        parts = x.split([b - a for a, b in itertools.pairwise(ends)], dim=1)
        return [
            part.reshape(size, part.shape[1] // max(size, 1), *part.shape[2:])
            for part, size in zip(parts, sizes, strict=True)
        ]


@dataclass(eq=False)
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences in places of one size, each filled from its beginning.

    Attributes:
        seqstart, seqstart_py: of the places, 0, padding, 2 * padding, ...
        max_seqlen, min_seqlen: of what is filled.
        seqlen: int32 (sequences), how much is filled; seqlen_py for the host.
        padding: the size of a place.
    """

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> _SeqLenInfo:
        raise RuntimeError("_PaddedSeqLenInfo.from_seqlens: call from_seqlens_padded, or _SeqLenInfo.from_seqlens")

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device = None) -> _PaddedSeqLenInfo:
        lengths = _lengths("seqlens", seqlens)
        _check_padding(lengths, padding)
        device = default_device(device)
        starts = [padding * i for i in range(len(lengths) + 1)]
        return cls(
            seqstart=_tensor(starts, device),
            max_seqlen=max(lengths, default=-1),
            min_seqlen=min(lengths, default=-1),
            seqstart_py=starts,
            seqlen=_tensor(lengths, device),
            seqlen_py=lengths,
            padding=padding,
        )

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Other lengths in places of the same size, in the same tensors: for CUDA graphs."""
        lengths = _lengths("seqlens", seqlens)
        _check_padding(lengths, self.padding)
        _check_inplace(lengths, len(self.seqlen_py), self.max_seqlen)
        self.seqlen_py[:] = lengths
        self.seqlen.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)

    def to(self, device: Device) -> _PaddedSeqLenInfo:
        return type(self)(
            self.seqstart.to(device), self.max_seqlen, self.min_seqlen, self.seqstart_py, self.seqlen.to(device),
            self.seqlen_py, self.padding,
        )  # fmt: skip

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of what is filled."""
        yield from ((a, a + n) for a, n in zip(self.seqstart_py[:-1], self.seqlen_py, strict=True))

    def slots(self) -> Iterator[tuple[int, int]]:
        """The same, counted from each place's beginning."""
        yield from ((0, n) for n in self.seqlen_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError("_PaddedSeqLenInfo.split: padded sequences cannot be split, as upstream")


@dataclass(eq=False)
class _GappySeqInfo(_SeqLenInfo):
    """Sequences anywhere, in any order; they may even share tokens.

    Attributes:
        seqstart, seqstart_py: where each begins, and the total; of keys in pages among the sequence's own slots, and a
            number without a meaning.
        seqlen, seqlen_py: how long each is; of keys in pages where it ends.
    """

    seqlen: Tensor
    seqlen_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> _SeqLenInfo:
        raise NotImplementedError("_GappySeqInfo.from_seqlens: call from_seqlens_gappy")

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool = False, *, device: Device = None
    ) -> _GappySeqInfo:
        """`paged`: starts are slots of each sequence's own, without a total."""
        lengths, starts = _lengths("seqlens", seqlens), _lengths("seqstarts", seqstarts)
        count = len(lengths) + (0 if paged else 1)
        if len(starts) != count:
            total = "" if paged else ", the total at its end"
            raise ValueError(f"seqstarts has {len(starts)} numbers: must have {count}{total}")
        longest, shortest = max(lengths, default=-1), min(lengths, default=-1)
        if paged:
            lengths = [start + length for start, length in zip(starts, lengths, strict=True)]
            starts.append(-1)
        device = default_device(device)
        return cls(
            seqstart=_tensor(starts, device),
            max_seqlen=longest,
            min_seqlen=shortest,
            seqstart_py=starts,
            seqlen=_tensor(lengths, device),
            seqlen_py=lengths,
        )

    def to(self, device: Device) -> _GappySeqInfo:
        return type(self)(
            self.seqstart.to(device), self.max_seqlen, self.min_seqlen, self.seqstart_py, self.seqlen.to(device),
            self.seqlen_py,
        )  # fmt: skip

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of every sequence."""
        yield from ((a, a + n) for a, n in zip(self.seqstart_py[:-1], self.seqlen_py, strict=True))

    def slots(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of every sequence of keys in pages."""
        yield from zip(self.seqstart_py[:-1], self.seqlen_py, strict=True)

    def in_places_of(self, size: int) -> _GappySeqInfo:
        """The same of keys in pages, where each sequence has a place of that size."""
        starts = [start - i * size for i, start in enumerate(self.seqstart_py[:-1])]
        for i, (start, length) in enumerate(zip(starts, self.seqlen_py, strict=True)):
            if start < 0 or start + length > size:
                begin = self.seqstart_py[i]
                raise ValueError(
                    f"sequence {i} has the keys {begin}...{begin + length - 1}: must lie in its place, "
                    f"{i * size}...{(i + 1) * size - 1}"
                )
        ends = [start + length for start, length in zip(starts, self.seqlen_py, strict=True)]
        # On the device without the numbers here, as these may be changed in place there.
        places = torch.arange(len(starts) + 1, dtype=torch.int32, device=self.seqstart.device) * size
        seqstart = self.seqstart - places
        return dataclasses.replace(
            self, seqstart=seqstart, seqstart_py=[*starts, -1], seqlen=self.seqlen + seqstart[:-1], seqlen_py=ends
        )

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError("_GappySeqInfo.split: sequences with gaps cannot be split, as upstream")


def _check_padding(lengths: Sequence[int], padding: int) -> None:
    for i, length in enumerate(lengths):
        if length > padding:
            raise ValueError(f"seqlens[{i}] = {length}: must be at most padding = {padding}")


def _check_inplace(lengths: Sequence[int], count: int, longest: int) -> None:
    if len(lengths) != count:
        raise ValueError(f"seqlens has {len(lengths)} numbers: must have {count}, as before")
    if max(lengths, default=-1) > longest:
        raise ValueError(f"max(seqlens) = {max(lengths)}: must be at most {longest}, as before")
