"""tessera.scaled_attention against three steps in double on the values that elements and scales stand for (S14).

The CPU widens 8 bits to float32, so the rule of docs/correctness.md holds with three steps in float32.
"""

import dataclasses
import inspect
import itertools
import random
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from scales import E4M3, KINDS, OF_K, OF_Q, OF_V, Scaled, elements, factors, scaled
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import reference
import tessera
from tessera.arguments import Arguments, Keywords, Scales
from tessera.torch import scaled as torch_scaled


@pytest.fixture(autouse=True)
def on_a_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU rounds weights, too: test_eight_bits_gpu.py")


def exact(case: Scaled, dtype: torch.dtype, shift: Tensor | None, v_shift: Tensor | None, **features: Any) -> Any:
    """(o, lse) of three steps in a type. A shift of scores is one column more of the product."""
    q, k, v = case.values()
    if shift is not None:
        features.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        q = torch.cat([q, shift.double().transpose(-1, -2)[..., None]], -1)
        k = torch.cat([k, torch.ones_like(k[..., :1])], -1)
    if v_shift is not None:
        if case.starts is None:
            v = v + v_shift.double()[:, None]
        else:
            lengths = torch.tensor(case.starts[1]).diff()
            v = v + v_shift.double().repeat_interleave(lengths, 0)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if case.starts is None:
        return reference.dense(q, k, v, **features)
    return reference.packed(q, k, v, *(torch.tensor(x) for x in case.starts), **features)


def check(
    case: Scaled,
    dtype: torch.dtype | None = torch.float32,
    score_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    **features: Any,
) -> None:
    o, lse = tessera.scaled_attention(
        **case.arguments(), score_shift=score_shift, v_shift=v_shift, dtype=dtype, return_lse=True, **features
    )
    assert lse.dtype is torch.float32 and (dtype is None or o.dtype is dtype)
    with reference.recording() as steps:
        exact_o, exact_lse = exact(case, torch.double, score_shift, v_shift, **features)
    plain_o, _ = exact(case, torch.float32, score_shift, v_shift, **features)
    reference.assert_output_close(o, exact_o, plain_o)
    reference.assert_lse_close(lse, exact_lse, steps)


