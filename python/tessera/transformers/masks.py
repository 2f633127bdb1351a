"""The mask of a forward pass, without its elements wherever that can be."""

import warnings
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from .. import attention
from ..torch import padding
from ..torch.tensors import additive
from .decode import DecodeMask
from .elements import check_keys, total_bias
from .shape import ShapedMask
from .structure import MaskFunction, Structure, visible_structure


class QuadraticMaskWarning(UserWarning):
    """A mask of seqlen_q by seqlen_k elements was made."""


_NO_ELEMENTS = (
    "has no elements, and this model computes with them: an attention of its own, which Tessera does not replace; "
    "use attn_implementation='eager'"
)


class Mask(ShapedMask):
    """A mask of (batch, 1, seqlen_q, seqlen_k) that has no elements.

    Whoever computes with it as with a tensor is told what it is.

    Attributes:
        shape: (batch, 1, seqlen_q, seqlen_k).
        keys: how many of the keys matter; those after them are seen by no query.
        window: (left, right), as `tessera.attention` has it.
        alignment: as `tessera.attention` has it; None if none puts queries where they belong, and only pieces do.
        keep: boolean (batch, keys), which keys are no padding, or None for all.
        pieces: the same as packed sequences, or None. The window holds inside them, aligned at the bottom right.
        last: what the last query sees, if it is padding of some sequence and the pieces give it nothing; or None.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        keys: int,
        window: tuple[int, int],
        alignment: str | None,
        keep: Tensor | None = None,
        pieces: padding.Pieces | None = None,
        last: DecodeMask | None = None,
    ) -> None:
        super().__init__(shape)
        self.keys, self.window, self.alignment = keys, window, alignment
        self.keep, self.pieces, self.last = keep, pieces, last
        self._bias: Tensor | None = None

    def to(self, device: torch.device | str, **_: Any) -> "Mask":
        keep = None if self.keep is None else self.keep.to(device)
        pieces = None if self.pieces is None else padding.Pieces(*(x.to(device) for x in self.pieces))
        last = None if self.last is None else self.last.to(device)
        return Mask(self._shape, self.keys, self.window, self.alignment, keep, pieces, last)

    def __getitem__(self, index: Any) -> "Mask":
        """The mask of the last queries only; of other parts there is none."""
        parts = index if isinstance(index, tuple) else (index,)
        ranges = [x.indices(n) if isinstance(x, slice) else None for x, n in zip(parts, self._shape, strict=False)]
        full = [x == (0, n, 1) for x, n in zip(ranges, self._shape, strict=False)]
        if len(parts) > 4:
            self._no_elements()
        if all(full):
            return self
        queries = ranges[2] if len(ranges) > 2 and all(full[:2] + full[3:]) else None
        # Pieces are cut from what to keep, but for packed sequences.
        known = self.alignment == "bottom_right" and (self.pieces is None or self.keep is not None)
        if queries is not None and queries[1:] == (self._shape[2], 1) and known:
            shape = (*self._shape[:2], queries[1] - queries[0], self._shape[3])
            return Mask(shape, self.keys, self.window, self.alignment, self.keep)
        self._no_elements()

    def _no_elements(self, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{self} {_NO_ELEMENTS}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_elements
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = _no_elements
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_elements
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotImplementedError(f"a mask of Tessera given to {getattr(func, '__name__', func)} {_NO_ELEMENTS}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a mask of Tessera, asked for {name!r}, {_NO_ELEMENTS}")

    def __repr__(self) -> str:
        kind = "packed" if self.pieces is not None else "all keys" if self.keep is None else "key bias"
        return f"Mask(shape={self._shape}, keys={self.keys}, window={self.window}, {self.alignment}, {kind})"

    __str__ = __repr__

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, **options: Any) -> Tensor:
        """Attention of (batch, seqlen, heads, head_dim) tensors."""
        if self._shape[3] != k.shape[1]:
            # A model whose first layer is no attention may ask for a mask of the new key alone.
            if self._shape[2:] != (1, 1) or self.keep is not None:
                check_keys(self._shape, k)
            everything: Tensor = attention(q, k, v, bias=total_bias(None, position_bias, q), **options)
            return everything
        if k.shape[1] != self.keys:
            k, v = k[:, : self.keys], v[:, : self.keys]
        if self.pieces is not None and position_bias is None:
            o = padding.attend(q, k, v, self.pieces, window=self.window, **options)
            if self.last is not None and not torch.is_grad_enabled():
                # generate() goes on from there, whatever it is.
                o[:, -1:] = self.last.attend(q[:, -1:], k, v, None, **options)
            return o
        if self.alignment is None:
            raise NotImplementedError("position_bias is given, but only the device knows where the queries are")
        if self.keep is not None and (self._bias is None or self._bias.dtype is not q.dtype):
            self._bias = additive(self.keep[:, None, None], q.dtype)
        bias = total_bias(self._bias, None if position_bias is None else position_bias[..., : self.keys], q)
        biased: Tensor = attention(q, k, v, window=self.window, alignment=self.alignment, bias=bias, **options)
        return biased


class _Case(NamedTuple):
    """One question for a mask, whose structure was recognised. Positions of keys count from the first key."""

    shape: tuple[int, int, int, int]
    structure: Structure
    shift: int | Tensor  # position of the first query; a tensor if only the device knows it
    keys: int  # how many keys matter
    keep: Tensor | None  # boolean (batch, keys); None: all

    @property
    def rows(self) -> int:
        return self.shape[2]

    @property
    def aligned(self) -> str | None:
        """The kernels' alignment that puts queries at their positions; None if there is none."""
        if isinstance(self.shift, Tensor):
            return None if self.structure.bounded else "bottom_right"
        if self.shift == self.keys - self.rows or not self.structure.bounded:
            return "bottom_right"
        return "top_left" if self.shift == 0 else None


