"""`tessera.attention` of a lower precision for torch tensors: q, k and v are rounded to 8 bits on the way.

The gradient is that of attention over what they were rounded to, by the backward of 16 bits, and passes the rounding as
if it were none (straight through). 8-bit tensors and scales are kept for it, not those that came.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import eight_bits
from ..arguments import Arguments
from . import ops, quantize, scaled
from .ops import NUMBERS, TENSORS, empty_lse, empty_o

_library = torch.library.Library("tessera", "FRAGMENT")
_library.define(
    f"precision_forward(Tensor q, Tensor k, Tensor v, {TENSORS}, {NUMBERS}, bool deterministic, bool batch_invariant, "
    "str precision) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _numbers(q: Tensor, v: Tensor, options: tuple[Any, ...], precision: str) -> tuple[Any, ...]:
    """Of `quantize.make`."""
    longest_q, longest_k = options[:2]
    type_name = eight_bits.type_of(precision)
    return (
        longest_q, longest_k, eight_bits.k_block_of(type_name, q.shape[-1]), eight_bits.v_block_of(q.shape[-1]),
        eight_bits.hadamard_of(q.shape[-1]), _in_tiles(v, precision), False, False, quantize.TYPES[type_name],
    )  # fmt: skip


def _in_tiles(v: Tensor, precision: str) -> bool:
    return v.device.type == "cuda" and precision == "e4m3"


def _made_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Any, Any], precision: str) -> quantize.Inputs:
    none = (None,) * 3
    return (q, k, v if precision == "e4m3" else None, *none, *none, *cu_seqlens, *none)


def _run(
    inputs: ops.Inputs, options: tuple[Any, ...], precision: str, o: Tensor, lse: Tensor | None
) -> tuple[Tensor, ...]:
    """Writes o and lse; returns q, k and v of 8 bits and their scales, those of v of no elements where it stays."""
    q, k, v, *others = inputs
    numbers = _numbers(q, v, options, precision)
    made = quantize.make(_made_of(q, k, v, (others[3], others[4]), precision), *numbers)
    q8, k8, v8, q_scale, k_scale, v_scale, _ = made
    assert q8 is not None and k8 is not None and q_scale is not None and k_scale is not None
    tiles = numbers[5]
    factors: Any = (
        q_scale, k_scale, v_scale, None, None, numbers[2], 0 if v8 is None else numbers[3],
        v.shape[-1] if tiles else None,
    )  # fmt: skip
    left: Any = (q8, k8, v if v8 is None else v8, *others)
    scaled.run(left, factors, (*options[:7], 0.0, *options[7:]), o, lse)
    if v8 is None or v_scale is None:
        v8, v_scale = q_scale.new_empty(0), q_scale.new_empty(0)
    return q8, k8, v8, q_scale, k_scale, v_scale


def _split(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[ops.Inputs, tuple[Any, ...], str]:
    *options, precision = more[5:]
    return (q, k, v, *more[:5]), tuple(options), precision


@torch.library.impl(_library, "precision_forward", "CompositeExplicitAutograd")
def _forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, precision = _split(*arguments)
    q, _, v, *_ = inputs
    o, lse = empty_o(q, v), empty_lse(q)
    return o, lse, *_run(inputs, options, precision, o, lse)


@torch.library.register_fake("tessera::precision_forward", lib=_library)
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    (q, k, v, *others), options, precision = _split(*arguments)
    _, _, k_block, v_block, _, tiles, _, _, dtype = _numbers(q, v, options, precision)
    made = quantize.results(_made_of(q, k, v, (others[3], others[4]), precision), k_block, v_block, tiles, dtype)
    whole = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in made[:6])
    return empty_o(q, v), empty_lse(q), *whole


@register_flop_formula(torch.ops.tessera.precision_forward, get_raw=False)
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return ops.flops(q_shape, k_shape, v_shape, 1, 1)


# ---- gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *shared = inputs
    _, options, precision = _split(*inputs)
    ctx.save_for_backward(*output, *shared[:5], v if precision == "int8" else None)
    ctx.options, ctx.precision = options, precision
    ctx.dtype, ctx.rows_k, ctx.columns = q.dtype, k.shape[-3], v.shape[-1]
    ctx.tiles = _in_tiles(v, precision)
    ctx.set_materialize_grads(False)


def _rounded(ctx: Any, saved: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they were rounded, q and k after their Hadamard transform: elements times scales."""
    _, _, q8, k8, v8, q_scale, k_scale, v_scale, _, _, _, cu_seqlens_q, cu_seqlens_k, v = saved
    packed, dtype = cu_seqlens_q is not None, ctx.dtype
    q = (q8.float() * quantize.of_tokens(q_scale, packed)).to(dtype)
    rows = ctx.rows_k
    k_block = eight_bits.k_block_of(eight_bits.type_of(ctx.precision), q8.shape[-1])
    k = (k8.float() * quantize.of_blocks(k_scale, k_block, rows, cu_seqlens_k)).to(dtype)
    if v is None:
        if ctx.tiles:
            v8 = quantize.values_in_rows(v8, ctx.columns, rows, cu_seqlens_k)
        block = eight_bits.v_block_of(q8.shape[-1])
        v = (v8.float() * quantize.of_blocks(v_scale, block, rows, cu_seqlens_k)).to(dtype)
    return q, k, v


