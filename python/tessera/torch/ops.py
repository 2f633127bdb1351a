"""Attention for torch tensors.

`attention` is differentiable and goes one of two ways. Under torch.compile, torch.export, torch.jit.trace and dispatch
modes it calls the custom ops `tessera::forward` and `tessera::backward`, which have fake implementations. Otherwise,
torch.func included, it calls the library straight away: on the host that costs a third of an op, a sixth with autograd
(docs/python.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _native
from ..arguments import Arguments, Options, band, is_top_left, require_packed
from . import folding
from .tensors import refuse_gradients, rows

# The eight input tensors in the library's order: q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


# ---- arguments


def require_tensors(**given: Any) -> None:
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__!r}, but q is a torch tensor")


def require_strided(q: Tensor) -> None:
    if q.layout is not torch.strided:
        raise ValueError(f"q.layout = {q.layout}: must be torch.strided, e.g. by q.to_dense()") from None


def longest_of(name: str, cu_seqlens: Tensor, longest: int | None) -> int:
    if longest is not None:
        return longest
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"max_seqlen_{name} is None: on a GPU it must be given (reading it from cu_seqlens_{name} would wait for "
            "the device); any upper bound will do"
        )
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def draw_rng_state() -> Tensor:
    """(seed, offset) of a dropout mask, from torch's generator for the CPU."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")


def seed_and_offset(rng_state: Any) -> tuple[int, int]:
    """The two numbers of a state, which are taken modulo 2^64."""
    if not isinstance(rng_state, Tensor) or rng_state.shape != (2,) or rng_state.dtype is not torch.int64:
        given = (
            f"{rng_state.dtype} of shape {tuple(rng_state.shape)}" if isinstance(rng_state, Tensor) else repr(rng_state)
        )
        raise ValueError(f"rng_state is {given}: must be (seed, offset), a torch.int64 tensor of shape (2,)")
    seed, offset = rng_state.tolist()
    return seed, offset


def _seed(rng_state: Tensor, device: torch.device) -> tuple[int, int]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout_p > 0 while a CUDA graph is captured: every replay would draw the same mask; "
            "capture without dropout"
        )
    return seed_and_offset(rng_state)


# Looked up once: every call asks.
_autocasts = torch._C._is_any_autocast_enabled
_uint16 = getattr(torch, "uint16", None)  # since torch 2.3


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q, k and v get its type, as torch's own attention does it."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def prepare(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, casts: bool = True) -> tuple[Inputs, Options]:
    """The tensors and the numbers, for `_native`; without the state of the dropout. casts: as autocast says."""
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        name, other = ("v", v) if isinstance(k, Tensor) else ("k", k)
        raise TypeError(f"{name} is of type {type(other).__name__!r}, but q is a torch tensor")
    bias, alibi_slopes, sink = arguments.bias, arguments.alibi_slopes, arguments.sink
    if bias is not None or alibi_slopes is not None or sink is not None:
        require_tensors(bias=bias, alibi_slopes=alibi_slopes, sink=sink)
    if _autocasts() and casts:
        q, k, v = _autocast(q, k, v)
    if q.dtype is _uint16:
        raise ValueError("q.dtype = uint16: must be float32, bfloat16 or float16")
    causal, window = arguments.causal, arguments.window
    left, right = (-1, 0 if causal else -1) if window == (-1, -1) else band(causal, window)
    cu_seqlens_q, cu_seqlens_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    max_seqlen_q, max_seqlen_k = arguments.max_seqlen_q, arguments.max_seqlen_k
    longest_q = longest_k = 0
    if cu_seqlens_q is not None:
        require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        longest_q = longest_of("q", cu_seqlens_q, max_seqlen_q)
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
            longest_k = longest_q if max_seqlen_k is None else max_seqlen_k
        else:
            longest_k = longest_of("k", cu_seqlens_k, max_seqlen_k)
    elif cu_seqlens_k is not None or max_seqlen_q is not None or max_seqlen_k is not None:
        require_packed(arguments)
    return (q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k), (
        longest_q, longest_k, arguments.softmax_scale, arguments.softcap, left, right, is_top_left(arguments.alignment),
        arguments.dropout_p, arguments.deterministic, arguments.batch_invariant,
    )  # fmt: skip


