"""Attention in three steps with plain torch operators, differentiable, in any floating type: in double it is the truth,
in the inputs' own type the error that a low-precision result may be compared with (docs/correctness.md). What rounding
alone may do to a gradient is `gradient_noise`."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """What one call of `dense` went through; heads before rows, but for q, k, v and o."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None
    scale: float
    p: Tensor  # the softmax
    factor: Tensor | float  # of dropout
    slope: Tensor | float  # of the softcap
    largest_score: float
    o: Tensor
    lse: Tensor


_recorded: list[Steps] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Steps]]:
    """Inside, every call of `dense` adds its steps to the list."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def dense(
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
    keep: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of (batch, seqlen, heads, head_dim) tensors. keep: bool (batch, heads, seqlen_q, seqlen_k)."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    kind = q.dtype
    Q, K, V = (x.transpose(1, 2) for x in (q, k, v))
    K, V = (x.repeat_interleave(group, 1) for x in (K, V))
    s = (Q @ K.transpose(-1, -2)) * (softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5)
    s = s.to(torch.promote_types(kind, torch.float32))
    raw = s
    slope: Tensor | float = 1.0
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
        slope = 1 - (s / softcap) ** 2
    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)[None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(s.dtype).reshape(-1, q.shape[2], 1, 1)
        s = s - slopes * (i + keys - rows - j).abs()
    if bias is not None:
        s = s + bias.to(s.dtype)
    at = i + (0 if alignment == "top_left" else keys - rows)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden |= j > at + right
    if left >= 0:
        hidden |= j < at - left
    s = s.masked_fill(hidden, -math.inf)
    logits = s if sink is None else torch.cat([s, sink.to(s.dtype).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    if logits.shape[-1] == 0:
        nothing = 0 * (q.sum() + k.sum() + v.sum())
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + nothing, s.new_full(s.shape[:-1], -math.inf) + nothing
    # An empty row: lse -inf, weights 0. A finite stand-in keeps its gradient free of NaN.
    empty = (logits == -math.inf).all(-1)
    lse = torch.logsumexp(logits.masked_fill(empty[..., None], 0.0), -1)
    p = torch.exp(s - lse[..., None]).masked_fill(empty[..., None], 0.0)
    factor = 1.0 if keep is None else keep * keep_scale
    o = ((p * factor).to(kind) @ V).transpose(1, 2)
    lse = lse.masked_fill(empty, -math.inf)
    if _recorded is not None:
        scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
        finite = torch.cat([raw.detach().flatten(), s[s > -math.inf].detach()])
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        _recorded.append(Steps(q, k, v, bias, sink, scale, p, factor, slope, largest, o, lse))
    return o, lse


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The same for (total, heads, head_dim) tensors, one sequence after another; lse is (heads, total)."""
    results = []
    at_q, at_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(at_q) - 1):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        o, lse = dense(q[None, rows], k[None, keys], v[None, keys], **more)
        results.append((o[0], lse[0]))
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results], -1)


class _Error(NamedTuple):
    """A sum of independent errors, in units of the roundoff: its variance, and its size in the worst case."""

    variance: Tensor
    worst: Tensor

    def __add__(self, other: Any) -> "_Error":
        return _Error(self.variance + other.variance, self.worst + other.worst)

    def bound(self) -> Tensor:
        """8 standard deviations, which a right result exceeds once in 4e13 elements, or the worst case if that is
        less."""
        return torch.minimum(8 * self.variance.sqrt(), self.worst)


def _of_rounding(a: Tensor, b: Tensor) -> _Error:
    """Of a @ b if every element x of a is rounded: by anything in [-x, x] with the same probability."""
    return _Error(a.square() @ b.square() / 3, a.abs() @ b.abs())


