"""Both passes for torch tensors outside autograd, for code that has its own."""

import torch
from torch import Tensor

from ..arguments import Arguments
from . import ops


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, rng_state) of `tessera.attention`, outside autograd.

    rng_state is what `backward` needs to draw the same dropout mask: int64 (2,) on the CPU, of no elements without
    dropout. `out`: where o is written, any strides whose last is 1.
    """
    inputs, options = ops.prepare(q, k, v, Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, dropout_p, rng_state, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, batch_invariant,
    ))  # fmt: skip
    state = None if dropout_p == 0.0 else ops.draw_rng_state() if rng_state is None else rng_state
    if ops.is_watched(q):
        o, lse = torch.ops.tessera.forward(*inputs, state, *options)
        o = o if out is None else out.copy_(o)
    else:
        o, lse = ops.outputs(inputs[0], inputs[2])
        o = o if out is None else out
        ops.run_forward(inputs, options, state, o, lse)
    return o, lse, torch.empty(0, dtype=torch.int64, device="cpu") if state is None else state


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    dsink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of what `forward` computed, outside autograd.

    Args:
        dout, dlse: gradients of o and of lse (None: zero).
        q ... batch_invariant: as given to `forward`, with the o, lse and rng_state that it returned.
        dq, dk, dv: where to write, any strides whose last is 1; None: new tensors.
        dbias, dsink: like bias and sink; computed only if given.
    """
    if dropout_p > 0.0 and rng_state is None:
        raise ValueError("rng_state is None: with dropout_p > 0 it must be what the forward pass returned")
    inputs, options = ops.prepare(q, k, v, Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, dropout_p, rng_state, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, batch_invariant,
    ))  # fmt: skip
    state = rng_state if dropout_p > 0.0 else None
    if ops.is_watched(q):
        made = torch.ops.tessera.backward(
            dout, dlse, *inputs[:3], o, lse, *inputs[3:], state, *options, dbias is not None, dsink is not None
        )
        dq, dk, dv, *_ = (
            x if given is None else given.copy_(x) for x, given in zip(made, (dq, dk, dv, dbias, dsink), strict=True)
        )
        return dq, dk, dv
    dq = q.new_empty(q.shape) if dq is None else dq
    dk = k.new_empty(k.shape) if dk is None else dk
    dv = v.new_empty(v.shape) if dv is None else dv
    ops.run_backward(inputs, options, state, o, lse, dout, dlse, dq, dk, dv, dbias, dsink)
    return dq, dk, dv