# ---- the library


def allocate(size: int, q: Tensor) -> Tensor:
    """Workspace of a run on a GPU, from torch's allocator, on the stream of the run; where C is not offered it."""
    return q.new_empty(size, dtype=torch.uint8)


def stream_of(q: Tensor) -> int:
    """The handle of the stream of a run on a GPU. Versions of torch that offer theirs to C are not asked so."""
    stream: int = torch._C._cuda_getCurrentRawStream(q.get_device())
    return stream


def empty_lse(q: Tensor) -> Tensor:
    """Uninitialised lse."""
    shape = q.shape
    return q.new_empty((shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0]), dtype=torch.float32)


def check_rows(q: Tensor, v: Tensor) -> None:
    """What results' shapes are read from; the library checks the rest."""
    for name, tensor in (("q", q), ("v", v)):
        if tensor.dim() not in (3, 4):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: must be (batch, seqlen, heads, head_dim); "
                "with cu_seqlens_q (total, heads, head_dim)"
            )


def empty_o(q: Tensor, v: Tensor, like: Tensor | None = None) -> Tensor:
    """Uninitialised o, whose dimensions lie in memory in the order of q's, as torch's own attention has it.

    like: of o's type; None: it is q's.
    """
    # Whole shapes and strides: to ask for one number of them takes longer.
    shape, shape_v = q.shape, v.shape
    if like is None and len(shape) == len(shape_v) > 2 and shape[-1] == shape_v[-1]:
        # Three times as fast as giving a shape.
        try:
            o = torch.empty_like(q)
            return o if o.stride()[-1] == 1 else torch.empty_like(q, memory_format=torch.contiguous_format)
        except RuntimeError:
            require_strided(q)
            raise
    check_rows(q, v)
    like = q if like is None else like
    if q.is_contiguous():
        return like.new_empty(q.shape[:-1] + v.shape[-1:])
    order = sorted(range(q.dim() - 1), key=q.stride, reverse=True) if 0 not in q.stride() else range(q.dim() - 1)
    o = like.new_empty([q.size(i) for i in order] + [v.size(-1)])
    return o.permute(*sorted(range(q.dim() - 1), key=list(order).__getitem__), -1)


