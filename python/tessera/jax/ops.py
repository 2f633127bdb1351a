"""Attention for values that JAX traces.

`attention` checks shapes and types at once, with the sentences of a call outside, and leaves one primitive for the
forward pass and one for the backward pass in the traced program. XLA calls the library through `custom_call`. Where
there are values after all (jax.grad outside jit), the library is called straight away.
"""

import functools
import importlib
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from .. import _native, arrays
from ..arguments import Arguments, Options
from . import custom_call
from .custom_call import Call

jax: Any = importlib.import_module("jax")
_jnp: Any = importlib.import_module("jax.numpy")
_core: Any = importlib.import_module("jax.extend.core")
_ffi: Any = importlib.import_module("jax.ffi")
_batching: Any = importlib.import_module("jax.interpreters.batching")
_mlir: Any = importlib.import_module("jax.interpreters.mlir")

custom_call.register(_ffi.register_ffi_target, _ffi.pycapsule)


class Inputs(NamedTuple):
    """None: not given. rng_state: what `custom_call.seed_and_offset` reads."""

    q: Any
    k: Any
    v: Any
    bias: Any
    alibi_slopes: Any
    sink: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    rng_state: Any

    def given(self) -> dict[str, Any]:
        return {name: x for name, x in self._asdict().items() if x is not None}


# ---- primitives: operands and results in the order of their call's names
#
# lse and its gradient are (batch, num_heads, seqlen_q, 1) or (num_heads, total_q, 1) here. With as many dimensions as q
# they take over from q how it is spread under jax.shard_map.


def _result_like(name: str, avals: dict[str, Any]) -> Any:
    if name == "o":
        q, v = avals["q"], avals["v"]
        return q.update(shape=(*q.shape[:-1], v.shape[-1]), weak_type=False)
    if name == "lse":
        q = avals["q"]
        return q.update(shape=(*q.shape[:-3], q.shape[-2], q.shape[-3], 1), dtype=np.dtype(np.float32), weak_type=False)
    return avals[name.removeprefix("d")].update(weak_type=False)


def _abstract(*avals: Any, call: Call) -> list[Any]:
    named = dict(zip(call.operands, avals, strict=True))
    return [_result_like(name, named) for name in call.results]


def _compute(*operands: Any, call: Call) -> list[Any]:
    """At once, for values."""
    x = {name: arrays.to_native(name, array) for name, array in zip(call.operands, operands, strict=True)}
    likes = _abstract(*(jax.typeof(array) for array in operands), call=call)
    results = [np.empty(like.shape, np.uint16 if like.dtype.name == "bfloat16" else like.dtype) for like in likes]
    custom_call.run(call, x | dict(zip(call.results, results, strict=True)))
    return [_jnp.asarray(arrays.from_native(result, like.dtype)) for result, like in zip(results, likes, strict=True)]


def _require_one_device(context: Any) -> None:
    """XLA would gather what is spread over devices, and compute all of it on each."""
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        devices = getattr(context, "num_devices", 1)
    else:
        automatic = set(mesh.axis_names) - set(getattr(context, "manual_axes", mesh.axis_names))
        devices = math.prod(mesh.shape[name] for name in automatic)
    if devices > 1:
        raise NotImplementedError(
            f"tessera.attention is compiled for {devices} devices: JAX arrays must be on one; under jax.shard_map over "
            "all axes of the mesh each device computes its own part"
        )


def _lower(context: Any, *operands: Any, call: Call) -> Any:
    _require_one_device(context.module_context.axis_context)
    # So JAX knows that Python is called, and waits for such programs before the interpreter ends. Otherwise XLA's
    # thread would end there instead, and the process wait for it for ever.
    context.module_context.add_host_callback(custom_call.run)
    return _ffi.ffi_lowering(custom_call.TARGET)(context, *operands, call=call.text())


def _refuse_platform(context: Any, *operands: Any, call: Call) -> Any:
    platforms = "', '".join(context.module_context.platforms)
    raise NotImplementedError(f"tessera.attention is compiled for '{platforms}': JAX arrays must be on the CPU")


# ---- vmap


def _can_fold(shapes: dict[str, tuple[int, ...]], mapped: dict[str, bool], call: Call) -> bool:
    """Whether the mapped dimension can become part of the batch, without a copy of the bias for each.

    The dropout mask of a sequence depends on its number in the batch. Of what sequences share, each has its own
    gradient under vmap.
    """
    if "cu_seqlens_q" in shapes or "rng_state" in shapes or mapped.get("sink") or "dsink" in call.results:
        return False
    if "bias" not in shapes:
        return True
    per_sequence = _batch_of_bias(shapes["bias"]) == shapes["q"][0]
    if mapped["bias"]:
        return per_sequence
    return _batch_of_bias(shapes["bias"]) == 1 and "dbias" not in call.results


