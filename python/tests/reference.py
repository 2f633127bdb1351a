"""Attention in three steps with plain torch operators, differentiable, in any floating type: in double it is the truth,
in the inputs' own type the error that a low-precision result may be compared with (docs/correctness.md)."""

import math
from typing import Any

import torch
from torch import Tensor


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
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
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
    if keep is not None:
        p = p * keep * keep_scale
    o = (p.to(kind) @ V).transpose(1, 2)
    return o, lse.masked_fill(empty, -math.inf)


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


def assert_close(
    name: str, result: Tensor, exact: Tensor, plain: Tensor, factor: float = 2.0, floor: float = 2e-5
) -> None:
    """max|result - exact| <= factor * max|plain - exact| + floor, infinities in the same places, no NaN."""
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(exact.shape)}"
    if result.numel() == 0:
        return
    result, plain, exact = result.double(), plain.double(), exact.double()
    assert not result.isnan().any(), f"{name} has NaN"
    infinite = exact.isinf()
    assert torch.equal(result[infinite], exact[infinite]), f"{name}: infinities differ"
    if infinite.all():
        return
    error = (result - exact)[~infinite].abs().max().item()
    allowed = factor * (plain - exact)[~infinite].abs().max().nan_to_num(0.0).item() + floor
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
