"""Tessera for Hugging Face transformers (5.x): attn_implementation="tessera".

Importing this module registers two functions under that name: `attention_forward`, which computes a layer's attention,
and `attention_mask`, which is asked once per forward pass and kind of layer what its mask is.

What the mask becomes. transformers describes a mask by a function of positions. The ones it builds itself from
causality, sliding windows and packed sequences are recognised by what they are made of, and become arguments of the
kernels: a `Mask`, which holds no matrix. A padding mask comes on top of it:

    no padding                      nothing, and `None` for the whole mask where transformers' sdpa has None, too
    one run of tokens a sequence    packed pieces, cut on the device (tessera/torch/padding.py)
    anything else                   a bias of (batch, 1, 1, seqlen_k), exact for any padding

To tell these apart the host looks at the padding mask once per forward pass and kind of layer, as transformers' own
sdpa does. Where it must not look (torch.compile, torch.export, a CUDA graph being captured) it takes the bias.

A single query has a mask of one row, which costs nothing: it always becomes a bias, computed by transformers itself.

Every other mask (chunks, images that see themselves, a user's or_mask_function or and_mask_function, windows and packed
sequences that torch.compile hides) becomes a bias of (batch, 1, seqlen_q, seqlen_k), which transformers' eager and sdpa
masks are as well. It is exact, but it is quadratic, so `QuadraticMaskWarning` says so, once; turn it into an error with
warnings.simplefilter("error", QuadraticMaskWarning).

Outputs at padding tokens mean nothing in any implementation. Here they are zero in causal layers.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from . import attention
from .torch import padding
from .torch.tensors import additive, rows

MaskFunction = Callable[..., Any]


class QuadraticMaskWarning(UserWarning):
    """A mask of seqlen_q by seqlen_k elements was made."""


def register(name: str = "tessera") -> None:
    """Make `attn_implementation=name` known to transformers. Importing this module has done it for "tessera"."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# ---- what a mask function is made of


class Structure(NamedTuple):
    """A query at position p sees keys p - left ... p + right, -1 unbounded; with `segments` only those of its own.

    segments: integers (batch, seqlen), equal for tokens of the same packed sequence.
    """

    left: int = -1
    right: int = -1
    segments: Tensor | None = None

    @property
    def bounded(self) -> bool:
        return self.left >= 0 or self.right >= 0


def _both(a: Structure, b: Structure) -> Structure | None:
    """What is visible in both."""
    if a.segments is not None and b.segments is not None:
        return None
    left, right = (max(x, y) if min(x, y) < 0 else min(x, y) for x, y in ((a.left, b.left), (a.right, b.right)))
    return Structure(left, right, b.segments if a.segments is None else a.segments)


def _structure(mask_function: MaskFunction) -> Structure | None:
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
        case "sliding_window_overlay", {"sliding_window": int(size)} if size > 0:
            return Structure(left=size - 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)} if size >= 0:
            return Structure(left=size, right=size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as segments}:
            return Structure(segments=segments)
        case "and_masks", {"mask_functions": tuple(parts)}:
            whole: Structure | None = Structure()
            for part in parts:
                structure = _structure(part)
                whole = None if whole is None or structure is None else _both(whole, structure)
            return whole
    return None


@torch.compiler.assume_constant_result
def _constant_structure(mask_function: MaskFunction) -> tuple[int, int] | None:
    """The same when torch.compile traces, which hands over functions that are made of constants only."""
    structure = _structure(mask_function)
    return None if structure is None else (structure.left, structure.right)


# ---- the mask