def _turned_back(x: Tensor, block: int) -> Any:
    """The Hadamard transform of its columns in blocks, which is its own inverse."""
    if block == 0:
        return x
    # A matrix of powers of two is exact in every type; the rest of 1 / sqrt(block) comes after.
    exponent = int(math.log2(block))
    matrix = torch.full((1, 1), 2.0 ** -(exponent // 2), dtype=x.dtype, device=x.device)
    for _ in range(exponent):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned = (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)
    return turned if exponent % 2 == 0 else turned * 0.5**0.5


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * (len(ctx.options) + 1)
    if dout is None and dlse is None:
        return (None,) * 8 + none
    saved = ctx.saved_tensors  # once: who recomputes them allows no more
    o, lse, *_, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, _ = saved
    if dout is None:
        dout = torch.zeros_like(o)
    q, k, v = _rounded(ctx, saved)
    needs_dbias, needs_dsink = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, dbias, dsink = torch.ops.tessera.backward(
        dout, dlse, q, k, v, o, lse, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, None, *ctx.options[:7], 0.0,
        *ctx.options[7:], needs_dbias, needs_dsink,
    )  # fmt: skip
    block = eight_bits.hadamard_of(q.shape[-1])
    return (
        _turned_back(dq, block), _turned_back(dk, block), dv, dbias if needs_dbias else None, None,
        dsink if needs_dsink else None, None, None, *none,
    )  # fmt: skip


torch.library.register_autograd(
    "tessera::precision_forward", _differentiate, setup_context=_setup_context, lib=_library
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, precision: str, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`tessera.attention` of a lower precision."""
    eight_bits.type_of(precision)
    eight_bits.require_features(arguments, precision)
    inputs, options = ops.prepare(q, k, v, arguments)
    q, k, v, bias, _, sink, _, _ = inputs
    ops.require_strided(q)
    ops.check_rows(q, v)
    if v.dtype is not q.dtype:
        raise ValueError(f"v.dtype = {v.dtype}, but q.dtype = {q.dtype}: they must be the same")
    if q.device.type == "cuda" and q.dtype is torch.float32:
        raise NotImplementedError(
            "q.dtype = float32: on a GPU it must be bfloat16 or float16 (a CPU takes float32, too)"
        )
    if precision == "int8" and v.dtype is torch.float32:
        eight_bits.refuse_wide_v("float32", precision)
    if ops.is_transformed():
        raise NotImplementedError(f"precision = {precision!r} under a transform of torch.func: must be None there")
    numbers = (*options[:7], *options[8:])  # without dropout
    lse: Tensor | None
    if ops.is_watched(q) or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sink))
    ):
        o, lse, *_ = torch.ops.tessera.precision_forward(*inputs, *numbers, precision)
    else:
        o, lse = empty_o(q, v), empty_lse(q) if return_lse else None
        _run(inputs, numbers, precision, o, lse)
    return o if lse is None or not return_lse else (o, lse)
