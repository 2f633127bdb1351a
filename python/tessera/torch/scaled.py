"""Attention of 8-bit tensors and their scales for torch tensors; outside autograd.

As in `ops`, the custom op `tessera::scaled_forward` is called where somebody watches (torch.compile, torch.export,
dispatch modes), otherwise the library itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _native
from ..arguments import Arguments, Options, Scales
from . import ops
from .ops import FRAMEWORK, NUMBERS, TENSORS, Inputs, empty_lse, empty_o
from .tensors import refuse_gradients, signed

# q_scale, k_scale, v_scale, score_shift, v_shift, k_block, v_block, head_dim_v.
Factors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int, int, int | None]

_library = torch.library.Library("tessera", "FRAGMENT")
_library.define(
    f"scaled_forward(Tensor q, Tensor k, Tensor v, {TENSORS}, Tensor q_scale, Tensor k_scale, Tensor? v_scale, "
    "Tensor? score_shift, Tensor? v_shift, SymInt k_block, SymInt v_block, SymInt? head_dim_v, "
    f"{NUMBERS}, bool batch_invariant, ScalarType dtype) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)

_HEAD_DIM_V = 12  # its place behind q, k and v
_HALVES = (torch.bfloat16, torch.float16)
# What `_native` takes for types that a framework does not export: not for a caller's own.
_BITS = (torch.uint8, getattr(torch, "uint16", None))  # the second since torch 2.3


def _exports_float8() -> bool:
    """Whether torch hands float8 over by DLPack, which versions of 2025 do not."""
    try:
        torch.empty(1, dtype=torch.float8_e4m3fn, device="cpu").__dlpack__()
    except (BufferError, RuntimeError):
        return False
    return True


travels_as_bits = not _exports_float8()


def prepare(q: Tensor, k: Tensor, v: Tensor, scales: Scales, arguments: Arguments) -> tuple[Inputs, Factors, Options]:
    """The tensors and the numbers, for `_native`."""
    inputs, options = ops.prepare(q, k, v, arguments, casts=False)
    ops.require_strided(q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype in _BITS:
            accepted = "torch.float8_e4m3fn or torch.int8" + (", or of 16 bits" if name == "v" else "")
            raise ValueError(f"{name}.dtype = {x.dtype}: must be {accepted}")
    q_scale, k_scale, v_scale, shift, v_shift = factors = (
        scales.q_scale, scales.k_scale, scales.v_scale, scales.score_shift, scales.v_shift,
    )  # fmt: skip
    ops.require_tensors(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, score_shift=shift, v_shift=v_shift)
    return inputs, (*factors, scales.k_block, scales.v_block, scales.head_dim_v), options


def _like_o(v: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor of o's type."""
    if dtype is None:
        dtype = v.dtype if v.dtype in _HALVES else torch.bfloat16
    elif dtype is not torch.float32 and dtype not in _HALVES:
        raise ValueError(f"dtype = {dtype}: must be torch.float32, torch.bfloat16 or torch.float16")
    return v if v.dtype is dtype else v.new_empty(0, dtype=dtype)


def _values(q: Tensor, v: Tensor, head_dim_v: int | None) -> Tensor:
    """v; where it lies in tiles, what has its type and rows of as many columns."""
    if head_dim_v is None:
        return v
    if not isinstance(head_dim_v, (int, torch.SymInt)):
        raise TypeError(f"head_dim_v = {head_dim_v!r}: must be an integer, or None where v lies in rows")
    return v.new_empty(max(head_dim_v, 0)).expand(*q.shape[:-1], -1)


def readable(x: Any) -> Any:
    """x as `_native` can read it: with its sign, and with its bits where torch does not export its type."""
    if travels_as_bits and isinstance(x, Tensor) and x.dtype is torch.float8_e4m3fn:
        x = x.view(torch.uint8)
    return signed(x)


def run(inputs: Inputs, factors: Factors, options: Options, o: Tensor, lse: Tensor | None) -> None:
    q, k, v, *others = map(readable, inputs)
    _native.scaled_forward(q, k, v, o, lse, *others, *map(readable, factors), *options, 0, 0, FRAMEWORK)


@torch.library.impl(_library, "scaled_forward", "CompositeExplicitAutograd")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    *shared, batch_invariant, dtype = more
    others, factors, numbers = shared[:5], shared[5:13], shared[13:]
    o, lse = empty_o(q, _values(q, v, factors[-1]), _like_o(v, dtype)), empty_lse(q)
    run((q, k, v, *others), (*factors,), (*numbers, 0.0, False, batch_invariant), o, lse)
    return o, lse


@torch.library.register_fake("tessera::scaled_forward", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return empty_o(q, _values(q, v, more[_HEAD_DIM_V]), _like_o(v, more[-1])), empty_lse(q)


@register_flop_formula(torch.ops.tessera.scaled_forward, get_raw=False)
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *more: Any, **_: Any) -> int:
    if more[_HEAD_DIM_V] is not None:
        v_shape = (more[_HEAD_DIM_V],)
    return ops.flops(q_shape, k_shape, v_shape, 1, 1)


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Scales,
    arguments: Arguments,
    dtype: torch.dtype | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tessera.scaled_attention` for torch tensors."""
    inputs, factors, options = prepare(q, k, v, scales, arguments)
    refuse_gradients(
        "scaled_attention", q=q, k=k, v=v, q_scale=scales.q_scale, k_scale=scales.k_scale, v_scale=scales.v_scale,
        score_shift=scales.score_shift, v_shift=scales.v_shift, bias=arguments.bias, sink=arguments.sink,
    )  # fmt: skip
    like = _like_o(v, dtype)
    lse: Tensor | None
    if ops.is_watched(q) or ops.is_transformed():
        for name, x in (("q_scale", scales.q_scale), ("k_scale", scales.k_scale)):
            if x is None:
                raise ValueError(f"{name} is None: a scale is required, and a missing one is not 1")
        *numbers, _, _, batch_invariant = options
        o, lse = torch.ops.tessera.scaled_forward(*inputs, *factors, *numbers, batch_invariant, like.dtype)
    else:
        o, lse = empty_o(q, _values(q, v, scales.head_dim_v), like), empty_lse(q) if return_lse else None
        run(inputs, factors, options, o, lse)
    return o if lse is None or not return_lse else (o, lse)


def explain_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Scales,
    arguments: Arguments,
    dtype: torch.dtype | None,
    device: str | None,
) -> str:
    """`tessera.explain_scaled` for torch tensors."""
    inputs, factors, options = prepare(q, k, v, scales, arguments)
    like = _like_o(v, dtype)
    # o without its memory: one row that all of them share.
    columns = _values(q, v, scales.head_dim_v).shape[-1:]
    o = like.new_empty(columns).expand(q.shape[:-1] + columns)
    q, k, v, *others = map(readable, inputs)
    return _native.explain_scaled(q, k, v, o, None, *others, *factors, *options, 0, 0, device)
