"""8 bits on a GPU: the bits of a CPU where they are promised, and bounds where tensor cores round more."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tessera


@pytest.fixture(autouse=True)
def on_a_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")


def tensors(
    rows: int = 300, keys: int = 700, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (128, 128)
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, rows, heads[0], dims[0]), (2, keys, heads[1], dims[0]), (2, keys, heads[1], dims[1]))
    q, k, v = (torch.randn(shape).bfloat16() for shape in shapes)
    return q, k, v


def on_device(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double().cpu() - exact.double().cpu()).norm() / exact.double().cpu().norm())


def test_quantize_has_the_bits_of_a_cpu() -> None:
    q, k, v = tensors()
    at_q = torch.tensor([0, 100, 101, 300], dtype=torch.int32)
    at_k = torch.tensor([0, 130, 134, 700], dtype=torch.int32)
    mean, table = torch.randn(2, 2, 128), torch.rand(800, 64)
    packed = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "max_seqlen_q": 199, "max_seqlen_k": 566}
    for rows, options in (
        ((q, k, v), {"hadamard": 128, "v_tiles": True}),
        ((q, k, v), {"k_mean": mean, "rotary_cos": table, "rotary_sin": table, "signs": torch.ones(128)}),
        ((q, k, v), {"dtype": "int8", "v_scale": "channel"}),
        ((q[0], k[0], v[0]), {**packed, "hadamard": 128}),
    ):
        here = tessera.quantize(*rows, **options)
        there = tessera.quantize(*map(on_device, rows), **{name: on_device(x) for name, x in options.items()})
        for name in ("q", "k", "v"):
            one, other = (getattr(made, name).view(torch.uint8).cpu() for made in (here, there))
            assert torch.equal(one, other), name
        assert torch.equal(here.q_scale, there.q_scale.cpu())
        if "v_scale" not in options and "cu_seqlens_q" not in options:  # else not all are written, or sums are torch's
            assert torch.equal(here.k_scale, there.k_scale.cpu()) and torch.equal(here.v_scale, there.v_scale.cpu())


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window": (90, 10)}, {"softcap": 5.0}], ids=str)
def test_precision(dims: tuple[int, int], features: dict[str, Any]) -> None:
    """Both passes beside those of a CPU, whose weights are not rounded."""
    if dims == (192, 128) and "softcap" in features:
        pytest.skip("no kernel has both")
    leaves = [x.requires_grad_() for x in tensors(dims=dims)]
    there = [x.detach().cuda().requires_grad_() for x in leaves]
    o, lse = tessera.attention(*leaves, precision="e4m3", return_lse=True, **features)
    o_there, lse_there = tessera.attention(*there, precision="e4m3", return_lse=True, **features)
    assert o_there.dtype is torch.bfloat16
    assert error(o_there, o) < 0.04 and (lse_there.cpu() - lse).abs().max() < 0.04
    with torch.no_grad():
        assert torch.equal(tessera.attention(*there, precision="e4m3", **features), o_there)
    dout = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, dout), torch.autograd.grad(o_there, there, dout.cuda())
    for name, x, y in zip("qkv", *gradients, strict=True):
        assert error(y, x) < 0.05, name


def test_packed() -> None:
    at = torch.tensor([0, 140, 143, 300], dtype=torch.int32)
    leaves = [x[0].requires_grad_() for x in tensors(300, 300)]
    there = [x.detach().cuda().requires_grad_() for x in leaves]
    given: dict[str, Any] = {"causal": True, "precision": "e4m3", "max_seqlen_q": 157}
    o = tessera.attention(*leaves, cu_seqlens_q=at, **given)
    o_there = tessera.attention(*there, cu_seqlens_q=at.cuda(), **given)
    assert error(o_there, o) < 0.04
    dout = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, dout), torch.autograd.grad(o_there, there, dout.cuda())
    for name, x, y in zip("qkv", *gradients, strict=True):
        assert error(y, x) < 0.05, name


def test_fp16_and_other_streams_and_graphs() -> None:
    q, k, v = (x.half().cuda() for x in tensors())
    expected = tessera.attention(q, k, v, precision="e4m3")
    assert expected.dtype is torch.float16
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        o = tessera.attention(q, k, v, precision="e4m3")
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(o, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tessera.attention(q, k, v, precision="e4m3")
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)


def test_compiled() -> None:
    q, k, v = (x.cuda().requires_grad_() for x in tensors())

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, precision="e4m3").float().square().sum()
        return result

    eager, compiled = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (loss, torch.compile(loss, fullgraph=True)))
    for x, y in zip(eager, compiled, strict=True):
        assert error(y, x) < 0.01


def test_refusals() -> None:
    q, k, v = (x.cuda() for x in tensors())
    with pytest.raises(NotImplementedError, match="takes q, k and v of e4m3; they are i8"):
        tessera.attention(q, k, v, precision="int8")
    with pytest.raises(NotImplementedError, match="q.dtype = float32: on a GPU it must be bfloat16 or float16"):
        tessera.attention(q.float(), k.float(), v.float(), precision="e4m3")
    with pytest.raises(NotImplementedError, match="takes v in tiles"):
        tessera.quantize(q, k, v).attention()
