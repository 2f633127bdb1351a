"""FlashAttention-3's functions on Tessera, by the criterion of test_compat_flash_attn.py."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from tessera.compat import flash_attn_interface as fa3

INFINITY = float("inf")
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "scale": {"softmax_scale": 0.2},
    "causal": {"causal": True},
    "window": {"window_size": (3, 4)},
    "softcap": {"softcap": 2.0, "causal": True},
    "tuning": {"num_splits": 3, "pack_gqa": True, "sm_margin": 8},
}


def as_reference(options: dict[str, Any]) -> dict[str, Any]:
    names = {"window_size": "window", "softmax_scale": "softmax_scale", "causal": "causal", "softcap": "softcap"}
    return {names[name]: value for name, value in options.items() if name in names}


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def check(run: Any, exact: Any, operands: tuple[Tensor, ...]) -> None:
    ours, truth, plain = leaves(*operands), leaves(*operands, dtype=torch.double), leaves(*operands)
    with reference.recording() as steps:
        right = exact(*truth)
    reference.check(run(*ours), right, exact(*plain), steps, (ours, truth, plain))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("lengths", [(14, 45), (41, 13)], ids=str)
def test_dense(feature: str, lengths: tuple[int, int], device: str) -> None:
    q = torch.randn(2, lengths[0], 6, 24, device=device, dtype=torch.bfloat16)
    k = torch.randn(2, lengths[1], 2, 24, device=device, dtype=torch.bfloat16)
    v = torch.randn(2, lengths[1], 2, 40, device=device, dtype=torch.bfloat16)
    options = FEATURES[feature]
    check(
        lambda q, k, v: fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True),
        lambda q, k, v: reference.dense(q, k, v, **as_reference(options)),
        (q, k, v),
    )


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("used", ["", "k", "q", "qk"])
def test_packed(feature: str, used: str, device: str) -> None:
    """Only the used part of each sequence counts; the rest may hold anything and gets nothing."""
    lengths = {"q": [9, 0, 30, 4, 12], "k": [20, 5, 11, 0, 33]}
    counts = {side: [random.randint(0, n) for n in all_] if side in used else all_ for side, all_ in lengths.items()}
    cu = {side: torch.tensor([0, *all_]).cumsum(0).int().to(device) for side, all_ in lengths.items()}
    chosen = {side: [slice(int(cu[side][b]), int(cu[side][b]) + counts[side][b]) for b in range(5)] for side in lengths}
    options = FEATURES[feature]
    q = torch.randn(55, 4, 16, device=device, dtype=torch.bfloat16)
    k = torch.randn(69, 2, 16, device=device, dtype=torch.bfloat16)
    v = torch.randn(69, 2, 24, device=device, dtype=torch.bfloat16)
    seqused = {f"seqused_{side}": torch.tensor(counts[side], dtype=torch.int32, device=device) for side in used}

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(55, 4, 24, device=device, dtype=q.dtype)
        lse = torch.full((4, 55), -INFINITY, device=device, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys in zip(chosen["q"], chosen["k"], strict=True):
            part, part_lse = reference.dense(q[None, rows], k[None, keys], v[None, keys], **as_reference(options))
            out[rows], lse[:, rows] = part[0], part_lse[0]
        return out, lse

    check(
        lambda q, k, v: fa3.flash_attn_varlen_func(
            q, k, v, cu["q"], cu["k"], 30, 33, **seqused, **options, return_attn_probs=True
        ),
        exact,
        (q, k, v),
    )


def test_unused_tokens_do_not_matter(device: str) -> None:
    """Not even infinities: they are never read."""
    cu = torch.tensor([0, 10, 20], dtype=torch.int32, device=device)
    used = torch.tensor([3, 10], dtype=torch.int32, device=device)
    q, k, v = torch.randn(3, 20, 2, 16, device=device, dtype=torch.bfloat16)
    expected = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 10, 10, used, used)
    k[3:10] = INFINITY
    v[3:10] = torch.nan
    assert torch.equal(fa3.flash_attn_varlen_func(q, k, v, cu, cu, 10, 10, used, used), expected)
    assert not expected[3:10].any()


@pytest.mark.parametrize("heads_k", [4, 2])
def test_qkv_packed(heads_k: int, device: str) -> None:
    """Both forms: bit for bit what q, k and v apart give."""
    shape = (2, 13, 3, 4, 24) if heads_k == 4 else (2, 13, 4 + 2 * heads_k, 24)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    num_heads_q = None if heads_k == 4 else 4
    out, lse = fa3.flash_attn_qkvpacked_func(
        qkv, causal=True, deterministic=True, num_heads_q=num_heads_q, return_attn_probs=True
    )
    parts = qkv.unbind(2) if heads_k == 4 else qkv.split((4, heads_k, heads_k), dim=2)
    expected, expected_lse = fa3.flash_attn_func(*parts, causal=True, deterministic=True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    dout = torch.randn_like(out)
    assert torch.equal(*(torch.autograd.grad(x, qkv, dout)[0] for x in (out, expected)))
    assert isinstance(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q), Tensor)


# ---- combine


def test_combine(device: str) -> None:
    """Parts of the keys, one of them of nothing but NaN and without weight, and a row that sees nothing."""
    q, k, v = torch.randn(3, 2, 30, 3, 16, device=device, dtype=torch.double)
    q = q[:, :7]
    parts = [reference.dense(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 11), (11, 12), (12, 30))]
    out_partial = torch.stack([o for o, _ in parts] + [torch.full_like(q, torch.nan)]).float()
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    lse_partial = torch.cat([lse_partial, torch.full_like(lse_partial[:1], -INFINITY)]).float()
    lse_partial[:, 1, 3, 2] = -INFINITY
    expected, expected_lse = reference.dense(q, k, v)
    expected_lse = expected_lse.transpose(1, 2).clone()
    expected[1, 3, 2], expected_lse[1, 3, 2] = 0.0, -INFINITY

    out, lse = fa3.flash_attn_combine(out_partial, lse_partial)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=0, atol=1e-5)
    low, _ = fa3.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)
    assert torch.equal(low, out.bfloat16())
    given = torch.empty_like(low)
    assert fa3.flash_attn_combine(out_partial, lse_partial, out=given)[0] is given and torch.equal(given, low)
    packed, packed_lse = fa3.flash_attn_combine(out_partial[:, 0], lse_partial[:, 0])
    assert torch.equal(packed, out[0]) and torch.equal(packed_lse, lse[0])


# ---- the private operators


def test_operators(device: str) -> None:
    q = torch.randn(2, 9, 4, 16, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 15, 2, 16, device=device, dtype=torch.bfloat16)
    operands = leaves(q, k, v)
    expected, expected_lse = fa3.flash_attn_func(*operands, causal=True, deterministic=True, return_attn_probs=True)
    out, lse, *rest = fa3._flash_attn_forward(q, k, v, causal=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and [x.numel() for x in rest] == [0, 0]
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(
        dout, q, k, v, out, lse, dq=gradients[0], dk=gradients[1], dv=gradients[2], is_causal=True, deterministic=True
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, torch.autograd.grad(expected, operands, dout), strict=True))

    torch.library.opcheck(fa3._flash_attn_forward._opoverload, (q, k, v), {"causal": True})
    names = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    torch.library.opcheck(fa3._flash_attn_backward._opoverload, (dout, q, k, v, out, lse), names)


def test_packed_operators(device: str) -> None:
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    used_q, used_k = torch.tensor([[2, 0, 7], [4, 0, 3]], dtype=torch.int32, device=device)
    q, k, v = torch.randn(3, 12, 2, 16, device=device, dtype=torch.bfloat16)
    operands = leaves(q, k, v)
    expected = fa3.flash_attn_varlen_func(*operands, cu, cu, 7, 7, used_q, used_k, causal=True, deterministic=True)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7}
    out, lse, _, _ = fa3._flash_attn_forward(q, k, v, **lengths, seqused_q=used_q, seqused_k=used_k, causal=True)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    gradients = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    softmax_d = fa3._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        **lengths,
        sequed_q=used_q,
        sequed_k=used_k,
        **gradients,
        is_causal=True,
        deterministic=True,
    )
    right = torch.autograd.grad(expected, operands, dout)
    assert all(torch.equal(a, b) for a, b in zip(gradients.values(), right, strict=True))
    assert (softmax_d - (dout.double() * out.double()).sum(-1).T).abs().max() < 1e-4
    torch.library.opcheck(fa3._flash_attn_forward._opoverload, (q, k, v), lengths)


# ---- compilers, and what is refused


def test_compiled(device: str) -> None:
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    used = torch.tensor([2, 6], dtype=torch.int32, device=device)
    operands = leaves(*torch.randn(3, 12, 2, 16, device=device, dtype=torch.bfloat16))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = fa3.flash_attn_func(q[None], k[None], v[None], causal=True, deterministic=True)
        return dense[0] + fa3.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, seqused_k=used, deterministic=True)

    expected = function(*operands)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*operands)
    assert torch.equal(compiled, expected)
    dout = torch.randn_like(expected)
    mine, right = torch.autograd.grad(compiled, operands, dout), torch.autograd.grad(expected, operands, dout)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


REFUSED = {
    "qv": torch.zeros(1),
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
    "attention_chunk": 4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments(name: str, device: str) -> None:
    q = torch.randn(1, 4, 3, 2, 16, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    more = {name: REFUSED[name]}
    with pytest.raises(NotImplementedError, match=f"flash_attn_func: {name} "):
        fa3.flash_attn_func(*q.unbind(2), **more)
    with pytest.raises(NotImplementedError, match=f"flash_attn_varlen_func: {name} "):
        fa3.flash_attn_varlen_func(*q[0].unbind(1), cu, cu, 4, 4, **more)
    if name != "qv":
        with pytest.raises(NotImplementedError, match=f"flash_attn_qkvpacked_func: {name} "):
            fa3.flash_attn_qkvpacked_func(q, **more)
    with pytest.raises(NotImplementedError, match=f"_flash_attn_forward: {name} "):
        fa3._flash_attn_forward(*q.unbind(2), **more)


def test_other_refusals(device: str) -> None:
    q = torch.randn(1, 4, 6, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
        fa3.flash_attn_with_kvcache(q, q, q)
    with pytest.raises(NotImplementedError, match="get_scheduler_metadata"):
        fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 16, q)
    for name in (
        "k_new",
        "v_new",
        "out_",
        "page_table",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "scheduler_metadata",
    ):
        with pytest.raises(NotImplementedError, match=f"_flash_attn_forward: {name} "):
            fa3._flash_attn_forward(q, q, q, **{name: q})
    with pytest.raises(NotImplementedError, match="dense tensors: seqused_k"):
        fa3._flash_attn_forward(q, q, q, seqused_k=torch.ones(1, dtype=torch.int32, device=device))
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="all of them or none"):
        fa3._flash_attn_forward(q[0], q[0], q[0], cu_seqlens_q=cu)
    with pytest.raises(ValueError, match=r"seqused_k has shape \(2,\): must be \(1,\)"):
        fa3.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, seqused_k=cu)
    for num_heads_q in (None, 3, 8):
        with pytest.raises(ValueError, match=f"num_heads_q is {num_heads_q}"):
            fa3.flash_attn_qkvpacked_func(q, num_heads_q=num_heads_q)
