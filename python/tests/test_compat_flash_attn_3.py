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


# ---- layouts: queries and keys are dense or packed, each for itself, and used in part

PARTS = [(used, layout) for layout in ("qk", "q", "k") for used in ("k", "qk", "q", "")]


class Ragged:
    """5 sequences of queries and of keys, dense or packed, and the reference for what is used of them."""

    def __init__(self, dense: str, used: str, device: str) -> None:
        lengths = {"q": [9, 0, 30, 4, 12], "k": [20, 5, 11, 0, 33]}
        for side in dense:
            lengths[side] = [17] * 5
        counts = {side: [random.randint(0, n) for n in own] if side in used else own for side, own in lengths.items()}
        self.longest = {side: max(own) for side, own in lengths.items()}
        starts = {side: [sum(own[:i]) for i in range(6)] for side, own in lengths.items()}
        self.parts = {
            side: [slice(a, a + n) for a, n in zip(starts[side], counts[side], strict=False)] for side in lengths
        }
        self.lengths = {
            f"{name}_{side}": value
            for side in "qk"
            for name, value in (
                ("cu_seqlens", None if side in dense else as_tensor(starts[side], device)),
                ("max_seqlen", None if side in dense else self.longest[side]),
                ("seqused", as_tensor(counts[side], device) if side in used else None),
            )
        }
        total = {side: sum(own) for side, own in lengths.items()}
        q = torch.randn(total["q"], 4, 16, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(total["k"], 2, d, device=device, dtype=torch.bfloat16) for d in (16, 24))
        self.dense = dense
        self.operands = self.shaped("q", q), self.shaped("k", k), self.shaped("k", v)

    def shaped(self, side: str, x: Tensor) -> Tensor:
        return x.unflatten(0, (5, 17)) if side in self.dense else x

    def flat(self, side: str, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if side in self.dense else x

    def exact(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v = self.flat("q", q), self.flat("k", k), self.flat("k", v)
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = torch.full(q.shape[1::-1], -INFINITY, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys in zip(self.parts["q"], self.parts["k"], strict=True):
            part, part_lse = reference.dense(q[None, rows], k[None, keys], v[None, keys], **options)
            out[rows], lse[:, rows] = part[0], part_lse[0]
        if "q" in self.dense:
            lse = lse.unflatten(1, (5, 17)).transpose(0, 1)
        return self.shaped("q", out), lse


def as_tensor(numbers: list[int], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("feature", ["full", "causal", "window"])
@pytest.mark.parametrize("used, dense", PARTS)
def test_layouts(used: str, dense: str, feature: str, device: str) -> None:
    """o, lse and gradients of dense and packed operands, used in full or in part, sequence by sequence."""
    case, options = Ragged(dense, used, device), FEATURES[feature]
    check(
        lambda q, k, v: fa3.flash_attn_varlen_func(q, k, v, **case.lengths, **options, return_attn_probs=True),
        lambda q, k, v: case.exact(q, k, v, **as_reference(options)),
        case.operands,
    )


@pytest.mark.parametrize("used, dense", [*PARTS, ("k", ""), ("qk", "")])
def test_layouts_of_operators(used: str, dense: str, device: str) -> None:
    """The private operators compute what the function does, and write gradients into tensors of any strides."""
    case = Ragged(dense, used, device)
    operands = leaves(*case.operands)
    expected, expected_lse = fa3.flash_attn_varlen_func(
        *operands, **case.lengths, causal=True, deterministic=True, return_attn_probs=True
    )
    out, lse, _, _ = fa3._flash_attn_forward(*case.operands, **case.lengths, causal=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and lse.is_contiguous()
    dout = torch.randn_like(out)
    right = torch.autograd.grad(expected, operands, dout)
    gradients = [torch.empty(*x.shape[:-1], x.shape[-1] + 8, device=device, dtype=x.dtype) for x in case.operands]
    gradients = [x[..., 4:-4] for x in gradients]
    lengths = {name.replace("seqused", "sequed"): value for name, value in case.lengths.items()}
    softmax_d = fa3._flash_attn_backward(
        dout, *case.operands, out, lse, **lengths, dq=gradients[0], dk=gradients[1], dv=gradients[2],
        is_causal=True, deterministic=True,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True))
    assert softmax_d.shape == lse.shape
    torch.library.opcheck(fa3._flash_attn_forward._opoverload, case.operands, case.lengths)


def test_bounds_of_what_is_used(device: str) -> None:
    """On a CPU bounds need not be given, nor exceed what is used; larger ones change nothing."""
    if device != "cpu":
        pytest.skip("on a GPU the bounds of whole sequences are required")
    case = Ragged("", "qk", device)
    expected = fa3.flash_attn_varlen_func(*case.operands, **case.lengths, causal=True)
    longest = [int(case.lengths[f"seqused_{side}"].max()) for side in "qk"]
    for bounds in ((None, None), longest, (1000, 1000)):
        more = case.lengths | dict(zip(("max_seqlen_q", "max_seqlen_k"), bounds, strict=True))
        assert torch.equal(fa3.flash_attn_varlen_func(*case.operands, **more, causal=True), expected)


def test_long_integers(device: str) -> None:
    """seqused of int64 means the same."""
    case = Ragged("", "qk", device)
    expected = fa3.flash_attn_varlen_func(*case.operands, **case.lengths)
    long = {name: x.long() if name.startswith("seqused") else x for name, x in case.lengths.items()}
    assert torch.equal(fa3.flash_attn_varlen_func(*case.operands, **long), expected)


@pytest.mark.parametrize("dense", ["", "k", "qk"])
def test_compiled_layouts(dense: str, device: str) -> None:
    """One graph, with lengths that are not known to it; what is used may be less than the bounds say."""
    case = Ragged(dense, "qk", device)
    if not dense:
        used = {side: max(1, int(case.lengths[f"seqused_{side}"].max())) for side in "qk"}
        case.lengths |= {f"max_seqlen_{side}": used[side] for side in "qk"} if device == "cpu" else {}
    operands = leaves(*case.operands)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa3.flash_attn_varlen_func(q, k, v, **case.lengths, causal=True, deterministic=True)

    expected = function(*operands)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*operands)
    assert torch.equal(compiled, expected)
    dout = torch.randn_like(expected)
    mine, right = torch.autograd.grad(compiled, operands, dout), torch.autograd.grad(expected, operands, dout)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_wrong_lengths(device: str) -> None:
    q = torch.randn(12, 2, 16, device=device, dtype=torch.bfloat16)
    cu = as_tensor([0, 5, 12], device)

    def attend(**more: Any) -> Any:
        return fa3.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, **more)

    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(TypeError, match=f"{name} is of type 'list': must be a tensor"):
            attend(**{name: [1, 2]})
        with pytest.raises(ValueError, match=f"{name}.dtype = torch.float32: must be int32"):
            attend(**{name: torch.ones(2, device=device)})
        with pytest.raises(ValueError, match=rf"{name} has shape \(3,\): must be \(2,\), \(batch,\)"):
            attend(**{name: as_tensor([1, 2, 3], device)})
        if device == "cpu":
            for numbers, wrong in (
                ([6, 1], r"\[0\] = 6: must lie in \[0, 5\]"),
                ([1, 8], r"\[1\] = 8"),
                ([0, -1], r"\[1\] = -1"),
            ):
                with pytest.raises(ValueError, match=name + wrong):
                    attend(**{name: as_tensor(numbers, device)})
    with pytest.raises(ValueError, match=r"q has shape \(12, 2, 16\): must be \(batch, .*since cu_seqlens_q is None"):
        fa3.flash_attn_varlen_func(q, q, q, None, cu, None, 7)
    dense = q.unflatten(0, (3, 4))
    with pytest.raises(ValueError, match="q holds 3 sequences and k 2: must be equally many"):
        fa3.flash_attn_varlen_func(dense, q, q, None, cu, None, 7)


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


def test_what_gives_the_same_result(device: str) -> None:
    """What the refusal recommends instead of attention_chunk is what upstream means by it."""
    q = torch.randn(2, 13, 4, 16, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 13, 2, d, device=device, dtype=torch.bfloat16) for d in (16, 24))
    position = torch.arange(13, device=device)
    hidden = (position[:, None] // 4 != position // 4) | (position > position[:, None])
    expected, _ = reference.dense(
        q.double(), k.double(), v.double(), bias=torch.zeros(13, 13, device=device).masked_fill(hidden, -INFINITY)
    )
    cu = as_tensor([0, 4, 8, 12, 13, 17, 21, 25, 26], device)
    out = fa3.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, 4, 4, causal=True)
    assert (out.view_as(expected) - expected).abs().max() < 0.03


def test_chunks_are_refused_with_gradients(device: str) -> None:
    q = torch.randn(1, 4, 3, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="flash_attn_func: attention_chunk ") as error:
        fa3.flash_attn_func(*q.unbind(2), attention_chunk=4)
    assert "cannot do yet" in str(error.value) and "leave it out" not in str(error.value)
    assert "pack the chunks as sequences of their own" in str(error.value)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: attention_chunk "):
        fa3.flash_attn_varlen_func(*q[0].unbind(1), cu, cu, 4, 4, attention_chunk=4)
    with pytest.raises(NotImplementedError, match="flash_attn_qkvpacked_func: attention_chunk "):
        fa3.flash_attn_qkvpacked_func(q, attention_chunk=4)


def test_other_refusals(device: str) -> None:
    q = torch.randn(1, 4, 6, 16, device=device, dtype=torch.bfloat16)
    for name in (
        "k_new",
        "v_new",
        "out_",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
    ):
        with pytest.raises(NotImplementedError, match=f"_flash_attn_forward: {name} "):
            fa3._flash_attn_forward(q, q, q, **{name: q})
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"seqused_k has shape \(2,\): must be \(1,\)"):
        fa3.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, seqused_k=cu)
    for num_heads_q in (None, 3, 8):
        with pytest.raises(ValueError, match=f"num_heads_q is {num_heads_q}"):
            fa3.flash_attn_qkvpacked_func(q, num_heads_q=num_heads_q)