def _batch_of_bias(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 4 else 1


def _fold(name: str, x: Any, is_mapped: bool, shape: tuple[int, ...], size: int, batch: int) -> Any:
    """x, which is of that shape, or (size, *shape) if mapped, for size * batch sequences."""
    if name == "sink":
        return x
    if name == "bias":
        shape = (1,) * (4 - len(shape)) + shape
        return x.reshape(size * batch, *shape[1:]) if is_mapped else x.reshape(shape)
    if name == "alibi_slopes" and len(shape) == 1:
        x, shape = x[..., None, :], (batch, *shape)
    return _jnp.broadcast_to(x, (size, *shape)).reshape(size * batch, *shape[1:])


def _map(primitive: Any, operands: Any, dims: Any, *, call: Call) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    operands = [x if d is None else _jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    mapped = {name: d is not None for name, d in zip(call.operands, dims, strict=True)}
    shapes = {
        name: tuple(x.shape[1:] if mapped[name] else x.shape) for name, x in zip(call.operands, operands, strict=True)
    }
    if _can_fold(shapes, mapped, call):
        batch = shapes["q"][0]
        folded = [
            _fold(name, x, mapped[name], shapes[name], size, batch)
            for name, x in zip(call.operands, operands, strict=True)
        ]
        results = primitive.bind(*folded, call=call)
        unfolded = [
            x.reshape(size, *(shapes["bias"] if name == "dbias" else (batch, *x.shape[1:])))
            for name, x in zip(call.results, results, strict=True)
        ]
        return unfolded, (0,) * len(unfolded)

    def compute_one(some: list[Any]) -> Any:
        left = iter(some)
        return primitive.bind(
            *(next(left) if mapped[name] else x for name, x in zip(call.operands, operands, strict=True)), call=call
        )

    results = jax.lax.map(compute_one, [x for name, x in zip(call.operands, operands, strict=True) if mapped[name]])
    return results, (0,) * len(results)


def _primitive(name: str) -> Any:
    primitive = _core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract)
    primitive.def_impl(_compute)
    _mlir.register_lowering(primitive, _refuse_platform)
    _mlir.register_lowering(primitive, _lower, platform="cpu")
    _batching.primitive_batchers[primitive] = functools.partial(_map, primitive)
    return primitive


_forward_p = _primitive("tessera_forward")
_backward_p = _primitive("tessera_backward")


# ---- gradients


def _attend(options: Options, return_lse: bool, *inputs: Any) -> Any:
    """o, or (o, lse), of the nine `Inputs`."""
    given = Inputs(*inputs).given()
    results = ("o", "lse") if return_lse else ("o",)
    o, *lse = _forward_p.bind(*given.values(), call=Call("forward", tuple(given), results, options))
    return (o, lse[0][..., 0]) if return_lse else o


def _attend_forward(options: Options, return_lse: bool, *inputs: Any) -> Any:
    """The output and what the backward pass needs. Inputs come with whether they are differentiated."""
    x = Inputs(*(None if one is None else one.value for one in inputs))
    perturbed = Inputs(*(one is not None and one.perturbed for one in inputs))
    if perturbed.alibi_slopes:
        raise NotImplementedError(
            "alibi_slopes is differentiated: tessera.attention has gradients of q, k, v, bias and sink only; "
            "jax.lax.stop_gradient(alibi_slopes) leaves it out"
        )
    o, lse = _attention(options, True, *x)
    # None or (), which have no leaves: JAX keeps structure, and makes arrays of all else.
    wanted = (() if perturbed.bias else None, () if perturbed.sink else None)
    return (o, lse) if return_lse else o, (x, o, lse, wanted)


def _attend_backward(options: Options, return_lse: bool, kept: Any, gradients: Any) -> Any:
    x, o, lse, (wants_dbias, wants_dsink) = kept
    dout, dlse = (None if _is_zero(g) else g for g in (gradients if return_lse else (gradients, None)))
    if dout is None and dlse is None:
        return (None,) * len(Inputs._fields)
    given = x.given()
    given |= {"o": o, "lse": lse[..., None], "dout": _jnp.zeros_like(o) if dout is None else dout}
    if dlse is not None:
        given["dlse"] = dlse[..., None]
    results = ["dq", "dk", "dv"]
    results += ["dbias"] if wants_dbias is not None else []
    results += ["dsink"] if wants_dsink is not None else []
    computed = _gradients(Call("backward", tuple(given), tuple(results), options), *given.values())
    named = dict(zip(results, computed, strict=True))
    return tuple(named.get("d" + name) for name in Inputs._fields)


def _is_zero(gradient: Any) -> bool:
    return gradient is None or isinstance(gradient, jax.custom_derivatives.SymbolicZero)


_attention = jax.custom_vjp(_attend, nondiff_argnums=(0, 1))
_attention.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _differentiate(call: Call, *operands: Any) -> Any:
    return _backward_p.bind(*operands, call=call)


def _refuse_second_derivatives(call: Call, kept: Any, gradients: Any) -> Any:
    raise NotImplementedError("tessera.attention has no second derivatives: its gradients cannot be differentiated")


_gradients = jax.custom_vjp(_differentiate, nondiff_argnums=(0,))
_gradients.defvjp(lambda call, *operands: (_gradients(call, *operands), None), _refuse_second_derivatives)


# ---- arguments


def _require_values(**numbers: Any) -> None:
    for name, number in numbers.items():
        if arrays.is_traced(number):
            raise TypeError(
                f"{name} is traced by JAX: must be known while tracing; mark it in jax.jit's static_argnames"
            )


def _plain(options: Options) -> Options:
    """Hashable, and the same text on both ways through JSON."""
    longest_q, longest_k, scale, softcap, left, right, top_left, dropout_p, deterministic, batch_invariant = options
    return (
        operator.index(longest_q), operator.index(longest_k), None if scale is None else float(scale), float(softcap),
        operator.index(left), operator.index(right), top_left, float(dropout_p), bool(deterministic),
        bool(batch_invariant),
    )  # fmt: skip


def _operand_of(rng_state: Any) -> Any:
    """The state of a dropout mask as an array."""
    if rng_state is None:
        raise ValueError(
            "rng_state is None, and JAX traces: one state would be drawn for all calls of the traced program. Pass "
            "(seed, offset), or an integer array of shape (2,), which may be traced, e.g. jax.random.key_data(key)"
        )
    if not arrays.is_traced(rng_state):
        words = [number >> shift & 0xFFFFFFFF for number in arrays.seed_and_offset(rng_state) for shift in (0, 32)]
        return np.array(words, np.uint32)
    if rng_state.shape != (2,) or rng_state.dtype.name not in ("int32", "uint32", "int64", "uint64"):
        raise ValueError(
            f"rng_state is {rng_state.dtype} of shape {rng_state.shape}: must be (seed, offset), an array of two "
            "integers of 32 or 64 bits"
        )
    return rng_state


def _varying_axes(x: Any) -> frozenset[str]:
    """The axes of a mesh over which x differs, inside jax.shard_map."""
    aval = jax.typeof(x)
    axes: frozenset[str] = aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying
    return axes


def _spread_alike(inputs: Inputs) -> Inputs:
    """What is the same on devices where other inputs differ is marked as differing: gradients are then summed."""
    axes = frozenset[str]().union(*map(_varying_axes, inputs.given().values()))
    if all(_varying_axes(x) == axes for x in inputs.given().values()):
        return inputs
    if not hasattr(jax.lax, "pcast"):
        raise NotImplementedError(
            f"some inputs are the same on devices where others differ, over axes {sorted(axes)} of the mesh, and this "
            "JAX has no jax.lax.pcast: pass check_vma=False to jax.shard_map"
        )
    return Inputs(
        *(
            x if x is None or not (missing := axes - _varying_axes(x))
            else jax.lax.pcast(x, tuple(sorted(missing)), to="varying")
            for x in inputs
        )
    )  # fmt: skip


def attention(q: Any, k: Any, v: Any, arguments: Arguments, return_lse: bool) -> Any:
    """As `tessera.attention`, where one of the arrays is traced."""
    a = arguments
    _require_values(
        causal=a.causal, softmax_scale=a.softmax_scale, softcap=a.softcap, dropout_p=a.dropout_p,
        max_seqlen_q=a.max_seqlen_q, max_seqlen_k=a.max_seqlen_k, deterministic=a.deterministic,
        batch_invariant=a.batch_invariant, return_lse=return_lse,
    )  # fmt: skip
    if isinstance(a.window, (tuple, list)):
        _require_values(**{f"window[{i}]": keys for i, keys in enumerate(a.window)})
    shapes, options = arrays.prepare(q, k, v, arguments)
    # Raises what the call itself would raise, but for what is wrong with values.
    _native.explain(*shapes[:3], None, None, *shapes[3:], None, *options, 0, 0, False, None)
    state = None if a.dropout_p == 0.0 else _operand_of(a.rng_state)
    cu_seqlens_k = a.cu_seqlens_q if a.cu_seqlens_k is None else a.cu_seqlens_k
    given = (q, k, v, a.bias, a.alibi_slopes, a.sink, a.cu_seqlens_q, cu_seqlens_k, state)
    inputs = _spread_alike(Inputs(*(None if x is None else _jnp.asarray(x) for x in given)))
    return _attention(_plain(options), bool(return_lse), *inputs)
