"""Attention with a second query, which multiplies v (latent attention with absorbed weights), for torch tensors;
outside autograd.

For keys in a cache `cache` has it. As there, the custom op `tessera::latent_forward` is called where somebody watches.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _native
from ..arguments import Arguments, Options, refuse_dropout_with_qv
from . import ops
from .ops import FRAMEWORK, NUMBERS, TENSORS, Inputs, empty_lse, empty_o, outputs, require_tensors
from .tensors import refuse_gradients, signed

_library = torch.library.Library("tessera", "FRAGMENT")
_library.define(
    f"latent_forward(Tensor q, Tensor k, Tensor v, {TENSORS}, Tensor qv, {NUMBERS}, bool batch_invariant) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def prepare_qv(qv: Any, q: Tensor) -> Tensor:
    """qv, for `_native`, beside a q that is ready for it."""
    require_tensors(qv=qv)
    if qv.dtype is not q.dtype and torch.is_autocast_enabled(q.device.type):
        qv = qv.to(q.dtype)
    ready: Tensor = qv
    return ready


def _run(inputs: Inputs, qv: Tensor, options: Options, o: Tensor, lse: Tensor | None) -> None:
    q, k, v, *others = map(signed, inputs)
    _native.forward(q, k, v, o, lse, *others, signed(qv), *options, 0, 0, FRAMEWORK)


@torch.library.impl(_library, "latent_forward", "CompositeExplicitAutograd")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, qv, *numbers, batch_invariant = more
    o, lse = outputs(q, v)
    inputs = (q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k)
    options: Any = (*numbers, 0.0, False, batch_invariant)
    _run(inputs, qv, options, o, lse)
    return o, lse


@torch.library.register_fake("tessera::latent_forward", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return outputs(q, v)


@register_flop_formula(torch.ops.tessera.latent_forward, get_raw=False)
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return ops.flops(q_shape, k_shape, v_shape, 1, 2)


def attention_with_qv(
    q: Tensor, k: Tensor, v: Tensor, qv: Any, arguments: Arguments, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`tessera.attention` with qv, for torch tensors."""
    refuse_dropout_with_qv(arguments)
    inputs, options = ops.prepare(q, k, v, arguments)
    q, k, v, bias, _, sink, _, _ = inputs
    qv = prepare_qv(qv, q)
    refuse_gradients("attention with qv", q=q, k=k, v=v, qv=qv, bias=bias, sink=sink)
    if ops.is_transformed():
        raise NotImplementedError("qv under a transform of torch.func: must be None there")
    lse: Tensor | None
    if ops.is_watched(q):
        *numbers, _, _, batch_invariant = options
        o, lse = torch.ops.tessera.latent_forward(*inputs, qv, *numbers, batch_invariant)
    else:
        o, lse = empty_o(q, v), empty_lse(q) if return_lse else None
        _run(inputs, qv, options, o, lse)
    return o if lse is None or not return_lse else (o, lse)
