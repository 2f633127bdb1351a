"""tessera.attention on torch tensors against three steps in double: every feature, alone and together, both passes."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
import tessera
import tessera.torch as tt

DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}


def check(
    q: Tensor, k: Tensor, v: Tensor, packed: dict[str, Any] | None = None, dropout_p: float = 0.0, **features: Any
) -> None:
    """o, lse and the gradients of everything differentiable, with random gradients of o and lse."""
    names = [n for n in ("q", "k", "v", "bias", "sink") if n in "qkv" or features.get(n) is not None]
    given_leaves = {"q": q, "k": k, "v": v, **{n: features[n] for n in names if n not in "qkv"}}
    rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64) if dropout_p else None

    def leaves_of(dtype: torch.dtype | None) -> dict[str, Tensor]:
        """dtype: what leaves are converted to; None leaves them alone."""
        leaves = {}
        for n, x in given_leaves.items():
            x = x.detach() if dtype is None or (n == "sink" and dtype != torch.double) else x.detach().to(dtype)
            leaves[n] = x.requires_grad_()
        return leaves

    def run(compute: Any, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        o, lse = compute(**leaves)
        total = (o.double() * dout).sum() + (lse.double().nan_to_num(neginf=0.0) * dlse).sum()
        return o, lse, list(torch.autograd.grad(total, [leaves[n] for n in names], retain_graph=True))

    others = {n: x for n, x in features.items() if n not in names}

    def ours(**leaves: Any) -> tuple[Tensor, Tensor]:
        return tessera.attention(
            **leaves, **others, **(packed or {}), dropout_p=dropout_p, rng_state=rng_state, return_lse=True
        )

    def three_steps(q: Tensor, k: Tensor, v: Tensor, **leaves: Any) -> tuple[Tensor, Tensor]:
        if packed is not None:
            return reference.packed(q, k, v, packed["cu_seqlens_q"], packed["cu_seqlens_k"], **leaves, **others)
        keep: dict[str, Any] = {}
        if rng_state is not None:
            shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            kept = 1 - round(dropout_p * 65536) / 65536
            keep = {"keep": tt.dropout_mask(rng_state, dropout_p, *shape, device=q.device), "keep_scale": 1 / kept}
        return reference.dense(q, k, v, **leaves, **others, **keep)

    rows = q.shape[:-1] + v.shape[-1:]
    dout = torch.randn(rows, dtype=torch.double, device=q.device).to(q.dtype).double()
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if packed is None else (q.shape[1], q.shape[0])
    dlse = torch.randn(lse_shape, dtype=torch.double, device=q.device)
    o, lse, gradients = run(ours, leaves_of(None))
    truth = leaves_of(torch.double)
    with reference.recording() as steps:
        exact_o, exact_lse, exact_gradients = run(three_steps, truth)
    plain_o, _, plain_gradients = run(three_steps, leaves_of(q.dtype))
    reference.assert_output_close(o, exact_o, plain_o)
    reference.assert_lse_close(lse, exact_lse, steps)
    finite_dlse = dlse.masked_fill(exact_lse == -torch.inf, 0.0)
    noise = reference.gradient_noise(
        steps, (exact_o, exact_lse), (dout, finite_dlse), [truth[n] for n in names], q.dtype
    )
    for name, *three, bound in zip(names, gradients, exact_gradients, plain_gradients, noise, strict=True):
        reference.assert_gradient_close(f"d{name}", *three, bound)


def tensors(
    dtype: torch.dtype,
    device: str,
    batch: int = 2,
    seqlen_q: int = 37,
    seqlen_k: int = 53,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
) -> tuple[Tensor, Tensor, Tensor]:
    def make(rows: int, h: int, d: int) -> Tensor:
        return torch.randn(batch, rows, h, d, device=device).to(dtype)

    return make(seqlen_q, heads[0], dims[0]), make(seqlen_k, heads[1], dims[0]), make(seqlen_k, heads[1], dims[1])


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, request.param)
    if kind not in DTYPES[device]:
        pytest.skip("a GPU takes bfloat16 and float16")
    return kind


def test_masks(dtype: torch.dtype, device: str) -> None:
    for features in (
        {},
        {"causal": True},
        {"causal": True, "alignment": "top_left"},
        {"window": (5, 3)},
        {"window": (-1, 4)},
        {"window": (9, -1)},
        {"causal": True, "window": (9, -1)},
        {"causal": True, "window": (9, 0)},
        {"window": (5, 0), "alignment": "top_left"},
    ):
        check(*tensors(dtype, device), **features)
        check(*tensors(dtype, device, seqlen_q=50, seqlen_k=21), **features)  # rows that see no key


def test_scores(dtype: torch.dtype, device: str) -> None:
    slopes = torch.rand(2, 4, device=device)
    for features in (
        {"softmax_scale": 0.3},
        {"softcap": 2.0, "causal": True},
        {"alibi_slopes": slopes[0], "causal": True},
        {"alibi_slopes": slopes},
        {"sink": torch.randn(4, device=device), "causal": True},
        {"sink": torch.randn(4, device=device), "window": (3, 0)},
    ):
        check(*tensors(dtype, device), **features)


def test_bias_of_every_broadcast_shape(dtype: torch.dtype, device: str) -> None:
    full = (2, 4, 37, 53)
    for stored in range(16):
        shape = [n if stored >> i & 1 else 1 for i, n in enumerate(full)]
        check(
            *tensors(dtype, device), bias=torch.randn(shape, device=device).to(dtype if stored % 2 else torch.float32)
        )


def test_bias_that_hides_keys(device: str) -> None:
    bias = torch.zeros(2, 1, 1, 53, device=device)
    bias[0, ..., 40:] = -torch.inf
    bias[1] = -torch.inf  # no key at all: o = 0, lse = -inf, no gradient
    q, k, v = tensors(DTYPES[device][0], device)
    o, lse = tessera.attention(q, k, v, bias=bias, return_lse=True)
    assert torch.equal(o[1], torch.zeros_like(o[1])) and (lse[1] == -torch.inf).all()
    exact, exact_lse = reference.dense(q[:1].double(), k[:1, :40].double(), v[:1, :40].double())
    plain, plain_lse = reference.dense(q[:1], k[:1, :40], v[:1, :40])
    reference.assert_close("o", o[:1], exact, plain)
    reference.assert_close("lse", lse[:1], exact_lse, plain_lse)


def test_dropout(dtype: torch.dtype, device: str) -> None:
    check(*tensors(dtype, device, batch=3), dropout_p=0.3, causal=True)
    check(*tensors(dtype, device, heads=(3, 3)), dropout_p=0.75)


def test_dropout_fraction_and_generator(device: str) -> None:
    q, k, v = tensors(DTYPES[device][0], device, seqlen_q=256, seqlen_k=256)
    kept = tt.dropout_mask(torch.tensor([5, 7]), 0.2, 4, 4, 256, 256).double().mean().item()
    assert abs(kept - 0.8) < 5 * (0.2 * 0.8 / (4 * 4 * 256 * 256)) ** 0.5
    torch.manual_seed(3)
    first, second = (tessera.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = tessera.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_packed(dtype: torch.dtype, device: str) -> None:
    lengths_q, lengths_k = [5, 0, 70, 33, 1], [9, 4, 70, 0, 40]
    at_q, at_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k)
    )
    q = torch.randn(sum(lengths_q), 4, 40, device=device).to(dtype)
    k, v = (torch.randn(sum(lengths_k), 2, d, device=device).to(dtype) for d in (40, 24))
    packed = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "max_seqlen_q": 70, "max_seqlen_k": 70}
    for features in ({}, {"causal": True}, {"window": (7, 2)}, {"softcap": 1.5, "sink": torch.randn(4, device=device)}):
        check(q, k, v, packed=packed, **features)


def test_lengths_are_read_on_the_cpu_and_asked_for_on_a_gpu(device: str) -> None:
    at = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
    x = torch.randn(10, 2, 16, device=device).to(DTYPES[device][0])
    if device == "cuda":
        with pytest.raises(ValueError, match="max_seqlen_q is None: on a GPU it must be given"):
            tessera.attention(x, x, x, cu_seqlens_q=at)
    else:
        whole = tessera.attention(x, x, x, cu_seqlens_q=at, max_seqlen_q=7, max_seqlen_k=7)
        assert torch.equal(tessera.attention(x, x, x, cu_seqlens_q=at), whole)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 70), (70, 1)])
def test_sequences_of_none_and_one(seqlens: tuple[int, int], device: str) -> None:
    for causal in (False, True):
        check(*tensors(DTYPES[device][0], device, seqlen_q=seqlens[0], seqlen_k=seqlens[1]), causal=causal)


def test_batch_of_none(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(DTYPES[device][0], device, batch=0))
    sink = torch.randn(4, device=device, requires_grad=True)
    o, lse = tessera.attention(q, k, v, sink=sink, return_lse=True)
    assert o.shape == q.shape and lse.shape == (0, 4, 37)
    (o.sum() + lse.sum()).backward()
    assert q.grad is not None and q.grad.shape == q.shape
    assert sink.grad is not None and torch.equal(sink.grad, torch.zeros_like(sink))


def test_strided_views(dtype: torch.dtype, device: str) -> None:
    """Packed QKV, (batch, heads, seqlen, head_dim) memory, slices and broadcast dimensions are read where they lie."""
    qkv = torch.randn(2, 50, 3, 4, 32, device=device).to(dtype)
    check(*qkv.unbind(2), causal=True)
    check(*(torch.randn(2, 4, 50, 32, device=device).to(dtype).transpose(1, 2) for _ in range(3)), causal=True)
    check(*(torch.randn(2, 50, 4, 80, device=device).to(dtype)[..., 3:35] for _ in range(3)))
    k, v = torch.randn(2, 1, 40, 2, 32, device=device).to(dtype)
    check(torch.randn(3, 20, 4, 32, device=device).to(dtype), k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(data: st.DataObject, device: str) -> None:
    heads_k, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    q, k, v = tensors(
        data.draw(st.sampled_from(DTYPES[device])), device, batch=data.draw(st.integers(1, 3)),
        seqlen_q=data.draw(st.integers(1, 140)), seqlen_k=data.draw(st.integers(1, 140)),
        heads=(heads_k * group, heads_k), dims=(data.draw(st.integers(1, 160)), data.draw(st.integers(1, 160))),
    )  # fmt: skip
    check(q, k, v, causal=data.draw(st.booleans()), alignment=data.draw(st.sampled_from(["top_left", "bottom_right"])))


def test_out_of_autograd(device: str) -> None:
    """`forward` and `backward` give the bits that autograd gives, into memory of the caller's."""
    q, k, v = (x.requires_grad_() for x in tensors(DTYPES[device][0], device))
    sink = torch.randn(4, device=device, requires_grad=True)
    options = {"causal": True, "dropout_p": 0.2, "deterministic": True}
    state = torch.tensor([11, 12])
    o, lse = tessera.attention(q, k, v, sink=sink, rng_state=state, return_lse=True, **options)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    torch.autograd.backward((o, lse), (dout, dlse))
    with torch.no_grad():
        out = torch.empty(*o.shape[:-1], 2 * o.shape[-1], dtype=o.dtype, device=device)[..., : o.shape[-1]]
        o2, lse2, state2 = tt.forward(q, k, v, sink=sink, rng_state=state, out=out, **options)
        assert o2 is out and torch.equal(o2, o) and torch.equal(lse2, lse) and torch.equal(state2, state)
        packed_gradients = torch.empty(2, *q.shape, dtype=q.dtype, device=device)
        dsink = torch.empty_like(sink)
        dq, dk, dv = tt.backward(
            dout, q, k, v, o, lse, dlse=dlse, sink=sink, rng_state=state, dq=packed_gradients[1], dsink=dsink, **options
        )
        assert dq.data_ptr() == packed_gradients[1].data_ptr()
        for ours, autograd in ((dq, q.grad), (dk, k.grad), (dv, v.grad), (dsink, sink.grad)):
            assert autograd is not None and torch.equal(ours, autograd)


def test_only_asked_gradients(device: str) -> None:
    """A gradient that flows through lse alone, and inputs that need none."""
    q, k, v = tensors(DTYPES[device][0], device)
    k.requires_grad_()
    _, lse = tessera.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    assert q.grad is None and k.grad is not None and k.grad.abs().sum() > 0


def test_second_derivatives_are_refused(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(DTYPES[device][0], device))
    (gradient,) = torch.autograd.grad(tessera.attention(q, k, v).sum(), q, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_repeatable(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(DTYPES[device][0], device, seqlen_q=300, seqlen_k=300))
    o = tessera.attention(q, k, v, causal=True, deterministic=True)
    first = torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True)
        assert all(map(torch.equal, first, again))