def _case(
    shape: tuple[int, int, int, int],
    structure: Structure,
    q_offset: int | Tensor,
    kv_offset: int,
    padding_mask: Tensor | None,
) -> _Case:
    keys, shift = shape[3], q_offset - kv_offset
    if structure.empty:
        return _Case(shape, Structure(), shift, 0, None)
    if not isinstance(shift, Tensor) and structure.left >= shift + shape[2] - 1:
        structure = structure._replace(left=-1)  # a window that reaches to the first key for every query
    if padding_mask is not None:
        keys = min(keys, max(padding_mask.shape[1] - kv_offset, 0))
    if structure.right >= 0 and not isinstance(shift, Tensor):
        keys = min(keys, max(shift + shape[2] + structure.right, 0))
    keep = None if padding_mask is None else padding_mask[:, kv_offset : kv_offset + keys]
    return _Case(shape, structure, shift, keys, keep)


def _look(keep: Tensor) -> tuple[bool, bool, bool]:
    """Whether all is True, whether what is True is one run in each row, and whether all rows end so. Waits for the
    device."""
    found = [keep.all(), padding.has_runs(keep).all(), keep[:, -1:].all()]
    all_true, one_run, to_the_end = torch.stack(found).tolist()
    return all_true, one_run, to_the_end


def _prefix(case: _Case, dtype: torch.dtype, device: Any) -> DecodeMask | None:
    """The mask of one query a sequence that sees the first keys up to its own, and others follow; else None."""
    if case.rows != 1 or case.keep is not None or case.structure.right != 0:
        return None
    (batch, *_, seqlen_k), shift = case.shape, case.shift
    if isinstance(shift, Tensor):
        seqlens = (shift + 1).clamp(max=seqlen_k).to(torch.int32).repeat(batch)
    elif shift + 1 < seqlen_k:
        # Not `keys`: a number that changes from step to step would have a compiled model compiled anew.
        seqlens = torch.full((batch,), shift + 1, dtype=torch.int32, device=device)
    else:
        return None
    return DecodeMask(case.shape, dtype, seqlens, (case.structure.left, 0))


def _mask(case: _Case, dtype: torch.dtype) -> Mask | None:
    """The mask without its elements, if that can be. None if it cannot, or if it is of one row with padding."""
    tracing = is_tracing(case.keep)
    if case.structure.segments is not None or case.structure.positions is not None:
        pieces = None if tracing else _segments(case)
        return None if pieces is None else Mask(case.shape, case.keys, case.structure[:2], case.aligned, None, pieces)
    runs, to_the_end = False, True
    if case.rows == 1 and case.keep is not None:
        return None
    if case.keep is not None and not tracing:
        whole, runs, to_the_end = _look(case.keep)
        if whole:
            case = case._replace(keep=None)
        elif not runs and isinstance(case.shift, Tensor):
            case = _case(case.shape, case.structure, int(case.shift), 0, case.keep)
    pieces = None
    if case.rows > 1 and (runs or (case.keep is None and case.aligned is None)):
        pieces = _cut(case)
    if pieces is None and case.aligned is None:
        return None
    last = None if to_the_end or pieces is None or not case.structure.bounded else _last(case, dtype)
    return Mask(case.shape, case.keys, case.structure[:2], case.aligned, case.keep, pieces, last)