def gradient_noise(
    steps: Sequence[Steps],
    outputs: Sequence[Tensor],
    douts: Sequence[Tensor],
    leaves: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """What rounding may do to each element of the gradients in a right backward pass of that type.

    Such a pass rounds the weights and ds to dtype before it multiplies them, and its results. And it takes
    delta = sum(dout * o) from an o that was rounded and made of rounded weights, as every pass does that keeps no
    weights. That error enters all of a row's ds, times p. The three steps have none of it: they subtract from dp what
    they compute from the same dp. With one key, ds is 0 to the last bit there, however many queries there are.

    Args:
        steps: the calls of `dense`, in double, that `outputs` were made of.
        outputs, douts: results, and their gradients.
        leaves: what all of it was computed from, say q, k and v.
    """
    if not steps:
        return [torch.zeros_like(x) for x in leaves]
    made = [x for step in steps for x in (step.o, step.lse)]
    given = torch.autograd.grad(outputs, made, douts, retain_graph=True, allow_unused=True)
    operands: list[Tensor] = []
    bounds: list[Tensor] = []
    for step, dout, dlse in zip(steps, given[::2], given[1::2], strict=True):
        errors = _errors_of(step, torch.zeros_like(step.o) if dout is None else dout, dlse)
        # A weight errs as its exponent does, which is of float32 in every type: a dot product, its scale, what is added
        # to it, lse, each some roundoffs of the score.
        exponent = (4 + 6 * step.largest_score) * torch.finfo(torch.float32).eps / 2
        unit = torch.finfo(dtype).eps / 2 + exponent
        for operand, error in zip((step.q, step.k, step.v, step.bias, step.sink), errors, strict=True):
            if operand is not None and error is not None:
                operands.append(operand)
                bounds.append(unit * error.bound())
    # Bounds of slices go where gradients of slices go.
    return list(torch.autograd.grad(operands, leaves, bounds, retain_graph=True))


@torch.no_grad()
def _errors_of(step: Steps, dout: Tensor, dlse: Tensor | None) -> tuple[_Error | None, ...]:
    """Of dq, dk, dv, dbias and dsink of one call, in the shapes of their operands."""
    heads, heads_k = step.q.shape[2], step.k.shape[2]
    q, o, dout = (x.transpose(1, 2) for x in (step.q, step.o, dout))
    k, v = (x.transpose(1, 2).repeat_interleave(heads // heads_k, 1) for x in (step.k, step.v))
    p, weights, dp = step.p, step.p * step.factor, dout @ v.mT
    ones = [x.new_ones(x.shape[-1], 1) for x in (dp, o)]
    delta = dout * o @ ones[1] - (0.0 if dlse is None else dlse[..., None])
    # delta is the sum of weights * dp as well.
    of_delta = _of_rounding(weights * dp, ones[0]) + _of_rounding(dout * o, ones[1])
    after_cap = p * (dp * step.factor - delta)
    slope = p * step.slope * step.scale  # of ds against delta
    ds = after_cap * step.slope * step.scale

    def per_key_head(error: _Error) -> _Error:
        return _Error(*(x.unflatten(1, (heads_k, -1)).sum(2) for x in error))

    def with_result(error: _Error, result: Tensor) -> _Error:
        return error + _Error(result.square() / 3, result.abs())

    def rows(error: _Error) -> _Error:
        return _Error(*(x.transpose(1, 2) for x in error))

    mixed = slope @ k
    of_dq = _of_rounding(ds, k) + _Error(of_delta.variance * mixed.square(), of_delta.worst * mixed.abs())
    of_dk = _of_rounding(ds.mT, q) + _Error(
        (of_delta.variance * slope.square()).mT @ q.square(), (of_delta.worst * slope).mT @ q.abs()
    )
    of_dv = _of_rounding(weights.mT, dout)
    dk, dv = ((x.mT @ y).unflatten(1, (heads_k, -1)).sum(2) for x, y in ((ds, q), (weights, dout)))

    of_dbias = of_dsink = None
    if step.bias is not None:
        shape = step.bias.shape
        moved = p.sum(-1, keepdim=True) if shape[-1] == 1 else p
        of_dbias = _Error(after_cap.square() / 3, after_cap.abs())
        of_dbias = _Error(*(x.sum_to_size(shape) for x in of_dbias))
        shared = (of_delta.variance * moved.square(), of_delta.worst * moved)
        of_dbias = with_result(of_dbias + _Error(*(x.sum_to_size(shape) for x in shared)), after_cap.sum_to_size(shape))
    if step.sink is not None:
        of_sink = 1 - p.sum(-1, keepdim=True)  # its weight
        terms = of_sink * delta
        shared = (
            of_delta.variance * of_sink.square() + terms.square() / 3, of_delta.worst * of_sink + terms.abs()
        )  # fmt: skip
        of_dsink = _Error(*(x.sum((0, 2, 3)) for x in shared))
    return (
        rows(with_result(of_dq, ds @ k)),
        rows(with_result(per_key_head(of_dk), dk)),
        rows(with_result(per_key_head(of_dv), dv)),
        of_dbias,
        of_dsink,
    )


def check(
    result: Sequence[Tensor],
    exact: Sequence[Tensor],
    plain: Sequence[Tensor],
    steps: Sequence[Steps],
    leaves: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """(o, lse) and the gradients of q, k and v through o, for a random gradient of o.

    Args:
        result, exact, plain: (o, lse) of the library, of `dense` in double, and of `dense` in the inputs' type.
        steps: what `recording` recorded of `exact`.
        leaves: the q, k and v that each of the three was computed from, or what holds them.
    """
    (out, lse), (exact_out, exact_lse), (plain_out, _) = result, exact, plain
    assert_output_close(out, exact_out, plain_out)
    assert_lse_close(lse, exact_lse, steps)
    dout = torch.randn_like(out)
    gradients = [
        torch.autograd.grad(o, x, dout.to(o.dtype), retain_graph=True)
        for o, x in zip((out, exact_out, plain_out), leaves, strict=True)
    ]
    noise = gradient_noise(steps, [exact_out], [dout.double()], leaves[1], out.dtype)
    for name, *three, bound in zip(("dq", "dk", "dv"), *gradients, noise, strict=True):
        assert_gradient_close(name, *three, bound)


def assert_gradient_close(name: str, result: Tensor, exact: Tensor, plain: Tensor, noise: Tensor) -> None:
    """Three times the error of the three steps, or what rounding may do (`gradient_noise`), whichever is more."""
    assert_close(name, result, exact, plain, factor=3.0, floor=1e-5, noise=noise)


def assert_output_close(out: Tensor, exact: Tensor, plain: Tensor) -> None:
    """o: twice the error of the three steps, which may be exact by luck in rows of few keys. There the weights and the
    result are rounded once each, which is a unit of the result."""
    unit = torch.finfo(out.dtype).eps
    largest = float(exact.detach().abs().max()) if exact.numel() else 0.0
    assert_close("o", out, exact, plain, floor=2e-5 + unit * largest)


def assert_lse_close(lse: Tensor, exact: Tensor, steps: Sequence[Steps]) -> None:
    """lse is of float32 throughout. The three steps, which round scores, say nothing of it.

    A tensor core adds 16 products at a time to the sum and cuts off what is below its last bit.
    """
    largest = max((step.largest_score for step in steps), default=0.0)
    head_dim = max((step.q.shape[-1] for step in steps), default=0)
    assert_close("lse", lse, exact, exact, floor=1e-5 + (5e-7 + head_dim / 16 * 2**-23) * largest)


def assert_close(
    name: str,
    result: Tensor,
    exact: Tensor,
    plain: Tensor,
    factor: float = 2.0,
    floor: float = 2e-5,
    noise: Tensor | None = None,
) -> None:
    """|result - exact| <= max(factor * max|plain - exact|, noise) + floor, infinities in the same places, no NaN."""
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(exact.shape)}"
    if result.numel() == 0:
        return
    result, plain, exact = result.double(), plain.double(), exact.double()
    assert not result.isnan().any(), f"{name} has NaN"
    infinite = exact.isinf()
    assert torch.equal(result[infinite], exact[infinite]), f"{name}: infinities differ"
    if infinite.all():
        return
    allowed = factor * (plain - exact)[~infinite].abs().max().nan_to_num(0.0)
    allowed = (allowed if noise is None else noise[~infinite].clamp(min=allowed)) + floor
    error = (result - exact)[~infinite].abs()
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), (
        f"{name}: error {error[worst].item():.3e}, allowed {allowed.expand_as(error)[worst].item():.3e}"
    )
