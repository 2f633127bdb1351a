"""tessera.attention of a lower precision: what q, k and v are rounded to decides, in both passes.

The reference takes the rounded tensors from `tessera.quantize`, whose own tests hold it, and attends to them in double.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import reference
import tessera
from tessera import eight_bits
from tessera.torch import precision as torch_precision
from tessera.torch import quantize as torch_quantize

MODES = (("e4m3", torch.float32), ("e4m3", torch.bfloat16), ("int8", torch.bfloat16), ("int8", torch.float16))


@pytest.fixture(autouse=True)
def on_a_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("tolerances are of a CPU, whose weights are not rounded")


def tensors(
    dtype: torch.dtype,
    rows: int = 37,
    keys: int = 150,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (48, 40),
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, rows, heads[0], dims[0]), (2, keys, heads[1], dims[0]), (2, keys, heads[1], dims[1]))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def rounded(q: Tensor, k: Tensor, v: Tensor, precision: str, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v become, in double, q and k after their transform."""
    d = q.shape[-1]
    block = 512 if d <= 96 else 768 if d <= 128 else 384 if d <= 192 else 768
    k_block, turned = 96 if precision == "e4m3" and d <= 128 else 128, 0 if d % 2 else min(d & -d, 256)
    made = tessera.quantize(
        q.detach(), k.detach(), v.detach(), dtype=eight_bits.PRECISIONS[precision], hadamard=turned, k_block=k_block,
        v_scale="block" if precision == "e4m3" else None, v_block=block, cu_seqlens_q=at,
    )  # fmt: skip
    q_scale = made.q_scale if at is None else made.q_scale[0]
    q8 = made.q.double() * q_scale.double().transpose(-1, -2)[..., None]

    def along(scale: Tensor, size: int) -> Tensor:
        if at is None:
            return scale.double().repeat_interleave(size, -1)[..., : k.shape[1]].transpose(1, 2)[..., None]
        n, ends = [], at.tolist()
        for b in range(len(ends) - 1):
            first = ends[b] // size + b
            n += [first + j // size for j in range(ends[b + 1] - ends[b])]
        return scale.double()[:, n].transpose(0, 1)[..., None]

    k8 = made.k.double() * along(made.k_scale, k_block)
    return q8, k8, v.double().detach() if precision == "int8" else made.v.double() * along(made.v_scale, block)


def transform(x: Tensor) -> Tensor:
    """Hadamard, in double and differentiable."""
    block = min(x.shape[-1] & -x.shape[-1], 256)
    matrix = torch.ones(1, 1, dtype=torch.double)
    while matrix.shape[0] < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double), matrix)
    return (x.unflatten(-1, (-1, block)) @ matrix / block**0.5).flatten(-2)


def straight_through(q: Tensor, k: Tensor, v: Tensor, precision: str, at: Tensor | None = None) -> tuple[Tensor, ...]:
    """The rounded values, with the gradient of what was rounded."""
    wide = transform(q.double()), transform(k.double()), v.double()
    return tuple(x + (y - x).detach() for x, y in zip(wide, rounded(q, k, v, precision, at), strict=True))


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (20, 5)},
    {"causal": True, "alignment": "top_left"},
    {"softcap": 2.0, "causal": True},
    {"softmax_scale": 0.3},
    {"sink": torch.tensor([0.3, -1.0, 2.0, 0.0]), "causal": True},
    {"alibi_slopes": torch.tensor([0.1, 0.3, 0.2, 0.0])},
    {"bias": torch.linspace(-1, 1, 150).view(1, 1, 1, 150)},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(f) or "plain")
@pytest.mark.parametrize(("precision", "dtype"), MODES, ids=str)
def test_forward(precision: str, dtype: torch.dtype, features: dict[str, Any]) -> None:
    q, k, v = tensors(dtype)
    o, lse = tessera.attention(q, k, v, precision=precision, return_lse=True, **features)
    assert o.dtype is dtype and lse.dtype is torch.float32
    q8, k8, v8 = rounded(q, k, v, precision)
    with reference.recording() as steps:
        exact, exact_lse = reference.dense(q8, k8, v8, **features)
    plain, _ = reference.dense(*(x.to(dtype) for x in (q8, k8, v8)), **features)
    reference.assert_output_close(o, exact, plain)
    reference.assert_lse_close(lse, exact_lse, steps)
    assert torch.equal(tessera.attention(q, k, v, precision=precision, **features), o)


