"""What the arguments of `tessera.attention` mean, the same for every framework."""

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Everything but the tensors, in the order in which `_native` takes it."""

    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float | None
    softcap: float
    window_left: int
    window_right: int
    top_left: bool
    dropout_p: float
    rng_seed: int
    rng_offset: int
    deterministic: bool
    batch_invariant: bool


def band(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """The window that `causal` and `window` mean together: causal hides every key to the right."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window = {window!r}: must be a pair (left, right), -1 for unbounded") from None
    return left, 0 if causal else right


def is_top_left(alignment: str) -> bool:
    if alignment == "bottom_right":
        return False
    if alignment == "top_left":
        return True
    raise ValueError(f"alignment = {alignment!r}: must be 'bottom_right' or 'top_left'")


def require_packed(cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """What makes sense for packed tensors only."""
    for name, value in (
        ("cu_seqlens_k", cu_seqlens_k),
        ("max_seqlen_q", max_seqlen_q),
        ("max_seqlen_k", max_seqlen_k),
    ):
        if value is not None:
            raise ValueError(f"{name} is given, but cu_seqlens_q is None: packed tensors need cu_seqlens_q")
