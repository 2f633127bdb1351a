"""`tessera.quantize`, and `tessera.attention` of a lower precision, for NumPy arrays, and for JAX arrays in the memory
of the CPU."""

from typing import Any, NamedTuple

import numpy as np

from . import _native, arrays, eight_bits
from .arguments import Arguments, Quantization
from .arrays import is_traced, to_native
from .eight_bits import Boundaries
from .quantized import Quantized


class _Results(NamedTuple):
    """What is made, as `_native` reads it: e4m3 as uint8, and so no type that NumPy lacks. Or what was given."""

    q: np.ndarray | None
    k: np.ndarray | None
    v: np.ndarray | None
    q_scale: Any
    k_scale: Any
    v_scale: Any
    score_shift: np.ndarray | None


def _type_name(dtype: Any) -> str:
    name = "float8_e4m3fn" if dtype is None else dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in eight_bits.LIMITS:
        raise ValueError(f"dtype = {name}: must be float8_e4m3fn or int8")
    return name


def _stored_type(type_name: str) -> Any:
    if type_name == "int8":
        return np.int8
    try:
        from ml_dtypes import float8_e4m3fn
    except ImportError:
        raise ValueError(
            "dtype means float8_e4m3fn, a type of ml_dtypes, which is not installed: int8 needs nothing"
        ) from None
    return float8_e4m3fn