@pytest.mark.parametrize(("precision", "dtype"), MODES, ids=str)
def test_packed(precision: str, dtype: torch.dtype) -> None:
    starts = [0, 140, 143, 143, 300]
    at = torch.tensor(starts, dtype=torch.int32)
    q, k, v = (x[0].requires_grad_() for x in tensors(dtype, 300, 300))
    o, lse = tessera.attention(q, k, v, cu_seqlens_q=at, causal=True, precision=precision, return_lse=True)
    exact, exact_lse = reference.packed(*straight_through(q, k, v, precision, at), at, at, causal=True)
    plain, _ = reference.packed(*(x.to(dtype) for x in rounded(q, k, v, precision, at)), at, at, causal=True)
    reference.assert_output_close(o, exact, plain)
    assert lse.shape == (4, 300)
    check_gradients((o, lse), (exact, exact_lse), (q, k, v), dtype)


def check_gradients(
    result: tuple[Tensor, ...], exact: tuple[Tensor, ...], leaves: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """Relative RMS error of each gradient, for random ones of o and lse. In 16 bits: the rounded tensors are rounded
    once more, to 8 or 11 bits, and so are weights, o and gradients."""
    douts = [torch.randn_like(x) for x in result]
    ours = torch.autograd.grad(result, leaves, douts)
    theirs = torch.autograd.grad(exact, leaves, [x.double() for x in douts])
    allowed = {torch.float32: 4e-6, torch.float16: 1.5e-3, torch.bfloat16: 2e-2}[dtype]
    for name, mine, other in zip(("q", "k", "v", "sink or bias"), ours, theirs, strict=False):
        error = (mine.double() - other.double()).norm() / other.double().norm()
        # That of the sink is what is left of a sum over rows.
        assert error <= allowed * (5 if mine.dim() == 1 else 1), f"d{name}: {error:.2e}"


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(f) or "plain")
@pytest.mark.parametrize(("precision", "dtype"), MODES, ids=str)
def test_gradients(precision: str, dtype: torch.dtype, features: dict[str, Any]) -> None:
    """Those of attention in double over the rounded tensors, passed straight through the rounding."""
    q, k, v = (x.requires_grad_() for x in tensors(dtype))
    given = {name: x.clone().requires_grad_() if name in ("sink", "bias") else x for name, x in features.items()}
    leaves = (q, k, v, *(given[name] for name in ("sink", "bias") if name in given))
    result = tessera.attention(q, k, v, precision=precision, return_lse=True, **given)
    exact = reference.dense(*straight_through(q, k, v, precision), **given)
    # dq and friends of exact reach q, k and v through their double copies.
    check_gradients(result, exact, leaves, dtype)


@pytest.mark.parametrize("dims", [(64, 64), (96, 32), (33, 17), (128, 128), (192, 128), (256, 256)], ids=str)
def test_gradients_of_head_dims(dims: tuple[int, int]) -> None:
    """Every block of the transform, odd powers of two too; and none."""
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32, 20, 600, dims=dims))
    result = tessera.attention(q, k, v, precision="e4m3", return_lse=True)
    check_gradients(result, reference.dense(*straight_through(q, k, v, "e4m3")), (q, k, v), torch.float32)


def test_gradient_is_that_of_the_rounded_tensors() -> None:
    """Not of those that came: weights fit lse only with the former."""
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))
    q.data *= 4
    o, lse = tessera.attention(q, k, v, precision="e4m3", return_lse=True)
    q8, k8, _ = rounded(q, k, v, "e4m3")
    for x, y, is_fit in ((q8, k8, True), (q.double(), k.double(), False)):
        s = torch.einsum("bihd,bjhd->bhij", x, y.repeat_interleave(2, 2)) / x.shape[-1] ** 0.5
        total = (s - lse[..., None].double()).exp().sum(-1)
        assert ((total - 1).abs().max() < 1e-4) == is_fit
    # dv = p^T dout: with dout = 1 each row of p adds up to 1.
    (dv,) = torch.autograd.grad(o.sum(), v)
    torch.testing.assert_close(dv.sum((1, 2)), torch.full((2, 40), 37.0 * 4), rtol=1e-5, atol=0)