def _last(case: _Case, dtype: torch.dtype) -> DecodeMask:
    """What the last query sees, if it counts or not."""
    assert case.keep is not None
    at, position = torch.arange(case.keys, device=case.keep.device), case.shift + case.rows - 1
    visible, (left, right) = case.keep, case.structure[:2]
    if left >= 0:
        visible = visible & (at >= position - left)
    if right >= 0:
        visible = visible & (at <= position + right)
    return DecodeMask((case.shape[0], 1, 1, case.keys), dtype, visible=visible[:, None, None])


def _segments(case: _Case) -> padding.Pieces | None:
    """The pieces of packed sequences. Waits for the device: their number is a shape."""
    segments, positions = case.structure.segments, case.structure.positions
    if segments is None or case.keep is not None or isinstance(case.shift, Tensor) or case.shift != 0:
        return None
    if segments.shape != (case.shape[0], case.rows) or case.keys != case.rows:
        return None
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if positions is not None and not bool((begins[:, 1:] | (positions.diff() == 1)).all()):
        return None
    at = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([at, at.new_full((1,), segments.numel())]).to(torch.int32)
    return padding.Pieces(cu_seqlens, cu_seqlens)


def _cut(case: _Case) -> padding.Pieces | None:
    """The pieces that are no padding, so that the last query that counts stands at the last key that counts."""
    (batch, _, seqlen_q, _), seqlen_k, shift = case.shape, case.keys, case.shift
    if case.keep is not None:
        first, end = padding.runs(case.keep)
    elif isinstance(shift, Tensor):
        first = torch.zeros(batch, dtype=torch.int64, device=shift.device)
        end = first + seqlen_k
    else:
        return None
    if not case.structure.bounded:
        return padding.cut_keys(first, end, seqlen_q, seqlen_k)
    if case.structure.right > 0 and not (case.aligned == "bottom_right" and seqlen_q == seqlen_k):
        return None
    end = end.clamp(max=shift + seqlen_q)
    first = first.minimum(end)
    first_q, end_q = ((x - shift).clamp(0, seqlen_q) for x in (first, end))
    return padding.cut_both(first_q, end_q, seqlen_q, first, end, seqlen_k)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> Mask | DecodeMask | Tensor:
    """What the layers get as their attention_mask.

    Args:
        batch_size, q_length, kv_length: the mask is of (batch_size, 1, q_length, kv_length).
        q_offset: position of the first query; a tensor if only the device knows it, as with static caches.
        kv_offset: position of the first key.
        mask_function: of (batch, head, query position, key position), whether the query attends to the key.
        attention_mask: boolean (batch_size, seqlen), False at padding; positions after it are padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether transformers' sdpa might leave a causal, or a full,
            mask out. If neither, it is packed sequences that forbid it, or else the model wants elements.
        dtype: of elements.
        config: the model's.
        kwargs: handed on to transformers' sdpa_mask.

    Returns:
        A `Mask`; a `DecodeMask`, if there is one query; or a bias of `dtype`, (batch_size, 1, q_length, kv_length).
        Never None: an attention that is not Tessera's could take that for a mask that hides nothing.
    """
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    structure = visible_structure(mask_function, skip, config)
    shape = (batch_size, 1, q_length, kv_length)
    # A static cache's steps may skip nothing, either.
    if structure is not None and (skip or q_length == 1 or structure.empty or structure.segments is not None):
        case = _case(shape, structure, q_offset, kv_offset, attention_mask)
        mask = _prefix(case, dtype, kwargs.get("device")) or _mask(case, dtype)
        if mask is not None:
            return mask
    elements = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip
    assert elements is not None
    if q_length == 1:
        return DecodeMask(shape, dtype, visible=elements.expand(batch_size, -1, -1, -1))
    _warn(f"a mask of {batch_size} x {q_length} x {kv_length} elements was made; see help(tessera.transformers)")
    return additive(elements, dtype)


@torch.compiler.assume_constant_result
def _warn(text: str) -> None:
    """Also while compiling."""
    warnings.warn(text, QuadraticMaskWarning, stacklevel=4)
