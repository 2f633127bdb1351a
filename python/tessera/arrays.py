"""`tessera.attention` and its relatives for NumPy arrays, and for JAX arrays in the memory of the CPU."""

import operator
import sys
from typing import Any

import numpy as np

from . import _native
from .arguments import Arguments, Options, Scales, band, is_top_left, refuse_dropout_with_qv, require_packed

_PLAIN = "float32, bfloat16 or float16"  # types, in words


def _is_jax(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def is_traced(array: Any) -> bool:
    """Whether it stands for an array of JAX whose values come later."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def _from_jax(name: str, array: Any) -> np.ndarray:
    """The same memory as a NumPy array. Of what is traced only shape and type: memory that nobody has written."""
    if is_traced(array):
        try:
            return np.empty(array.shape, array.dtype)
        except TypeError:  # JAX's own types, of random keys
            raise ValueError(f"{name}.dtype = {array.dtype}: must be {_PLAIN}") from None
    devices = array.devices()
    platform = next(iter(devices)).platform
    if platform != "cpu":
        raise NotImplementedError(f"{name} is a JAX array on '{platform}': JAX arrays must be on the CPU")
    if len(devices) > 1:
        raise NotImplementedError(
            f"{name} is a JAX array on {len(devices)} devices: JAX arrays must be on one; under jax.shard_map each "
            "device computes its own part"
        )
    return np.asarray(array)


def to_native(name: str, array: Any, first: str = "q", eight_bits: bool = False) -> np.ndarray | None:
    """An array whose memory `_native` can read: NumPy exports no bfloat16, which travels as uint16, and no
    float8_e4m3fn, which travels as uint8 where an array may be of 8 bits."""
    if array is None:
        return None
    if _is_jax(array):
        array = _from_jax(name, array)
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is of type {type(array).__name__!r}, but {first} is an array: they must be of one framework"
        )
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    if eight_bits and array.dtype.name == "float8_e4m3fn":
        return array.view(np.uint8)
    if array.dtype == np.uint16 or (eight_bits and array.dtype == np.uint8):
        accepted = "float8_e4m3fn or int8" if eight_bits else _PLAIN
        raise ValueError(f"{name}.dtype = {array.dtype}: must be {accepted}")
    return array


def longest(name: str, cu_seqlens: Any, given: int | None) -> int:
    """max_seqlen_q or max_seqlen_k."""
    if cu_seqlens is None:
        return 0
    if given is not None:
        return given
    if is_traced(cu_seqlens):
        raise ValueError(
            f"max_seqlen_{name} is None, and cu_seqlens_{name} is traced by JAX: it must be given; any upper bound "
            "will do"
        )
    return int(np.diff(np.asarray(cu_seqlens)).max(initial=0))


def seed_and_offset(rng_state: Any) -> tuple[int, int]:
    try:
        seed, offset = (operator.index(number) for number in rng_state)
    except (TypeError, ValueError):
        raise ValueError(f"rng_state = {rng_state!r}: must be a pair of integers, (seed, offset)") from None
    return seed, offset


def _draw(dropout_p: float, rng_state: Any) -> tuple[int, int]:
    if dropout_p == 0.0:
        return 0, 0
    if rng_state is None:
        seed, offset = np.random.randint(0, 2**63, 2, np.int64).tolist()
        return seed, offset
    return seed_and_offset(rng_state)


def prepare(
    q: Any, k: Any, v: Any, arguments: Arguments, eight_bits: bool = False
) -> tuple[list[np.ndarray | None], Options]:
    """(q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k) and the rest, for `_native`.

    Of what JAX traces only shape and type mean anything. eight_bits: of q, k and v.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array is None:
            raise ValueError(f"{name} is None: an array is required")
    a = arguments
    cu_seqlens_q, cu_seqlens_k, max_seqlen_k = a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_k
    if cu_seqlens_q is None:
        require_packed(a)
    elif cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = a.max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    names = ("q", "k", "v", "bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k")
    given = (q, k, v, a.bias, a.alibi_slopes, a.sink, cu_seqlens_q, cu_seqlens_k)
    arrays = [
        to_native(name, array, eight_bits=eight_bits and i < 3)
        for i, (name, array) in enumerate(zip(names, given, strict=True))
    ]
    left, right = band(a.causal, a.window)
    options = (
        longest("q", cu_seqlens_q, a.max_seqlen_q), longest("k", cu_seqlens_k, max_seqlen_k), a.softmax_scale,
        a.softcap, left, right, is_top_left(a.alignment), a.dropout_p, a.deterministic, a.batch_invariant,
    )  # fmt: skip
    return arrays, options


def empty_lse(q: np.ndarray) -> np.ndarray:
    batch, (rows, heads) = q.shape[:-3], q.shape[-3:-1] if q.ndim >= 3 else (0, 0)
    return np.empty((*batch, heads, rows), np.float32)


def attention(q: Any, k: Any, v: Any, arguments: Arguments, return_lse: bool) -> Any:
    """As `tessera.attention`. JAX arrays in, JAX arrays out."""
    a = arguments
    if "jax" in sys.modules and any(
        map(is_traced, (q, k, v, a.bias, a.alibi_slopes, a.sink, a.rng_state, a.cu_seqlens_q, a.cu_seqlens_k))
    ):
        from .jax import ops

        return ops.attention(q, k, v, arguments, return_lse)
    return _attend(q, k, v, None, arguments, return_lse)


def prepare_qv(qv: Any, q: Any) -> np.ndarray | None:
    """qv, for `_native`."""
    return to_native("qv", qv)


def attention_with_qv(q: Any, k: Any, v: Any, qv: Any, arguments: Arguments, return_lse: bool) -> Any:
    """`tessera.attention` with qv. JAX arrays in, JAX arrays out."""
    a = arguments
    refuse_dropout_with_qv(a)
    if any(map(is_traced, (q, k, v, qv, a.bias, a.alibi_slopes, a.sink, a.cu_seqlens_q, a.cu_seqlens_k))):
        raise NotImplementedError("qv under JAX's transformations: it takes arrays whose values are there")
    return _attend(q, k, v, prepare_qv(qv, q), arguments, return_lse)


def _attend(q: Any, k: Any, v: Any, qv: np.ndarray | None, arguments: Arguments, return_lse: bool) -> Any:
    arrays, options = prepare(q, k, v, arguments)
    first, _, value, *_ = arrays
    assert first is not None and value is not None
    o = np.empty(first.shape[:-1] + value.shape[-1:], first.dtype)
    lse = empty_lse(first) if return_lse else None
    rng = _draw(arguments.dropout_p, arguments.rng_state)
    _native.forward(*arrays[:3], o, lse, *arrays[3:], qv, *options, *rng, None)
    return like(q, o) if lse is None else (like(q, o), like(q, lse))


def _prepare_scaled(
    q: Any, k: Any, v: Any, scales: Scales, arguments: Arguments
) -> tuple[list[np.ndarray | None], tuple[Any, ...], Options]:
    """The tensors, the scales and the numbers, for `_native`."""
    s = scales
    names = ("q_scale", "k_scale", "v_scale", "score_shift", "v_shift")
    given = (s.q_scale, s.k_scale, s.v_scale, s.score_shift, s.v_shift)
    a = arguments
    if any(map(is_traced, (q, k, v, *given, a.bias, a.alibi_slopes, a.sink, a.cu_seqlens_q, a.cu_seqlens_k))):
        raise NotImplementedError(
            "scaled_attention under JAX's transformations: it takes arrays whose values are there"
        )
    arrays, options = prepare(q, k, v, arguments, eight_bits=True)
    factors = (to_native(name, array) for name, array in zip(names, given, strict=True))
    return arrays, (*factors, s.k_block, s.v_block, s.head_dim_v), options


def _shape_of_o(q: Any, v: Any, head_dim_v: int | None) -> tuple[int, ...]:
    """head_dim_v: where v lies in tiles."""
    if head_dim_v is None:
        return (*q.shape[:-1], v.shape[-1])
    try:
        return (*q.shape[:-1], max(operator.index(head_dim_v), 0))
    except TypeError:
        raise TypeError(f"head_dim_v = {head_dim_v!r}: must be an integer, or None where v lies in rows") from None


def output_type(v: Any, dtype: Any) -> Any:
    """The type of o beside q of 8 bits."""
    if dtype is not None:
        given = np.dtype(dtype)
        if given.name not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype = {given}: must be {_PLAIN}")
        return given
    if v.dtype.name in ("bfloat16", "float16"):
        return v.dtype
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ValueError(
            "dtype is None, which means bfloat16, a type of ml_dtypes, which is not installed: np.float32 and "
            "np.float16 need nothing"
        ) from None
    return bfloat16


def scaled_attention(q: Any, k: Any, v: Any, scales: Scales, arguments: Arguments, dtype: Any, return_lse: bool) -> Any:
    """As `tessera.scaled_attention`. JAX arrays in, JAX arrays out."""
    arrays, factors, options = _prepare_scaled(q, k, v, scales, arguments)
    o = np.empty(_shape_of_o(q, v, scales.head_dim_v), output_type(v, dtype))
    lse = empty_lse(q) if return_lse else None
    _native.scaled_forward(*arrays[:3], to_native("o", o), lse, *arrays[3:], *factors, *options, 0, 0, None)
    return like(q, o) if lse is None else (like(q, o), like(q, lse))


def explain_scaled(q: Any, k: Any, v: Any, scales: Scales, arguments: Arguments, dtype: Any, device: str | None) -> str:
    """As `tessera.explain_scaled`."""
    arrays, factors, options = _prepare_scaled(q, k, v, scales, arguments)
    # o without its memory: one row that all of them share.
    shape = _shape_of_o(q, v, scales.head_dim_v)
    o = to_native("o", np.broadcast_to(np.empty(shape[-1:], output_type(v, dtype)), shape))
    return _native.explain_scaled(*arrays[:3], o, None, *arrays[3:], *factors, *options, 0, 0, device)


def combine(o_parts: Any, lse_parts: Any, dtype: Any) -> Any:
    """As `tessera.combine`. JAX arrays in, JAX arrays out."""
    if is_traced(o_parts) or is_traced(lse_parts):
        raise NotImplementedError("o_parts is traced by JAX: combine takes arrays whose values are there")
    parts, lse_in = to_native("o_parts", o_parts, "o_parts"), to_native("lse_parts", lse_parts, "o_parts")
    if parts is None or lse_in is None:
        raise ValueError(f"{'o_parts' if parts is None else 'lse_parts'} is None: an array is required")
    o = np.empty(parts.shape[1:], o_parts.dtype if dtype is None else dtype)
    lse = np.empty(lse_in.shape[1:], np.float32)
    _native.combine(parts, lse_in, to_native("dtype", o), lse, None)
    if not _is_jax(o_parts):
        return o, lse
    asarray = sys.modules["jax"].numpy.asarray
    return asarray(o), asarray(lse)


def from_native(array: np.ndarray, dtype: Any) -> np.ndarray:
    """With bfloat16 again, if dtype is."""
    return array.view(dtype) if array.dtype == np.uint16 else array


def like(q: Any, array: np.ndarray) -> Any:
    """A result in the framework of q, and in its bfloat16."""
    array = from_native(array, q.dtype)
    return sys.modules["jax"].numpy.asarray(array) if _is_jax(q) else array