def _largest(x: np.ndarray, by: str, heads_k: int) -> Any:
    """The largest magnitude in (seqlen, heads, columns): a number, one a key head, or one of its columns."""
    by_head = np.abs(x).reshape(x.shape[0], heads_k, x.shape[1] // heads_k, x.shape[-1])
    axes = {"tensor": None, "head": (0, 2, 3), "channel": (0, 2)}[by]
    return by_head.max(axes, initial=0.0)


def _reduced(x: Any, by: str, heads_k: int, limit: float, off: Any, starts: Any) -> np.ndarray:
    """Scales that take the largest number to `limit`. off: (batch, heads, columns), subtracted before."""
    values = np.asarray(x).astype(np.float32)
    at = None if starts is None else np.asarray(starts)
    each = list(values) if at is None else [values[a:b] for a, b in zip(at[:-1], at[1:], strict=True)]
    if off is not None:
        each = [part - vector for part, vector in zip(each, np.asarray(off), strict=True)]
    shape = {"tensor": (), "head": (heads_k,), "channel": (heads_k, values.shape[-1])}[by]
    found = np.array([_largest(part, by, heads_k) for part in each], np.float32).reshape(len(each), *shape)
    if by == "tensor":
        found = found.max(initial=0.0, keepdims=True)
    return np.where(found == 0, np.float32(1), np.maximum(found, np.float32(eight_bits.LEAST)) / np.float32(limit))


def _make(q: Any, k: Any, v: Any, given: Quantization, type_name: str, bounds: Boundaries) -> _Results:
    eight_bits.require_sizes(given, type_name)
    limit, stored = eight_bits.LIMITS[type_name], np.int8 if type_name == "int8" else np.uint8
    first = "q" if q is not None else "k" if k is not None else "v"
    g = given
    named = {
        "q": q, "k": k, "v": v, "k_mean": g.k_mean, "v_shift": g.v_shift, "signs": g.signs,
        "cu_seqlens_q": bounds.cu_seqlens_q, "cu_seqlens_k": bounds.cu_seqlens_k, "rotary_cos": g.rotary_cos,
        "rotary_sin": g.rotary_sin, "rotary_seqlens": g.rotary_seqlens,
    }  # fmt: skip
    if any(map(is_traced, (*named.values(), g.q_scale, g.k_scale, g.v_scale))):
        raise NotImplementedError("quantize under JAX's transformations: it takes arrays whose values are there")
    x = {name: to_native(name, array, first) for name, array in named.items()}
    for name in ("q", "k", "v"):
        if named[name] is not None and named[name].ndim not in (3, 4):
            raise ValueError(
                f"{name} has shape {named[name].shape}: must be (batch, seqlen, heads, head_dim); with cu_seqlens_q "
                "(total, heads, head_dim)"
            )
    of_k = k if k is not None else v
    batch = 0 if bounds.cu_seqlens_k is None else bounds.cu_seqlens_k.shape[0] - 1
    heads_k = (q if of_k is None else of_k).shape[-2]
    scales: list[Any] = []
    flags = []
    for name, rows, off, starts in (
        ("q", q, None, bounds.cu_seqlens_q),
        ("k", k, g.k_mean, bounds.cu_seqlens_k),
        ("v", v, g.v_shift, bounds.cu_seqlens_k),
    ):
        key = name + "_scale"
        scale = getattr(g, key)
        way = None if rows is None else eight_bits.way_of(key, scale)
        flags.append(way not in ("token", "block"))
        if rows is None:
            scales.append(None)
        elif way is None:
            scales.append(to_native(key, scale, first))
        elif way == "token":
            scales.append(np.empty(eight_bits.token_shape(rows.shape), np.float32))
        elif way == "block":
            shape = eight_bits.block_shape(rows.shape, g.k_block if name == "k" else g.v_block, batch)
            scales.append(np.empty(shape, np.float32))
        else:
            if name != "v":
                eight_bits.require_reducible(key, way, g)
            scales.append(_reduced(rows, way, heads_k, limit, off, starts))
    q_out, k_out = (None if rows is None else np.empty(rows.shape, stored) for rows in (q, k))
    v_out = None
    if v is not None:
        v_out = np.empty(eight_bits.tile_shape(v.shape, batch) if g.v_tiles else v.shape, stored)
        if g.v_tiles:
            v_out = _aligned(v_out)
    shift = np.empty(eight_bits.token_shape(q.shape), np.float32) if q is not None and g.k_mean is not None else None
    _native.quantize(
        x["q"], x["k"], x["v"], q_out, k_out, v_out, *scales, x["k_mean"], shift,
        *(x[name] for name in list(x)[4:]), *flags,
        arrays.longest("q", bounds.cu_seqlens_q, bounds.max_seqlen_q),
        arrays.longest("k", bounds.cu_seqlens_k, bounds.max_seqlen_k), g.k_block, g.v_block, g.hadamard, g.v_tiles,
        g.rotary_interleaved, g.rotary_constant_q, None,
    )  # fmt: skip
    return _Results(q_out, k_out, v_out, scales[0], scales[1], scales[2], shift)


def _aligned(array: np.ndarray) -> np.ndarray:
    """Memory of the same kind that begins at a multiple of 16 bytes."""
    memory = np.empty(array.size + 15, array.dtype)
    start = -memory.ctypes.data % 16
    return memory[start : start + array.size].reshape(array.shape)


def quantize(q: Any, k: Any, v: Any, given: Quantization) -> Quantized:
    """As `tessera.quantize`. JAX arrays in, JAX arrays out."""
    type_name = _type_name(given.dtype)
    stored = _stored_type(type_name)
    bounds = eight_bits.boundaries_of(given, q is not None, k is not None or v is not None)
    kept = None
    if given.v_scale is None and v is not None:
        kept, v = v, None
        if kept.dtype.name not in ("bfloat16", "float16"):
            raise ValueError(f"v_scale is None, but v.dtype = {kept.dtype}: what stays as it is has 16 bits")
        if q is None and k is None:
            raise ValueError("v_scale is None, but q and k are, too: then nothing is quantised")
    made = _make(q, k, v, given, type_name, bounds)
    first = next(x for x in (q, k, v) if x is not None)

    def result(array: np.ndarray | None) -> Any:
        return None if array is None else arrays.like(first, array.view(stored))

    def scale(array: Any) -> Any:
        return None if array is None else arrays.like(first, array)

    columns = v.shape[-1] if v is not None and given.v_tiles else None
    return Quantized(
        result(made.q), result(made.k), kept if v is None else result(made.v), scale(made.q_scale),
        scale(made.k_scale), scale(made.v_scale), scale(made.score_shift), None if v is None else given.v_shift,
        _block(k, "k_scale", given.k_scale, given.k_block), _block(v, "v_scale", given.v_scale, given.v_block), columns,
        *bounds,
    )  # fmt: skip


def _block(x: Any, name: str, scale: Any, block: int) -> int:
    return block if x is not None and eight_bits.way_of(name, scale) == "block" else 0


def attention(q: Any, k: Any, v: Any, arguments: Arguments, precision: str, return_lse: bool) -> Any:
    """`tessera.attention` of a lower precision. JAX arrays in, JAX arrays out."""
    type_name = eight_bits.type_of(precision)
    eight_bits.require_features(arguments, precision)
    if any(map(is_traced, (q, k, v))):
        raise NotImplementedError(
            f"precision = {precision!r} under JAX's transformations: it takes arrays whose values are there"
        )
    others, options = arrays.prepare(q, k, v, arguments)
    quantises_v = type_name != "int8"
    if not quantises_v and v.dtype.name not in ("bfloat16", "float16"):
        eight_bits.refuse_wide_v(v.dtype, precision)
    if v.dtype != q.dtype:
        raise ValueError(f"v.dtype = {v.dtype}, but q.dtype = {q.dtype}: they must be the same")
    a = arguments
    given = eight_bits.recipe_of(a, q.shape[-1], type_name, v_tiles=False)
    bounds = eight_bits.boundaries_of(given, True, True)
    made = _make(q, k, v if quantises_v else None, given, type_name, bounds)
    value = made.v if quantises_v else others[2]
    assert value is not None
    o = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = arrays.empty_lse(q) if return_lse else None
    _native.scaled_forward(
        made.q, made.k, value, to_native("o", o), lse, *others[3:], made.q_scale, made.k_scale, made.v_scale, None,
        None, given.k_block, given.v_block if quantises_v else 0, None, *options, 0, 0, None,
    )  # fmt: skip
    return arrays.like(q, o) if lse is None else (arrays.like(q, o), arrays.like(q, lse))