def test_values_in_tiles_have_the_bits_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in both passes; dense and packed."""
    at = torch.tensor([0, 140, 143, 300], dtype=torch.int32)
    for packed in (False, True):
        q, k, v = (x.requires_grad_() for x in tensors(torch.bfloat16, 300, 300))
        given: dict[str, Any] = {"causal": True, "precision": "e4m3", "return_lse": True}
        if packed:
            q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
            given["cu_seqlens_q"] = at
        dout = torch.randn_like(q[..., :40])
        results = []
        for tiles in (False, True):
            monkeypatch.setattr(torch_precision, "_in_tiles", lambda v, precision, tiles=tiles: tiles)
            o, lse = tessera.attention(q, k, v, **given)
            results.append((o, lse, *torch.autograd.grad(o, (q, k, v), dout)))
        assert all(map(torch.equal, *results))


def test_what_is_kept_for_the_gradient() -> None:
    """Tensors of 8 bits, their scales, o and lse: not what came."""
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = tessera.attention(q, k, v, precision="e4m3")
    assert all(x.data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr()) for x in kept)
    wide = sum(x.numel() for x in kept if x.element_size() > 1)
    assert wide <= o.numel() + 3 * 2 * 4 * 150 and sum(x.element_size() == 1 for x in kept) == 3


def test_op() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(torch.bfloat16))
    sink, bias = torch.randn(4, requires_grad=True), torch.randn(1, 1, 1, 150, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (q, k, v, bias, None, sink, None, None, 0, 0, None, 0.0, -1, 0, False, False, False, "int8")
    torch.library.opcheck(torch.ops.tessera.precision_forward, arguments, test_utils=tests)
    # torch's check of schemas compares tensors by a product that float8 has not.
    torch.library.opcheck(torch.ops.tessera.precision_forward, (*arguments[:-1], "e4m3"), test_utils=tests[2:3])


@pytest.mark.parametrize("precision", ("e4m3", "int8"))
def test_compiled(precision: str) -> None:
    """Both passes in one graph, for any lengths, near the eager ones."""
    torch._dynamo.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, precision=precision)
        return result * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for keys in (140, 150, 290):
        q, k, v = (x.requires_grad_() for x in tensors(torch.bfloat16, keys=keys))
        one, other = (f(q, k, v) for f in (compiled, layer))
        assert torch.equal(one, other)
        dout = torch.randn_like(one)
        for x, y in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (one, other)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, precision="e4m3").square().sum()
        return result

    eager, compiled = (
        torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (loss, torch.compile(loss, fullgraph=True))
    )  # fmt: skip
    for x, y in zip(eager, compiled, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_checkpoint_and_autocast() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, precision="e4m3")
        return result

    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(map(torch.equal, expected, again))
    with pytest.raises(NotImplementedError, match="precision = 'e4m3' under a transform of torch.func: must be None"):
        torch.func.grad(lambda *x: attend(*x).sum())(*(x.detach() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        o = attend(q, k, v)
    assert o.dtype is torch.bfloat16 and torch.equal(o, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attend(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 4 * 37 * 150 * (48 + 40)


def test_error_of_each_precision() -> None:
    """The figures of docs/python.md: relative RMS error of o for normal numbers, and for those with outliers."""
    errors = {}
    for name in ("normal", "outliers"):
        q, k, v = (torch.randn(1, 1024, 2, 128) for _ in range(3))
        if name == "outliers":
            q, k, v = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3) for x in (q, k, v))
        exact = tessera.attention(q, k, v)
        for precision, dtype in (("e4m3", torch.float32), ("int8", torch.float16)):
            o = tessera.attention(*(x.to(dtype) for x in (q, k, v)), precision=precision)
            errors[precision, name] = float((o - exact).norm() / exact.norm())
    bounds = {
        ("e4m3", "normal"): 0.06,
        ("e4m3", "outliers"): 0.06,
        ("int8", "normal"): 0.016,
        ("int8", "outliers"): 0.016,
    }
    assert all(bounds[key] / 4 < error < bounds[key] for key, error in errors.items()), errors


def test_hadamard_helps_where_there_are_outliers() -> None:
    q, k, v = (torch.randn(1, 512, 2, 128) for _ in range(3))
    q[..., 5] *= 30
    k[..., 7] *= 30
    exact = tessera.attention(q, k, v)
    v = v.half()
    plain = tessera.quantize(q, k, dtype="int8").attention(v=v, dtype=torch.float32)
    turned = tessera.attention(q.half(), k.half(), v, precision="int8")
    assert (turned - exact).norm() < (plain - exact).norm() / 2


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"precision": "fp8"}, ValueError, "precision = 'fp8': must be 'e4m3', 'int8' or None"),
    ({"precision": torch.float8_e4m3fn}, ValueError, "precision = torch.float8_e4m3fn: must be 'e4m3', 'int8' or None"),
    ({"dropout_p": 0.5}, NotImplementedError, "dropout_p = 0.5 together with precision = 'e4m3': must be 0"),
    ({"precision": "int8"}, NotImplementedError,
     "v.dtype = float32 together with precision = 'int8': must be bfloat16 or float16, as v stays as it is"),
    ({"k": torch.ones(2, 7, 2, 16).half()}, ValueError, "k.dtype = float16, but q.dtype = float32"),
    ({"v": torch.ones(2, 7, 2, 16).half()}, ValueError, "v.dtype = torch.float16, but q.dtype = torch.float32"),
    ({"q": torch.ones(2, 7, 4, 16).double(), "v": torch.ones(2, 7, 2, 16).double()}, ValueError,
     "q.dtype = float64: must be float32, bfloat16 or float16"),
    ({"q": torch.ones(2, 7, 16)}, ValueError, "q has shape (2, 7, 16): must be (batch, seqlen, heads, head_dim)"),
    ({"bias": torch.ones(1, 1, 1, 7).half()}, ValueError, "bias.dtype = float16: must be float32"),
    ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, ValueError, "cu_seqlens_k is given, but cu_seqlens_q"),
]  # fmt: skip


@pytest.mark.parametrize("needs", (False, True), ids=("plain", "gradients"))
@pytest.mark.parametrize(("arguments", "error", "text"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str, needs: bool) -> None:
    given: dict[str, Any] = {"q": torch.ones(2, 5, 4, 16), "k": torch.ones(2, 7, 2, 16), "v": torch.ones(2, 7, 2, 16)}
    given |= {"precision": "e4m3"} | arguments
    if needs:
        given["q"] = given["q"].detach().requires_grad_()
    with pytest.raises(error, match="^" + re.escape(text)):
        tessera.attention(**given)


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))
    (dq,) = torch.autograd.grad(tessera.attention(q, k, v, precision="e4m3").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()


def test_matrix_of_the_transform() -> None:
    """Its own inverse, and orthonormal, in every type."""
    for block in (2, 4, 8, 16, 32, 64, 128, 256):
        x = torch.randn(3, 2 * block, dtype=torch.float32)
        turned = torch_precision._turned_back(x, block)
        torch.testing.assert_close(torch_precision._turned_back(turned, block), x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(turned.norm(), x.norm())
        made = tessera.quantize(x[None, :, None], hadamard=block)
        value = made.q.float() * torch_quantize.of_tokens(made.q_scale, False)
        assert (value[0, :, 0] - turned).norm() < 0.05 * turned.norm()


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_recipe_fits_the_kernels_of_a_gpu(dims: tuple[int, int]) -> None:
    """The fastest ones, of long sequences, too."""
    fastest = {128: "d128.192x96", 256: "d256.128x128"}.get(dims[0], "") if dims[0] == dims[1] else ""
    q, k, v = tensors(torch.bfloat16, dims=dims)
    blocks = {"k_block": eight_bits.k_block_of("float8_e4m3fn", dims[0]), "v_block": eight_bits.v_block_of(dims[0])}
    made = tessera.quantize(q, k, v, v_tiles=True, **blocks)
    assert re.search(r"kernel +sm90\.forward\.e4m3", made.explain(device="h200", causal=True))
    assert fastest in made.explain(device="h200", causal=True, batch_invariant=True)
