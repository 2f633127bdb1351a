"""What the arguments of `tessera.attention` mean, the same for every framework."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar


class Array(Protocol):
    """A torch tensor, a NumPy array or a JAX array."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


# The framework of a call: q, k, v and the results are of one.
ArrayT = TypeVar("ArrayT", bound=Array)


@dataclass(slots=True)
class Arguments:
    """What `tessera.attention` takes beside q, k and v and a plan depends on.

    One object goes from every public function to its framework. Functions spell the names again, so that help() shows
    them; test_errors.py holds them against these. No defaults here: nobody forgets to pass an argument on.
    """

    causal: bool
    window: tuple[int, int]
    alignment: str
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Any
    bias: Any
    sink: Any
    dropout_p: float
    rng_state: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    deterministic: bool
    batch_invariant: bool


@dataclass(slots=True)
class Scales:
    """What `tessera.scaled_attention` takes beside `Arguments`: the scales of 8-bit tensors (S14)."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    score_shift: Any
    v_shift: Any
    k_block: int
    v_block: int
    head_dim_v: int | None


@dataclass(slots=True)
class Quantization:
    """What `tessera.quantize` takes beside q, k and v."""

    dtype: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    k_block: int
    v_block: int
    v_tiles: bool
    k_mean: Any
    v_shift: Any
    hadamard: int
    signs: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: bool
    rotary_seqlens: Any
    rotary_constant_q: bool
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Keywords(TypedDict, total=False):
    """`Arguments` as keywords, with the types that callers see."""

    causal: bool
    window: tuple[int, int]
    alignment: str
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Array | None
    bias: Array | None
    sink: Array | None
    dropout_p: float
    rng_state: Array | Sequence[int] | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    deterministic: bool
    batch_invariant: bool


# The numbers among them, in the order in which `_native` and the custom ops take them: max_seqlen_q, max_seqlen_k,
# softmax_scale, softcap, window_left, window_right, top_left, dropout_p, deterministic, batch_invariant. A plain tuple:
# all of it is handed on at once, and autograd, JSON and XLA's programs keep it.
Options = tuple[int, int, float | None, float, int, int, bool, float, bool, bool]


def band(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """The window that `causal` and `window` mean together: causal hides every key to the right."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window = {window!r}: must be a pair (left, right), -1 for unbounded") from None
    if not causal:
        return left, right
    try:
        is_wider = right > 0
    except TypeError:
        is_wider = False
    if is_wider:
        raise ValueError(f"window = {window!r} together with causal = {causal!r}: its right end must be 0 or -1")
    # What else is wrong with it, the library says.
    return left, 0 if right == -1 else right


def is_top_left(alignment: str) -> bool:
    if alignment == "bottom_right":
        return False
    if alignment == "top_left":
        return True
    raise ValueError(f"alignment = {alignment!r}: must be 'bottom_right' or 'top_left'")


def refuse_dropout_with_qv(arguments: Arguments) -> None:
    if arguments.dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p = {arguments.dropout_p!r} together with qv, which is for inference: must be 0"
        )


def require_packed(arguments: Arguments) -> None:
    """Refuses what makes sense for packed tensors only."""
    for name in ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name} is given, but cu_seqlens_q is None: packed tensors need cu_seqlens_q")