class Mask(BlockMask):
    """A mask of (batch, 1, seqlen_q, seqlen_k) that has no elements.

    It is a BlockMask because that is the one prepared mask besides a tensor that transformers hands on untouched.

    Attributes:
        shape: (batch, 1, seqlen_q, seqlen_k).
        keys: how many of the keys matter; those after them are seen by no query.
        window: (left, right), as `tessera.attention` has it.
        alignment: as `tessera.attention` has it; None if none puts queries where they belong, and only pieces do.
        keep: boolean (batch, keys), which keys are no padding, or None for all.
        pieces: the same as packed sequences, or None. The window holds inside them, aligned at the bottom right.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        keys: int,
        window: tuple[int, int],
        alignment: str | None,
        keep: Tensor | None = None,
        pieces: padding.Pieces | None = None,
    ) -> None:
        # Not BlockMask.__init__: there are no blocks.
        self._shape, self.keys, self.window, self.alignment = shape, keys, window, alignment
        self.keep, self.pieces = keep, pieces
        self._bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def to(self, device: torch.device | str) -> "Mask":
        keep = None if self.keep is None else self.keep.to(device)
        pieces = None if self.pieces is None else padding.Pieces(*(x.to(device) for x in self.pieces))
        return Mask(self._shape, self.keys, self.window, self.alignment, keep, pieces)

    def __getitem__(self, index: Any) -> "Mask":
        raise NotImplementedError(
            f"{self} has no elements, and this model computes with them: use attn_implementation='eager'"
        )

    def __repr__(self) -> str:
        kind = "packed" if self.pieces is not None else "all keys" if self.keep is None else "key bias"
        return f"Mask(shape={self._shape}, keys={self.keys}, window={self.window}, {self.alignment}, {kind})"

    __str__ = __repr__

    def says_nothing(self, causal: bool, full: bool) -> bool:
        """Whether layers that know whether they are causal (or full) need no mask."""
        if self.keep is not None or self.pieces is not None or self.keys != self._shape[3]:
            return False
        if self.window == (-1, -1):
            return full
        left, right = self.window
        seen = left < 0 or left >= self.keys - 1
        return causal and seen and right == 0 and self.alignment == "bottom_right" and self._shape[2] in (1, self.keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, **options: Any) -> Tensor:
        """Attention of (batch, seqlen, heads, head_dim) tensors."""
        k, v = k[:, : self.keys], v[:, : self.keys]
        if self.pieces is not None and position_bias is None:
            return padding.attend(q, k, v, self.pieces, window=self.window, **options)
        if self.alignment is None:
            raise NotImplementedError("position_bias is given, but only the device knows where the queries are")
        if self.keep is not None and (self._bias is None or self._bias.dtype is not q.dtype):
            self._bias = additive(self.keep[:, None, None], q.dtype)
        bias = _sum(self._bias, None if position_bias is None else position_bias[..., : self.keys], q)
        o: Tensor = attention(q, k, v, window=self.window, alignment=self.alignment, bias=bias, **options)
        return o


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
    if padding_mask is not None:
        keys = min(keys, max(padding_mask.shape[1] - kv_offset, 0))
    if structure.right >= 0 and not isinstance(shift, Tensor):
        keys = min(keys, max(shift + shape[2] + structure.right, 0))
    keep = None if padding_mask is None else padding_mask[:, kv_offset : kv_offset + keys]
    return _Case(shape, structure, shift, keys, keep)


def _look(keep: Tensor) -> tuple[bool, bool]:
    """Whether all is True, and whether what is True is one run in each row. Waits for the device."""
    begins = keep[:, 1:] & ~keep[:, :-1]
    all_true, one_run = torch.stack([keep.all(), (keep[:, :1].sum(1) + begins.sum(1) <= 1).all()]).tolist()
    return all_true, one_run


def _mask(case: _Case) -> Mask | None:
    """The mask without its elements, if that can be; None if it cannot, or if it is of one row with padding."""
    tracing = is_tracing(case.keep)
    runs = False
    if case.keep is not None and not tracing:
        whole, runs = _look(case.keep)
        if whole:
            case = case._replace(keep=None)
        elif not runs and isinstance(case.shift, Tensor):
            case = _case(case.shape, case.structure, int(case.shift), 0, case.keep)
    if case.structure.segments is not None:
        pieces = None if tracing else _segments(case)
    elif case.keep is None and case.aligned is not None:
        pieces = None
    elif case.rows == 1:
        return None
    elif case.keep is None or runs:
        pieces = _cut(case)
    else:
        pieces = None
    if pieces is None and (case.structure.segments is not None or case.aligned is None):
        return None
    return Mask(case.shape, case.keys, case.structure[:2], case.aligned, case.keep, pieces)


def _segments(case: _Case) -> padding.Pieces | None:
    """The pieces of packed sequences. Waits for the device: their number is a shape."""
    segments = case.structure.segments
    if segments is None or case.keep is not None or isinstance(case.shift, Tensor) or case.shift != 0:
        return None
    if segments.shape != (case.shape[0], case.rows) or case.keys != case.rows:
        return None
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
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
    end = end.minimum(torch.as_tensor(shift + seqlen_q, device=end.device))
    first = first.minimum(end)
    first_q, end_q = ((x - shift).clamp(0, seqlen_q) for x in (first, end))
    return padding.cut_both(first_q, end_q, seqlen_q, first, end, seqlen_k)


# ---- the two functions that transformers calls


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
) -> Mask | Tensor | None:
    """What the layers get as their attention_mask.

    Args:
        batch_size, q_length, kv_length: the mask is of (batch_size, 1, q_length, kv_length).
        q_offset: position of the first query; a tensor if only the device knows it, as with static caches.
        kv_offset: position of the first key.
        mask_function: of (batch, head, query position, key position), whether the query attends to the key.
        attention_mask: boolean (batch_size, seqlen), False at padding; positions after it are padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether a causal, or a full, mask may be None.
        dtype: of elements.
        config: the model's.
        kwargs: handed on to transformers' sdpa_mask.

    Returns:
        None if the layers need not be told; a `Mask`; or a bias of `dtype`, (batch_size, 1, q_length, kv_length).
    """
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    structure = _visible_structure(mask_function, skip, config)
    # Where nothing may be skipped, it is packed sequences that forbid it, or else the model, which wants elements.
    if structure is not None and (skip or structure.segments is not None):
        shape = (batch_size, 1, q_length, kv_length)
        mask = _mask(_case(shape, structure, q_offset, kv_offset, attention_mask))
        if mask is not None:
            return None if mask.says_nothing(allow_is_causal_skip, allow_is_bidirectional_skip) else mask
    elements = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip
    assert elements is not None
    if q_length > 1:
        _warn(f"a mask of {batch_size} x {q_length} x {kv_length} elements was made; see help(tessera.transformers)")
    return additive(elements, dtype)


def _visible_structure(mask_function: MaskFunction, skip: bool, config: Any) -> Structure | None:
    if not torch.compiler.is_compiling():
        return _structure(mask_function)
    if mask_function is causal_mask_function:
        return Structure(right=0)
    # torch.compile hands over no functions that hold tensors: packed sequences and overlays, with which nothing may be
    # skipped, and chunks.
    if not skip or getattr(config, "attention_chunk_size", None) is not None:
        return None
    ends = _constant_structure(mask_function)
    return None if ends is None else Structure(*ends)


@torch.compiler.assume_constant_result
def _warn(text: str) -> None:
    """Also while compiling."""
    warnings.warn(text, QuadraticMaskWarning, stacklevel=4)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer.

    Args:
        module: the layer; `is_causal` is read from it if the argument is None.
        query: (batch, num_heads, seqlen_q, head_dim). float32 (CPU only), bfloat16 or float16.
        key, value: (batch, num_heads_k, seqlen_k, head_dim or head_dim_v).
        attention_mask: what `attention_mask` returned, or a tensor of elements: boolean (True attends) or a bias, which
            broadcasts to (batch, num_heads, seqlen_q, seqlen_k). None: everything, or causal as `is_causal` says.
        dropout: of the weights.
        scaling: None is 1 / sqrt(head_dim).
        sliding_window: read with `cu_seq_lens_q` only; else the mask holds the window.
        softcap: None is none.
        s_aux: (num_heads,), one more logit in the denominator of each head.
        position_bias: (batch or 1, num_heads or 1, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, as DataCollatorWithFlattening makes
            them. They take the place of attention_mask; causality is `is_causal` and the window `sliding_window`.
        deterministic: whether the gradient of query is the same bit for bit in every run.
        kwargs: ignored, except that output_attentions, head_mask and block_indices are refused.

    Returns: (batch, seqlen_q, num_heads, head_dim_v), and None in place of the weights.

    Raises:
        NotImplementedError: weights are asked for, or changed; or no kernel does it.
        ValueError: as `tessera.attention`.
    """
    for name in ("output_attentions", "head_mask", "block_indices"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(
                f"{name} is given: there is no matrix of weights; use attn_implementation='eager'"
            )
    q, k, v = (rows(x).transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.reshape(-1).float(),
        "dropout_p": dropout,
        "deterministic": bool(deterministic),
    }
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if cu_seq_lens_q is not None:
        if isinstance(attention_mask, Tensor) and not torch.compiler.is_compiling():
            raise ValueError("cu_seq_lens_q is given together with a 4-D attention_mask: must be one of the two")
        if position_bias is not None:
            raise NotImplementedError("position_bias is given together with cu_seq_lens_q")
        left = -1 if sliding_window is None else sliding_window - 1
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        o = attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            cu_seqlens_q=cu_seq_lens_q.to(torch.int32), cu_seqlens_k=cu_seq_lens_k.to(torch.int32),
            max_seqlen_q=_longest(max_length_q, q), max_seqlen_k=_longest(max_length_k, k),
            window=(left, 0 if causal else left), **options,
        )  # fmt: skip
        return o.unflatten(0, q.shape[:2]), None
    if isinstance(attention_mask, Mask):
        return attention_mask.attend(q, k, v, position_bias, **options), None
    bias = attention_mask
    if bias is None and causal and q.shape[1] > 1:
        # More keys than queries mean an empty static cache, as in transformers' sdpa: those after the queries are void.
        keys = q.shape[1]
        k, v = k[:, :keys], v[:, :keys]
        position_bias = None if position_bias is None else position_bias[..., :keys]
        options["causal"] = True
    return attention(q, k, v, bias=_sum(bias, position_bias, q), **options), None


def _longest(given: int | None, tokens: Tensor) -> int:
    """A bound of the sequences' lengths."""
    return tokens.shape[0] * tokens.shape[1] if given is None else int(given)


def _sum(mask: Tensor | None, position_bias: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores."""
    if mask is not None and mask.dtype is torch.bool:
        mask = additive(mask, q.dtype)
    bias = position_bias if mask is None else mask if position_bias is None else mask + position_bias
    if bias is None:
        return None
    return rows(bias if bias.dtype in (torch.float32, q.dtype) else bias.to(q.dtype))


register()
