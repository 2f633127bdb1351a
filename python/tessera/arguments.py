"""What the arguments of `tessera.attention` mean, the same for every framework."""

from typing import Any

# Everything but the tensors and the state of the dropout, in the order in which `_native` and the custom ops take it:
# max_seqlen_q, max_seqlen_k, softmax_scale, softcap, window_left, window_right, top_left, dropout_p, deterministic,
# batch_invariant. A plain tuple: making a NamedTuple would take longer, on every call.
Options = tuple[int, int, float | None, float, int, int, bool, float, bool, bool]


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