# What the library is told of torch.
FRAMEWORK = (Tensor, stream_of, allocate, torch.empty_like, empty_o)


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised o and lse."""
    check_rows(q, v)
    return empty_o(q, v), empty_lse(q)


def _signed(inputs: Inputs) -> Inputs:
    """The tensors with the signs that torch has put off: the library reads memory as it lies."""
    q, k, v, bias, alibi_slopes, sink, _, _ = inputs
    if (
        q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or (bias is not None and bias.is_neg())
        or (alibi_slopes is not None and alibi_slopes.is_neg())
        or (sink is not None and sink.is_neg())
    ):
        signed: Any = tuple(None if x is None else x.resolve_neg() for x in inputs)
        inputs = signed
    return inputs


def run_forward(inputs: Inputs, options: Options, rng_state: Tensor | None, o: Tensor, lse: Tensor | None) -> None:
    q = inputs[0]
    seed, offset = (0, 0) if rng_state is None else _seed(rng_state, q.device)
    inputs = _signed(inputs)
    _native.forward(*inputs[:3], o, lse, *inputs[3:], None, *options, seed, offset, FRAMEWORK)


def run_backward(
    inputs: Inputs,
    options: Options,
    rng_state: Tensor | None,
    o: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    dsink: Tensor | None,
) -> None:
    q = inputs[0]
    seed, offset = (0, 0) if rng_state is None else _seed(rng_state, q.device)
    inputs, o, lse, dout = _signed(inputs), o.resolve_neg(), lse.resolve_neg(), rows(dout.resolve_neg())
    if dlse is not None:
        dlse = dlse.resolve_neg().contiguous()
    _native.backward(
        *inputs[:3], o, lse, *inputs[3:], *options, seed, offset, dout, dlse, dq, dk, dv, dbias, dsink,
        FRAMEWORK,
    )  # fmt: skip


# ---- custom ops

TENSORS = "Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
NUMBERS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? softmax_scale, float softcap, SymInt window_left, "
    "SymInt window_right, bool top_left"
)
_SHARED = f"{TENSORS}, Tensor? rng_state, {NUMBERS}, float dropout_p, bool deterministic, bool batch_invariant"
_library = torch.library.Library("tessera", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_SHARED}) -> (Tensor, Tensor)", tags=(torch.Tag.needs_fixed_stride_order,)
)
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_SHARED}, bool needs_dbias, bool needs_dsink) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _split(
    q: Any, k: Any, v: Any, bias: Any, alibi_slopes: Any, sink: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    rng_state: Any, *options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """q, k, v and `_SHARED`, or what belongs to each of them, as `Inputs`, rng_state and `Options`."""
    return (q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k), rng_state, options


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> tuple[Tensor, Tensor]:
    o, lse = outputs(q, v)
    inputs, rng_state, options = _split(q, k, v, *shared)
    run_forward(inputs, options, rng_state, o, lse)
    return o, lse


@torch.library.register_fake("tessera::forward", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> tuple[Tensor, Tensor]:
    return outputs(q, v)


def _gradients(inputs: Inputs, needs_dbias: bool, needs_dsink: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv, and dbias and dsink, which are of no elements if not needed."""
    q, k, v, bias, _, sink, *_ = inputs
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias.new_empty(bias.shape) if needs_dbias and bias is not None else q.new_empty(0),
        sink.new_empty(sink.shape) if needs_dsink and sink is not None else q.new_empty(0),
    )


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *shared, needs_dbias, needs_dsink = more
    inputs, rng_state, options = _split(q, k, v, *shared)
    dq, dk, dv, dbias, dsink = _gradients(inputs, needs_dbias, needs_dsink)
    run_backward(
        inputs, options, rng_state, o, lse, dout, dlse, dq, dk, dv,
        dbias if needs_dbias else None, dsink if needs_dsink else None,
    )  # fmt: skip
    return dq, dk, dv, dbias, dsink


@torch.library.register_fake("tessera::backward", lib=_library)
def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *shared, needs_dbias, needs_dsink = more
    return _gradients(_split(q, k, v, *shared)[0], needs_dbias, needs_dsink)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, rng_state, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, rng_state)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, *shared = ctx.saved_tensors
    none = (None,) * len(ctx.numbers)
    if dout is None and dlse is None:
        return (None,) * 9 + none
    if dout is None:
        dout = torch.zeros_like(o)
    needs_dbias, needs_dsink = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, dbias, dsink = torch.ops.tessera.backward(
        dout, dlse, q, k, v, o, lse, *shared, *ctx.numbers, needs_dbias, needs_dsink
    )
    return (
        dq, dk, dv, dbias if needs_dbias else None, None, dsink if needs_dsink else None, None, None, None, *none
    )  # fmt: skip


def flops(q_shape: Any, k_shape: Any, v_shape: Any, products_d: int, products_dv: int) -> int:
    """Of products with head_dim and head_dim_v columns, as torch counts its own attention: masks disregarded, and so
    the boundaries of packed sequences."""
    rows, keys = q_shape.numel() // q_shape[-1], k_shape[-3]
    return int(2 * rows * keys * (products_d * q_shape[-1] + products_dv * v_shape[-1]))


@register_flop_formula(torch.ops.tessera.forward, get_raw=False)
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return flops(q_shape, k_shape, v_shape, 1, 1)


@register_flop_formula(torch.ops.tessera.backward, get_raw=False)
def _backward_flops(_: Any, __: Any, q_shape: Any, k_shape: Any, v_shape: Any, *___: Any, **____: Any) -> int:
    return flops(q_shape, k_shape, v_shape, 3, 2)


