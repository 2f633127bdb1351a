"""Sizes of 8-bit tensors and what belongs to them (S14), and how attention of a lower precision makes them; the same
for every framework."""

from typing import Any, NamedTuple

from .arguments import Arguments, Quantization

# The largest magnitude of an element that is written.
LIMITS = {"float8_e4m3fn": 448.0, "int8": 127.0}
# Scales divide by no less, as those that the library writes.
LEAST = 2.0**-100

# How scales are made, by their names; what is not the first of them takes a pass of its own.
_WAYS = {
    "q_scale": ("token", "head", "tensor"),
    "k_scale": ("block", "head", "tensor"),
    "v_scale": ("block", "channel", "head", "tensor"),
}


def way_of(name: str, scale: Any) -> str | None:
    """The word that says how scales are made; None: they are given."""
    ways = _WAYS[name]
    if isinstance(scale, str):
        if scale in ways:
            return scale
    elif scale is not None:
        return None
    words = ", ".join(map(repr, ways))
    raise ValueError(f"{name} = {scale!r}: must be {words}, or float32 scales{', or None' if name[0] == 'v' else ''}")


def require_reducible(name: str, way: str, given: Quantization) -> None:
    """Refuses scales of q and k that would have to be known before the rows are turned."""
    turned = "rotary_cos" if given.rotary_cos is not None else f"hadamard = {given.hadamard}" if given.hadamard else ""
    if turned:
        raise ValueError(
            f"{name} = {way!r} together with {turned}: must be {_WAYS[name][0]!r} or float32 scales, as rows are "
            "turned before they are scaled"
        )


def require_sizes(given: Quantization, type_name: str) -> None:
    """Refuses numbers that shapes cannot follow from."""
    for name in ("k_block", "v_block"):
        if getattr(given, name) < 1:
            raise ValueError(f"{name} = {getattr(given, name)}: must be 1 or more keys")
    if given.v_tiles and type_name != "float8_e4m3fn":
        raise ValueError(f"v_tiles = True together with dtype = {type_name}: tiles are of float8_e4m3fn")
    if given.v_tiles and given.v_scale is None:
        raise ValueError("v_tiles = True together with v_scale = None: v that stays as it is lies in rows")


class Boundaries(NamedTuple):
    """Of packed sequences: both are there, or neither."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def boundaries_of(given: Quantization, has_q: bool, has_k: bool) -> Boundaries:
    """has_k: k or v is there. What is not there lies as the other does."""
    of_q, of_k = given.cu_seqlens_q, given.cu_seqlens_k
    longest_q, longest_k = given.max_seqlen_q, given.max_seqlen_k
    if of_k is not None and not has_k:
        raise ValueError("cu_seqlens_k is given, but k and v are None")
    if of_q is None and has_q:
        for name, x in (("cu_seqlens_k", of_k), ("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)):
            if x is not None:
                raise ValueError(f"{name} is given, but cu_seqlens_q is None: packed tensors need cu_seqlens_q")
    if of_q is None:
        of_q, longest_q = of_k, longest_k if longest_q is None else longest_q
    if of_k is None:
        of_k, longest_k = of_q, longest_q if longest_k is None else longest_k
    return Boundaries(of_q, of_k, longest_q, longest_k)


def token_shape(q_shape: Any) -> tuple[Any, ...]:
    """Of scales by token. Packed they have a first dimension of 1, which no other ones have."""
    batch, rows, heads = q_shape[:3] if len(q_shape) == 4 else (1, *q_shape[:2])
    return batch, heads, rows


def block_shape(shape: Any, block: int, batch: int) -> tuple[Any, ...]:
    """Of scales by block of k or v. batch: of packed sequences."""
    if len(shape) == 4:
        return shape[0], shape[2], (shape[1] + block - 1) // block
    return shape[1], shape[0] // block + batch


def tile_shape(v_shape: Any, batch: int) -> tuple[Any, ...]:
    """Of v in tiles (src/core/value_tiles.h)."""
    columns = next((n for n in (64, 96, 128, 192) if v_shape[-1] <= n), 256)
    *heads, tiles = block_shape(v_shape, 128, batch)
    return *heads, tiles, 4, columns + 8, 32


# ---- attention of a lower precision

PRECISIONS = {"e4m3": "float8_e4m3fn", "int8": "int8"}


def type_of(precision: Any) -> str:
    """The type of q and k."""
    if isinstance(precision, str) and precision in PRECISIONS:
        return PRECISIONS[precision]
    raise ValueError(f"precision = {precision!r}: must be 'e4m3', 'int8' or None")


def require_features(arguments: Arguments, precision: str) -> None:
    """Refuses what 8 bits cannot do."""
    if arguments.dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p = {arguments.dropout_p} together with precision = {precision!r}: must be 0, as no kernel of 8 "
            "bits drops weights"
        )


def refuse_wide_v(name: Any, precision: str) -> None:
    raise NotImplementedError(
        f"v.dtype = {name} together with precision = {precision!r}: must be bfloat16 or float16, as v stays as it is"
    )


def hadamard_of(head_dim: int) -> int:
    """The largest block of the transform that fits; 0: none does."""
    largest = head_dim & -head_dim
    return 0 if largest <= 1 else min(largest, 256)


def k_block_of(type_name: str, head_dim: int) -> int:
    """Keys that share a scale of k: the fewest that all of a GPU's rows of that head_dim take. Of more, quantising
    takes longer."""
    return 128 if type_name == "int8" or head_dim > 128 else 96


def v_block_of(head_dim: int) -> int:
    """Keys that share a scale of v: as long as sums of 8-bit products go on for in a GPU's rows for long sequences
    (value_tiles.h)."""
    return 384 if 128 < head_dim <= 192 else 512 if head_dim <= 96 else 768


def recipe_of(arguments: Arguments, head_dim: int, type_name: str, v_tiles: bool) -> Quantization:
    """How q, k and v are quantised: rows of q, blocks of keys, q and k after a Hadamard transform."""
    a = arguments
    return Quantization(
        type_name, "token", "block", "block", k_block_of(type_name, head_dim), v_block_of(head_dim), v_tiles, None,
        None, hadamard_of(head_dim), None, None, None, False, None, False, a.cu_seqlens_q, a.cu_seqlens_k,
        a.max_seqlen_q, a.max_seqlen_k,
    )  # fmt: skip
