"""What the mask functions of transformers are made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

MaskFunction = Callable[..., Any]


class Structure(NamedTuple):
    """A query at position p sees keys p - left ... p + right, -1 unbounded; with `segments` only those of its own.

    segments: integers (batch, seqlen), equal for tokens of the same packed sequence.
    positions: integers (batch, seqlen), what the mask function takes for the positions of tokens. With `segments` only:
        where they count up by one inside of each, the window is the same.
    empty: no query sees any key, whatever the rest says.
    """

    left: int = -1
    right: int = -1
    segments: Tensor | None = None
    positions: Tensor | None = None
    empty: bool = False

    @property
    def bounded(self) -> bool:
        return self.left >= 0 or self.right >= 0


def _both(a: Structure, b: Structure) -> Structure | None:
    """What is visible in both."""
    if a.empty or b.empty:
        return Structure(empty=True)
    tensors = ((a.segments, b.segments), (a.positions, b.positions))
    if any(x is not None and y is not None for x, y in tensors):
        return None
    left, right = (max(x, y) if min(x, y) < 0 else min(x, y) for x, y in ((a.left, b.left), (a.right, b.right)))
    segments, positions = (y if x is None else x for x, y in tensors)
    return Structure(left, right, segments, positions)


def structure_of(mask_function: MaskFunction) -> Structure | None:
    """The structure of one of transformers' own mask functions; None for every other."""
    if mask_function is causal_mask_function:
        return Structure(right=0)
    if mask_function is bidirectional_mask_function:
        return Structure()
    if getattr(mask_function, "__module__", None) != sdpa_mask.__module__ or not hasattr(mask_function, "__closure__"):
        return None
    maker = mask_function.__qualname__.partition(".")[0]
    names = mask_function.__code__.co_freevars
    made_of = dict(zip(names, (cell.cell_contents for cell in mask_function.__closure__ or ()), strict=True))
    match maker, made_of:
        case "sliding_window_overlay", {"sliding_window": int(size)} if size >= 0:
            # Some configurations say 0 for a window that no layer has.
            return Structure(left=size - 1) if size > 0 else Structure(empty=True)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)} if size >= 0:
            return Structure(left=size, right=size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as segments}:
            return Structure(segments=segments)
        case "remap_positions_for_packed_sequence", {"mask_function": function, "position_ids": Tensor() as positions}:
            within = structure_of(function)
            if within is not None and within.segments is None and within.positions is None:
                return within._replace(positions=positions) if within.bounded else within
        case "and_masks", {"mask_functions": tuple(parts)}:
            whole: Structure | None = Structure()
            for part in parts:
                structure = structure_of(part)
                whole = None if whole is None or structure is None else _both(whole, structure)
            return whole
    return None


@torch.compiler.assume_constant_result
def _constant_structure(mask_function: MaskFunction) -> tuple[int, int, bool] | None:
    """The same when torch.compile traces, which hands over functions that are made of constants only."""
    structure = structure_of(mask_function)
    plain = structure is not None and structure.segments is None and structure.positions is None
    return (structure.left, structure.right, structure.empty) if structure is not None and plain else None


def visible_structure(mask_function: MaskFunction, skip: bool, config: Any) -> Structure | None:
    if not torch.compiler.is_compiling():
        return structure_of(mask_function)
    if mask_function is causal_mask_function:
        return Structure(right=0)
    # torch.compile hands over no functions that hold tensors: packed sequences and overlays, with which nothing may be
    # skipped, and chunks.
    if not skip or getattr(config, "attention_chunk_size", None) is not None:
        return None
    constants = _constant_structure(mask_function)
    if constants is None:
        return None
    left, right, empty = constants
    return Structure(left, right, empty=empty)