def _refuse_second_derivatives(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("tessera.attention has no second derivatives: its gradients cannot be differentiated")


torch.library.register_autograd("tessera::forward", _differentiate, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tessera::backward", _refuse_second_derivatives, lib=_library)


def _vmap_forward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    inputs, rng_state, options = _split(*arguments)
    dims, rng_dim, _ = _split(*in_dims)
    fold = folding.Fold(info, dims, inputs, rng_dim, rng_state)
    return fold.results(*torch.ops.tessera.forward(*fold.inputs, fold.rng_state, *options))


def _vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    dout, dlse, q, k, v, o, lse, *shared, needs_dbias, needs_dsink = arguments
    dout_dim, dlse_dim, q_dim, k_dim, v_dim, o_dim, lse_dim, *shared_dims = in_dims
    inputs, rng_state, options = _split(q, k, v, *shared)
    dims, rng_dim, _ = _split(q_dim, k_dim, v_dim, *shared_dims)
    fold = folding.Fold(info, dims, inputs, rng_dim, rng_state, needs_dbias, needs_dsink)
    gradients = torch.ops.tessera.backward(
        fold.rows(dout, dout_dim), fold.rows(dlse, dlse_dim), *fold.inputs[:3], fold.rows(o, o_dim),
        fold.rows(lse, lse_dim), *fold.inputs[3:], fold.rng_state, *options, needs_dbias, needs_dsink,
    )  # fmt: skip
    return fold.gradients(*gradients)


if hasattr(torch.library, "register_vmap"):  # from 2.5 on; before, torch refuses in its own words
    torch.library.register_vmap("tessera::forward", _vmap_forward, lib=_library)
    torch.library.register_vmap("tessera::backward", _vmap_backward, lib=_library)


# ---- autograd without the dispatcher


class _Forward(torch.autograd.Function):
    """The same as the ops' autograd at a fraction of its cost on the host, and under torch.func's transforms."""

    @staticmethod
    def forward(options: Options, rng_state: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        o, lse = outputs(inputs[0], inputs[2])
        run_forward(inputs, options, rng_state, o, lse)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options, ctx.rng_state, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *inputs, o, lse = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * 10
            dout = torch.zeros_like(o)
        needs = ctx.needs_input_grad[5], ctx.needs_input_grad[7]
        # A graph of the gradients is asked for (create_graph, torch.func): it gets a node that refuses.
        compute = _Backward.apply if torch.is_grad_enabled() else _Backward.forward
        dq, dk, dv, dbias, dsink = compute(ctx.options, ctx.rng_state, needs, dout, dlse, o, lse, *inputs)
        return None, None, dq, dk, dv, dbias, None, dsink, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, rng_state: Tensor | None, *inputs: Any) -> Any:
        fold = folding.Fold(info, in_dims[2:], inputs, in_dims[1], rng_state)
        return fold.results(*_Forward.apply(options, fold.rng_state, *fold.inputs))


class _Eager(torch.autograd.Function):
    """The same in the older style, without which torch inspects signatures on every call; not for torch.func."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = _Forward.forward(*arguments)
        _Forward.setup_context(ctx, arguments, output)
        return output

    backward = _Forward.backward


class _Backward(torch.autograd.Function):
    """dq, dk, dv, and dbias and dsink or None; not differentiable."""

    @staticmethod
    def forward(
        options: Options, rng_state: Tensor | None, needs: tuple[bool, bool], dout: Tensor, dlse: Tensor | None,
        o: Tensor, lse: Tensor, *inputs: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        dq, dk, dv, all_dbias, all_dsink = _gradients(inputs, *needs)
        dbias, dsink = all_dbias if needs[0] else None, all_dsink if needs[1] else None
        run_backward(inputs, options, rng_state, o, lse, dout, dlse, dq, dk, dv, dbias, dsink)
        return dq, dk, dv, dbias, dsink

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    backward = staticmethod(_refuse_second_derivatives)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, options: Options, rng_state: Tensor | None, needs: tuple[bool, bool], *tensors: Any
    ) -> Any:
        dout, dlse, o, lse, *inputs = tensors
        fold = folding.Fold(info, in_dims[7:], tuple(inputs), in_dims[1], rng_state, *needs)
        along_rows = (fold.rows(x, dim) for x, dim in zip((dout, dlse, o, lse), in_dims[3:7], strict=True))
        return fold.gradients(*_Backward.apply(options, fold.rng_state, needs, *along_rows, *fold.inputs))


_no_dispatch = Tensor.__torch_dispatch__
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced: Callable[[], bool] = torch._C._is_tracing  # by torch.jit.trace
is_compiling = torch.compiler.is_compiling

# Whether torch.func transforms what is computed.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


# Whom `_native.is_plain` asks whether a call with some tensors may go straight to the library: they are torch's own and
# no subclass's, need no gradient, have their signs in memory, and nobody watches or transforms what is called.
# Compilers do not look into it: they are to be asked before.
WATCH = (Tensor, Tensor.is_neg, torch.is_grad_enabled, _is_traced, _dispatch_modes, is_transformed)


def is_watched(q: Tensor) -> bool:
    """Whether somebody wants to see the operators that are called, or nothing is to be computed."""
    return (
        is_compiling()
        or _is_traced()
        or _dispatch_modes() > 0
        or type(q).__torch_dispatch__ is not _no_dispatch
        or q.is_meta
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`tessera.attention` for torch tensors. A few microseconds are all it may take: docs/python.md has them."""
    inputs, options = prepare(q, k, v, arguments)
    q, k, v, bias, _, sink, _, _ = inputs
    lse: Any  # None where nobody asks for it
    rng_state = arguments.rng_state
    state = None if arguments.dropout_p == 0.0 else draw_rng_state() if rng_state is None else rng_state
    if is_watched(q):
        if q.is_nested:
            raise NotImplementedError("q is a nested tensor: pack it and pass cu_seqlens_q")
        o, lse = torch.ops.tessera.forward(*inputs, state, *options)
    elif is_transformed():
        o, lse = _Forward.apply(options, state, *inputs)
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    ):
        o, lse = _Eager.apply(options, state, *inputs)
    else:
        o = empty_o(q, v)
        lse = empty_lse(q) if return_lse else None
        run_forward(inputs, options, state, o, lse)
    return (o, lse) if return_lse else o


# ---- partial results

_library.define(
    "combine(Tensor o_parts, Tensor lse_parts, ScalarType dtype) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _combine_into(o_parts: Tensor, lse_parts: Tensor, o: Tensor) -> Tensor:
    """Writes o and returns lse."""
    if o_parts.dtype is _uint16:
        raise ValueError("o_parts.dtype = uint16: must be float32, bfloat16 or float16")
    lse = lse_parts.new_empty(lse_parts.shape[1:])
    _native.combine(rows(o_parts.resolve_neg()), lse_parts.resolve_neg(), o, lse, FRAMEWORK)
    return lse


@torch.library.impl(_library, "combine", "CompositeExplicitAutograd")
def _combine_op(o_parts: Tensor, lse_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    o = o_parts.new_empty(o_parts.shape[1:], dtype=dtype)
    return o, _combine_into(o_parts, lse_parts, o)


@torch.library.register_fake("tessera::combine", lib=_library)
def _combine_fake(o_parts: Tensor, lse_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return o_parts.new_empty(o_parts.shape[1:], dtype=dtype), lse_parts.new_empty(lse_parts.shape[1:])


def combine(
    o_parts: Tensor, lse_parts: Tensor, dtype: torch.dtype | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`tessera.combine` for torch tensors. `out`: where o is written, instead of `dtype`."""
    if not isinstance(lse_parts, Tensor):
        raise TypeError(f"lse_parts is of type {type(lse_parts).__name__!r}, but o_parts is a torch tensor")
    refuse_gradients("combine", o_parts=o_parts, lse_parts=lse_parts)
    for name, x in (("o_parts", o_parts), ("lse_parts", lse_parts)):
        if x.dim() == 0:
            raise ValueError(f"{name} has shape (): its first dimension must be that of the parts")
    if out is not None:
        dtype = out.dtype
    elif dtype is None:
        dtype = o_parts.dtype
    if is_watched(o_parts) or is_transformed():
        o, lse = torch.ops.tessera.combine(o_parts, lse_parts, dtype)
    elif out is not None and out.dim() > 0 and out.stride(-1) == 1 and out.device == o_parts.device:
        return out, _combine_into(o_parts, lse_parts, out)
    else:
        o, lse = _combine_op(o_parts, lse_parts, dtype)
    return (o if out is None else out.copy_(o)), lse