@pytest.mark.parametrize("of_v", [*OF_V, "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_scaling(dtype: torch.dtype, of_v: str) -> None:
    for of_q, of_k in itertools.product(OF_Q, OF_K):
        check(scaled(dtype, (of_q, of_k, of_v)), causal=random.random() < 0.5)
        check(scaled(dtype, (of_q, of_k, of_v), heads=(3, 3), dims=(17, 9), keys=130))


@pytest.mark.parametrize("of_v", [*OF_V, "bfloat16"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_packed(dtype: torch.dtype, of_v: str) -> None:
    starts = [0, 5, 5, 40, 73, 74], [0, 9, 13, 60, 60, 100]
    for of_q, of_k in itertools.product(OF_Q, OF_K):
        check(scaled(dtype, (of_q, of_k, of_v), starts=starts), causal=random.random() < 0.5)


def test_packed_alike() -> None:
    """Without cu_seqlens_k keys lie as queries do; bounds of the lengths change nothing."""
    case = scaled(starts=([0, 30, 70], [0, 30, 70]))
    given = case.arguments()
    expected = tessera.scaled_attention(**given)
    del given["cu_seqlens_k"]
    assert torch.equal(tessera.scaled_attention(**given), expected)
    assert torch.equal(tessera.scaled_attention(**given, max_seqlen_q=50, max_seqlen_k=64), expected)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_features(dtype: torch.dtype) -> None:
    bias = torch.randn(2, 1, 19, 45)
    bias[..., 7] = -torch.inf
    for features in (
        {"causal": True},
        {"causal": True, "alignment": "top_left"},
        {"window": (5, 3)},
        {"window": (-1, 4)},
        {"causal": True, "window": (9, 0)},
        {"softmax_scale": 0.3},
        {"softcap": 2.0, "causal": True},
        {"alibi_slopes": torch.rand(4)},
        {"alibi_slopes": torch.rand(2, 4), "causal": True},
        {"sink": torch.randn(4), "window": (3, 0)},
        {"bias": bias},
        {"bias": bias[:1, :, :1], "softcap": 3.0, "sink": torch.randn(4)},
        {"batch_invariant": True},
    ):
        known = {name: x for name, x in features.items() if name != "batch_invariant"}
        case = scaled(dtype)
        o = tessera.scaled_attention(**case.arguments(), **features)
        assert torch.equal(o, tessera.scaled_attention(**case.arguments(), **known)) and o.dtype is torch.bfloat16
        check(case, **known)
        if "bias" not in known:
            check(scaled(dtype, rows=50, keys=21), **known)  # rows that see no key


@pytest.mark.parametrize("of_v", ["tensor", "float16"])
def test_shifts(of_v: str) -> None:
    """Whoever takes a vector off all keys, and one off all values, gets o and lse of keys and values as they were."""
    for features in ({}, {"causal": True, "softcap": 4.0, "sink": torch.randn(4)}, {"softmax_scale": -0.2}):
        case = scaled(by=("token", "head", of_v))
        check(case, score_shift=2 * torch.randn(2, 4, 19), **features)
        check(case, v_shift=torch.randn(2, 2, 40), **features)
        check(case, score_shift=torch.randn(2, 4, 19), v_shift=torch.randn(2, 2, 40), **features)
    case = scaled(by=("head", "block", of_v), starts=([0, 5, 30], [0, 21, 40]))
    shift, v_shift = torch.randn(4, 30), torch.randn(2, 2, 40)
    check(case, score_shift=shift, v_shift=v_shift, causal=True)
    first, second = (
        tessera.scaled_attention(**case.arguments(), score_shift=x, v_shift=v_shift) for x in (shift, shift[None])
    )
    assert torch.equal(first, second)

    case, c = scaled(by=("tensor", "tensor", "tensor")), torch.randn(4, 24)
    q, k, v = case.values()
    o, lse = tessera.scaled_attention(
        **case.arguments(), score_shift=torch.einsum("bihd,hd->bhi", q, c.double()).float(), return_lse=True,
        dtype=torch.float32,
    )  # fmt: skip
    whole = k.repeat_interleave(2, 2) + c.double()
    expected, expected_lse = reference.dense(q, whole, v.repeat_interleave(2, 2))
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_output_types() -> None:
    """bfloat16, or v's own type of 16 bits; or what is asked for, rounded once."""
    for of_v, default, accepted in (
        ("channel", torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16)),
        ("bfloat16", torch.bfloat16, (torch.float32, torch.bfloat16)),
        ("float16", torch.float16, (torch.float32, torch.float16)),
    ):
        case = scaled(by=("token", "head", of_v))
        wide = tessera.scaled_attention(**case.arguments(), dtype=torch.float32)
        o = tessera.scaled_attention(**case.arguments())
        assert o.dtype is default and torch.equal(o, wide.to(default))
        for dtype in accepted:
            assert torch.equal(tessera.scaled_attention(**case.arguments(), dtype=dtype), wide.to(dtype))
            check(case, dtype)
    lse = tessera.scaled_attention(**case.arguments(), return_lse=True)[1]
    assert lse.shape == (2, 4, 19) and lse.is_contiguous()


def test_sequences_of_none_and_one() -> None:
    for rows, keys in ((0, 5), (5, 0), (0, 0), (1, 1), (1, 70), (70, 1)):
        check(scaled(rows=rows, keys=keys), causal=random.random() < 0.5)
    o, lse = tessera.scaled_attention(**scaled(batch=0).arguments(), return_lse=True)
    assert o.shape == (0, 19, 4, 40) and lse.shape == (0, 4, 19)


def test_zeros() -> None:
    """Scores of nothing but zeros: the mean of the values. A scale of 0 makes zeros, too."""
    case = scaled(by=("tensor", "tensor", "tensor"))
    mean = case.values()[2].mean(1, keepdim=True).repeat_interleave(2, 2).float()
    for name in ("q", "k", "q_scale", "k_scale"):
        x = getattr(case, name)
        nothing = case.arguments() | {name: torch.zeros_like(x, dtype=torch.float32).to(x.dtype)}
        o, lse = tessera.scaled_attention(**nothing, dtype=torch.float32, return_lse=True)
        torch.testing.assert_close(o, mean.expand_as(o), rtol=0, atol=1e-6)
        torch.testing.assert_close(lse, torch.full_like(lse, 45.0).log(), rtol=0, atol=1e-6)


def test_nan() -> None:
    """e4m3 has NaN, of both signs: whoever sees one becomes NaN, and nobody else changes."""
    case = scaled(by=("tensor", "head", "head"))
    before, lse_before = tessera.scaled_attention(**case.arguments(), causal=True, return_lse=True)
    byte = case.q.view(torch.uint8)
    byte[1, 3, 2, 5] = random.choice([0x7F, 0xFF])
    o, lse = tessera.scaled_attention(**case.arguments(), causal=True, return_lse=True)
    assert o[1, 3, 2].isnan().all() and lse[1, 2, 3].isnan()
    o[1, 3, 2], lse[1, 2, 3] = before[1, 3, 2], lse_before[1, 2, 3]
    assert torch.equal(o, before) and torch.equal(lse, lse_before)
    byte[1, 3, 2, 5] = 0
    case.k.view(torch.uint8)[0, 0, 1, 0] = 0x7F  # everybody sees the first key, of the last two heads
    o = tessera.scaled_attention(**case.arguments(), causal=True)
    assert o[0, :, 2:].isnan().all() and not o[0, :, :2].isnan().any()


def test_extremes() -> None:
    """Every byte, as q's element: 448 and -128, numbers below the normal ones, zeros of both signs."""
    for dtype in KINDS:
        byte = torch.arange(256, dtype=torch.uint8).view(dtype)
        byte = byte[~byte.float().isnan()]
        case = scaled(dtype, by=("tensor", "tensor", "bfloat16"), batch=1, rows=byte.numel(), heads=(2, 1), dims=(1, 8))
        case.q = byte.view(1, -1, 1, 1).expand(1, -1, 2, 1)
        case.k = byte[torch.randint(byte.numel(), (1, 45, 1, 1))]
        case.q_scale, case.k_scale = torch.tensor(2.0**-7), torch.tensor(2.0**-7)
        check(case)


# ---- where things lie


def test_strides() -> None:
    """Scales and tensors are read where they lie: expanded, transposed, in a larger tensor."""
    for by in (("head", "head", "head"), ("token", "block", "channel"), ("token", "head", "block")):
        case = scaled(by=by)
        expected = tessera.scaled_attention(**case.arguments())
        for name in ("q_scale", "k_scale", "v_scale"):
            scale = getattr(case, name)
            turned = scale.transpose(0, 1).contiguous().transpose(0, 1)
            wide = torch.stack([scale, scale], 1)[:, 1]
            for other in (turned, wide):
                assert torch.equal(tessera.scaled_attention(**case.arguments() | {name: other}), expected), name
        for name in "qkv":
            x = getattr(case, name)
            turned = x.transpose(1, 2).contiguous().transpose(1, 2)
            wide = torch.cat([x, x], -1)[..., : x.shape[-1]]
            for other in (turned, wide):
                assert torch.equal(tessera.scaled_attention(**case.arguments() | {name: other}), expected), name
    case = scaled(by=("head", "head", "head"))
    one = factors((), E4M3)
    same = {name: one.expand(2, 2) for name in ("q_scale", "k_scale", "v_scale")}
    alone = {name: one for name in same}
    first, second = (tessera.scaled_attention(**case.arguments() | given) for given in (same, alone))
    assert torch.equal(first, second)


def test_o_lies_as_q_does() -> None:
    case = scaled(dims=(24, 24))
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    o = tessera.scaled_attention(**case.arguments() | {"q": q})
    assert o.transpose(1, 2).is_contiguous() and torch.equal(o, tessera.scaled_attention(**case.arguments()))


def test_signs_that_torch_has_put_off() -> None:
    case = scaled()
    given = case.arguments() | {"score_shift": torch.randn(2, 4, 19), "v_shift": torch.randn(2, 2, 40)}
    for name in ("q_scale", "k_scale", "v_scale", "score_shift", "v_shift"):
        flipped, plain = (
            tessera.scaled_attention(**given | {name: f(given[name])}) for f in (torch._neg_view, torch.neg)
        )
        assert torch.equal(flipped, plain), name


def test_versions_of_torch_that_export_no_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits travel as uint8 then; errors have its name all the same."""
    case = scaled()
    expected, text = tessera.scaled_attention(**case.arguments()), tessera.explain_scaled(**case.arguments())
    monkeypatch.setattr(torch_scaled, "travels_as_bits", True)
    assert torch.equal(tessera.scaled_attention(**case.arguments()), expected)
    assert tessera.explain_scaled(**case.arguments()) == text
    with pytest.raises(ValueError, match="q_scale is None: must be .*; values of float8_e4m3fn are elements times"):
        tessera.scaled_attention(**case.arguments() | {"q_scale": None})


def test_two_meanings() -> None:
    """Of packed q two dimensions are by sequence and head where they may be that; with a first one they are by row."""
    starts = [0, 1, 2], [0, 20, 45]
    by_head = scaled(by=("head", "tensor", "tensor"), heads=(2, 2), starts=starts)
    by_row = dataclasses.replace(by_head, by=("token", "tensor", "tensor"))
    given = by_head.arguments()
    assert given["q_scale"].shape == (2, 2) == (by_row.q.shape[1], by_row.q.shape[0])
    o = tessera.scaled_attention(**given, dtype=torch.float32)
    rows = tessera.scaled_attention(**given | {"q_scale": given["q_scale"][None]}, dtype=torch.float32)
    for result, case in ((o, by_head), (rows, by_row)):
        expected, _ = exact(case, torch.double, None, None)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)
    assert (o - rows).abs().max() > 1e-3


# ---- torch's machinery


def op_arguments(case: Scaled, **given: Any) -> tuple[Any, ...]:
    """Of torch.ops.tessera.scaled_forward, causal."""
    a = case.arguments() | given
    longest = 0 if case.starts is None else 50
    names = ("bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "q_scale", "k_scale", "v_scale",
             "score_shift", "v_shift")  # fmt: skip
    return (a["q"], a["k"], a["v"], *(a.get(name) for name in names), a["k_block"], a["v_block"], None, longest,
            longest, None, 0.0, -1, 0, False, False, a.get("dtype", torch.bfloat16))  # fmt: skip


def test_opcheck() -> None:
    for arguments in (
        op_arguments(scaled()),
        op_arguments(scaled(torch.int8)),
        op_arguments(scaled(torch.int8, ("head", "tensor", "float16")), dtype=torch.float16),
        op_arguments(scaled(), score_shift=torch.randn(2, 4, 19), v_shift=torch.randn(2, 2, 40), sink=torch.randn(4)),
        op_arguments(scaled(starts=([0, 10, 33], [0, 10, 33])), dtype=torch.float32),
    ):
        # torch's check of schemas compares tensors by a product that float8 has not.
        tests = ("test_schema",) if arguments[0].dtype is torch.int8 else ()
        tests += ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.tessera.scaled_forward, arguments, test_utils=tests)


def test_op_has_the_bits_of_the_direct_call() -> None:
    case = scaled()
    shift, sink = torch.randn(2, 4, 19), torch.randn(4)
    direct = tessera.scaled_attention(**case.arguments(), causal=True, score_shift=shift, sink=sink, return_lse=True)
    op = torch.ops.tessera.scaled_forward(*op_arguments(case, score_shift=shift, sink=sink))
    assert all(map(torch.equal, direct, op))


def test_compiled_once_for_many_lengths() -> None:
    torch._dynamo.reset()
    compilations = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def layer(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> Any:
        o, lse = tessera.scaled_attention(q, k, v, *scales, causal=True, softcap=5.0, return_lse=True)
        return o.float() * 2, lse

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for length in range(5, 30, 3):
        case = scaled(by=("token", "head", "channel"), rows=length, keys=length + 1)
        given = (case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale)
        assert all(map(torch.equal, compiled(*given), layer(*given)))
        if length == 5:
            first = compilations
    assert compilations == first


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    case = scaled()
    given = case.arguments()

    def layer(q_scale: Tensor) -> Tensor:
        result: Tensor = tessera.scaled_attention(**given | {"q_scale": q_scale * 2})
        return result * 3

    assert torch.equal(torch.compile(layer, fullgraph=True)(case.q_scale), layer(case.q_scale))


def test_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor) -> Tensor:
            result: Tensor = tessera.scaled_attention(q, k, v, q_scale, k_scale, dtype=torch.float32, window=(9, 0))
            return result

    case = scaled(by=("token", "head", "bfloat16"))
    inputs = (case.q, case.k, case.v, case.q_scale, case.k_scale)
    rows, keys = torch.export.Dim("rows", min=2, max=4096), torch.export.Dim("keys", min=2, max=4096)
    program = torch.export.export(
        Layer(), inputs, dynamic_shapes=({1: rows}, {1: keys}, {1: keys}, {2: rows}, {})
    )  # fmt: skip
    assert any("tessera.scaled_forward" in str(node.target) for node in program.graph.nodes)
    longer = scaled(by=("token", "head", "bfloat16"), rows=40, keys=77)
    for x in (case, longer):
        given = (x.q, x.k, x.v, x.q_scale, x.k_scale)
        assert torch.equal(program.module()(*given), Layer()(*given))


def test_fake_and_meta_tensors() -> None:
    case = scaled()
    tensors = {name: x for name, x in case.arguments().items() if isinstance(x, Tensor)}
    numbers = {"k_block": case.k_block, "return_lse": True}
    with FakeTensorMode() as mode:
        o, lse = tessera.scaled_attention(**{name: mode.from_tensor(x) for name, x in tensors.items()}, **numbers)
        assert o.shape == (2, 19, 4, 40) and o.dtype is torch.bfloat16 and lse.shape == (2, 4, 19)
    o, _ = tessera.scaled_attention(**{name: x.to("meta") for name, x in tensors.items()}, **numbers)
    assert o.is_meta and o.shape == (2, 19, 4, 40) and o.dtype is torch.bfloat16


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        tessera.scaled_attention(**scaled().arguments())
    assert counter.get_total_flops() == 2 * 2 * 4 * 19 * 45 * (24 + 40)


def test_autocast_leaves_8_bits_alone() -> None:
    case = scaled()
    expected = tessera.scaled_attention(**case.arguments())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tessera.scaled_attention(**case.arguments()), expected)


def test_threads() -> None:
    case = scaled(rows=150, keys=200)
    before, expected = tessera.get_num_threads(), tessera.scaled_attention(**case.arguments())
    try:
        for threads in (1, 3):
            tessera.set_num_threads(threads)
            assert torch.equal(tessera.scaled_attention(**case.arguments()), expected)
    finally:
        tessera.set_num_threads(before)


def test_there_are_no_gradients() -> None:
    case = scaled(by=("token", "head", "bfloat16"))
    given = case.arguments() | {
        "score_shift": torch.randn(2, 4, 19), "v_shift": torch.randn(2, 2, 40), "bias": torch.zeros(1, 1, 1, 45),
        "sink": torch.randn(4),
    }  # fmt: skip
    for name in ("v", "q_scale", "k_scale", "score_shift", "v_shift", "bias", "sink"):
        leaf = given[name].detach().clone().requires_grad_()
        with pytest.raises(
            NotImplementedError,
            match=re.escape(f"{name} requires a gradient: scaled_attention has none; call it under torch.no_grad()"),
        ):
            tessera.scaled_attention(**given | {name: leaf})
        with torch.no_grad():
            assert not tessera.scaled_attention(**given | {name: leaf}).requires_grad


# ---- plans


def test_explain() -> None:
    case = dataclasses.replace(scaled(by=("token", "head", "channel")))
    text = tessera.explain_scaled(**case.arguments(), causal=True)
    assert "fwd e4m3 b=2 h=4/2 q=19 k=45 d=24/40 causal scales=token/head/channel" in text and "cpu." in text
    text = tessera.explain_scaled(**case.arguments(), dtype=torch.float32, device="h200")
    assert "o=f32" in text and "takes no tensors of 8 bits and their scales; k is e4m3" in text
    case = scaled(torch.int8, ("head", "tensor", "float16"), starts=([0, 5, 30], [0, 21, 40]))
    text = tessera.explain_scaled(**case.arguments(), v_shift=torch.zeros(2, 2, 40))
    assert "fwd i8" in text and "v=f16" in text and "scales=head/tensor/none v_shift" in text
    with pytest.raises(ValueError, match="device = 'abacus': unknown"):
        tessera.explain_scaled(**case.arguments(), device="abacus")


# ---- wrong use

Q, K, V = (elements(shape, E4M3) for shape in ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)))
ONE = torch.ones(())


def x(*shape: int) -> Tensor:
    return torch.ones(shape)


NEEDED = "; values of float8_e4m3fn are elements times a scale, and a missing one is not 1"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 3}, TypeError, "q is of type 'int': must be a torch tensor, a NumPy array"),
    ({"v": None}, TypeError, "v is of type 'NoneType'"),
    ({"q": Q.float()}, ValueError,
     "q.dtype = float32: must be float8_e4m3fn or int8; tessera.attention takes types without scales"),
    ({"q": Q.to(torch.float8_e5m2)}, ValueError, "q.dtype = float8_e5m2: must be float8_e4m3fn or int8"),
    ({"q": Q.view(torch.uint8)}, ValueError, "q.dtype = torch.uint8: must be torch.float8_e4m3fn or torch.int8"),
    ({"v": V.view(torch.uint8)}, ValueError, "v.dtype = torch.uint8: must be torch.float8_e4m3fn or torch.int8, or of"),
    ({"v": V.to(torch.uint16)}, ValueError, "v.dtype = torch.uint16: must be torch.float8_e4m3fn or torch.int8, or of"),
    ({"k": K.view(torch.int8)}, ValueError, "k.dtype = int8, but q.dtype = float8_e4m3fn: they must be the same"),
    ({"k": K.bfloat16()}, ValueError, "k.dtype = bfloat16, but q.dtype = float8_e4m3fn: they must be the same"),
    ({"v": V.view(torch.int8)}, ValueError,
     "v.dtype = int8: must be q's type, float8_e4m3fn, or bfloat16 or float16"),
    ({"v": V.float()}, ValueError, "v.dtype = float32: must be q's type, float8_e4m3fn, or bfloat16 or float16"),
    ({"q": Q.view(torch.int8).to_sparse()}, ValueError, "q.layout = torch.sparse_coo: must be torch.strided"),
    ({"k": K[:1]}, ValueError, "k has shape (1, 7, 2, 16): must be (2, 7, 2, 16)"),
    ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "q: stride of the last dimension = 4"),
    ({"q_scale": 1.0}, TypeError, "q_scale is of type 'float', but q is a torch tensor"),
    ({"q_scale": None}, ValueError,
     "q_scale is None: must be (), (batch, num_heads_k) = (2, 2) or (batch, num_heads, seqlen_q) = (2, 4, 5)" + NEEDED),
    ({"k_scale": None}, ValueError, "k_scale is None: must be () or (batch, num_heads_k) = (2, 2)" + NEEDED),
    ({"v_scale": None}, ValueError,
     "v_scale is None: must be (), (batch, num_heads_k) = (2, 2) or (batch, num_heads_k, head_dim_v) = (2, 2, 8)"
     + NEEDED),
    ({"q_scale": x(2, 4)}, ValueError,
     "q_scale has shape (2, 4): must be (), (batch, num_heads_k) = (2, 2) or (batch, num_heads, seqlen_q) = (2, 4, 5)"),
    ({"q_scale": x(2, 5, 4)}, ValueError, "q_scale has shape (2, 5, 4): must be"),
    ({"q_scale": x(2, 4, 5, 1)}, ValueError, "q_scale has shape (2, 4, 5, 1): must be"),
    ({"q_scale": x(2)}, ValueError, "q_scale has shape (2,): must be"),
    ({"k_scale": x(2, 2, 7)}, ValueError,
     "k_scale has shape (2, 2, 7): must be () or (batch, num_heads_k) = (2, 2), or by k_block"),
    ({"k_scale": x(2, 2, 3), "k_block": 4}, ValueError,
     "k_scale has shape (2, 2, 3): must be (batch, num_heads_k, blocks) = (2, 2, 2), as k_block = 4"),
    ({"k_block": 4}, ValueError,
     "k_scale has shape (): must be (batch, num_heads_k, blocks) = (2, 2, 2), as k_block = 4"),
    ({"k_scale": None, "k_block": 4}, ValueError,
     "k_scale is None: must be (batch, num_heads_k, blocks) = (2, 2, 2), as k_block = 4" + NEEDED),
    ({"k_block": -1}, ValueError, "k_block = -1: must lie in [1, 536870912], or be 0 where scales are not by block"),
    ({"k_block": 1.5}, TypeError, "k_block = 1.5: must be an integer"),
    ({"v_block": 1 << 40}, ValueError, "v_block = 1099511627776: must lie in [1, 536870912]"),
    ({"v_scale": x(2, 2, 7)}, ValueError,
     "v_scale has shape (2, 2, 7): must be (), (batch, num_heads_k) = (2, 2) or (batch, num_heads_k, head_dim_v) = "
     "(2, 2, 8), or by v_block"),
    ({"v_scale": x(2, 2, 8), "v_block": 7}, ValueError,
     "v_scale has shape (2, 2, 8): must be (batch, num_heads_k, blocks) = (2, 2, 1), as v_block = 7"),
    ({"v": V.half()}, ValueError, "v_scale is given, but v.dtype = float16: only v of 8 bits has scales"),
    ({"v": V.half(), "v_scale": None, "v_block": 3}, ValueError, "v_block is given, but v.dtype = float16"),
    ({"q_scale": ONE.double()}, ValueError, "q_scale.dtype = float64: must be float32"),
    ({"v_scale": x(2, 2, 8).bfloat16()}, ValueError, "v_scale.dtype = bfloat16: must be float32"),
    ({"q_scale": x(2, 4, 10)[..., ::2]}, ValueError, "q_scale: stride of the last dimension = 2: must be 1"),
    ({"v_scale": x(2, 2, 1).expand(2, 2, 8)}, ValueError, "v_scale: stride of the last dimension = 0: must be 1"),
    ({"score_shift": x(2, 2)}, ValueError,
     "score_shift has shape (2, 2): must be (batch, num_heads, seqlen_q) = (2, 4, 5)"),
    ({"score_shift": x(2, 4, 5).half()}, ValueError, "score_shift.dtype = float16: must be float32"),
    ({"v_shift": ONE}, ValueError, "v_shift has shape (): must be (batch, num_heads_k, head_dim_v) = (2, 2, 8)"),
    ({"dtype": torch.float64}, ValueError,
     "dtype = torch.float64: must be torch.float32, torch.bfloat16 or torch.float16"),
    ({"dtype": torch.uint16}, ValueError, "dtype = torch.uint16: must be torch.float32"),
    ({"v": V.half(), "v_scale": None, "dtype": torch.bfloat16}, ValueError,
     "o.dtype = bfloat16: must be float32 or v's type, float16"),
    ({"bias": x(1, 1, 1, 7).half()}, ValueError, "bias.dtype = float16: must be float32"),
    ({"bias": x(1, 1, 1, 7).to(E4M3)}, ValueError, "bias.dtype = float8_e4m3fn: must be float32"),
    ({"window": (5, 3), "causal": True}, ValueError, "window = (5, 3) together with causal = True"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is given, but cu_seqlens_q is None"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"q": Q, "k": K, "v": V, "q_scale": ONE, "k_scale": ONE, "v_scale": ONE} | arguments
    for function in (tessera.scaled_attention, tessera.explain_scaled):
        with pytest.raises(error, match="^" + re.escape(text)):
            function(**given)


def test_wrong_packed_arguments() -> None:
    at = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k = elements((5, 4, 16), E4M3), elements((5, 2, 16), E4M3)
    for scales, text in (
        ((x(5, 4), ONE, ONE), "q_scale has shape (5, 4): must be (), (batch, num_heads_k) = (2, 2) or ([1,] num_heads, "
         "total_q) = (4, 5)"),
        ((x(2, 4, 5), ONE, ONE), "q_scale has shape (2, 4, 5): must be"),
        ((ONE, x(2, 5), ONE), "k_scale has shape (2, 5): must be () or (batch, num_heads_k) = (2, 2), or by k_block"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^" + re.escape(text)):
            tessera.scaled_attention(q, k, k, *scales, cu_seqlens_q=at)
    text = "k_scale has shape (2, 3): must be (num_heads_k, blocks) = (2, 4), as k_block = 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        tessera.scaled_attention(q, k, k, ONE, x(2, 3), ONE, k_block=2, cu_seqlens_q=at)


def test_missing_scales_where_somebody_watches() -> None:
    compiled = torch.compile(lambda q: tessera.scaled_attention(q, K, V, None, ONE, ONE), backend="eager")
    with pytest.raises(Exception, match="q_scale is None: a scale is required, and a missing one is not 1"):
        compiled(Q)


# ---- signatures

LEFT_OUT = {"dropout_p", "rng_state", "deterministic"}
NAMES = [field.name for field in dataclasses.fields(Arguments) if field.name not in LEFT_OUT]
SCALES = [field.name for field in dataclasses.fields(Scales)]
PUBLIC = (tessera.scaled_attention, tessera.explain_scaled)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_signatures_agree_with_one_description(function: Callable[..., Any]) -> None:
    """What `attention` takes has its names, order, defaults and types; scales are those of `Scales`."""
    parameters = inspect.signature(function).parameters
    assert [name for name in parameters if name in NAMES] == NAMES
    assert {name for name in parameters if name in SCALES} == set(SCALES)
    expected = inspect.signature(tessera.attention).parameters
    assert [parameters[name].default for name in NAMES] == [expected[name].default for name in NAMES]
    types, keywords = get_type_hints(function), get_type_hints(Keywords)
    assert all(types[name] == keywords[name] for name in NAMES)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_every_argument_arrives(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrived(Exception):
        pass

    def prepare(q: Any, k: Any, v: Any, scales: Scales, arguments: Arguments) -> Any:
        assert q is Q and k is K and v is V
        raise Arrived(scales, arguments)

    monkeypatch.setattr(torch_scaled, "prepare", prepare)
    values: dict[str, Any] = {name: object() for name in NAMES + SCALES}
    with pytest.raises(Arrived) as arrived:
        function(Q, K, V, **values)
    scales, arguments = arrived.value.args
    assert {name: getattr(scales, name) for name in SCALES} == {name: values[name] for name in SCALES}
    assert {name: getattr(arguments, name) for name in NAMES} == {name: values[name] for name in NAMES}
    assert (arguments.dropout_p, arguments.rng_state, arguments.deterministic) == (0.0, None, False)
