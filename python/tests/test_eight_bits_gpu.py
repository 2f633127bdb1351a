"""8 bits on a GPU: the bits of a CPU where they are promised, and bounds where tensor cores round more."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tessera
from tessera.compat import flash_attn_interface as fa3

E4M3 = torch.float8_e4m3fn


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
        # A scale that torch makes is not the same on both: its GPU divides by a constant with another rounding.
        ((q, k, v), {"dtype": "int8", "v_scale": torch.rand(2, 2, 128) * 0.01 + 0.02}),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_scores_of_int8(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Products are exact: beside a CPU only weights and results are rounded."""
    q, k, v = (x.to(dtype) for x in tensors(dims=dims))
    here, there = (
        tessera.attention(*map(place, (q, k, v)), causal=True, precision="int8", return_lse=True)
        for place in (lambda x: x, on_device)
    )
    assert there[0].dtype is dtype and error(there[0], here[0]) < 0.005
    assert (there[1].cpu() - here[1]).abs().max() < 1e-3


def test_refusals() -> None:
    q, k, v = (x.cuda() for x in tensors())
    with pytest.raises(NotImplementedError, match="takes q and k of i8 and v of bf16; they are i8 and i8"):
        tessera.quantize(q, k, v, dtype="int8", v_scale="channel").attention()
    with pytest.raises(NotImplementedError, match="q.dtype = float32: on a GPU it must be bfloat16 or float16"):
        tessera.attention(q.float(), k.float(), v.float(), precision="e4m3")
    low = [x[..., :72].to(E4M3) for x in (q, k, v)]
    ones = [torch.ones(2, 2, device="cuda")] * 3
    with pytest.raises(NotImplementedError, match="takes multiples of 16 up to"):
        tessera.scaled_attention(*(x.contiguous() for x in low), *ones)
    wide = [x[..., 8:72].to(E4M3) for x in (q, k)]
    with pytest.raises(NotImplementedError, match="the problem is unaligned"):
        tessera.scaled_attention(*wide, v.to(E4M3)[..., 8:72], *ones)


# ---- values in rows, which become tiles on the way


def eight_bits(dims: tuple[int, int] = (128, 128), rows: int = 300, keys: int = 700) -> list[Tensor]:
    """q, k and v, and a factor of each for a sequence and head."""
    low = [x.to(E4M3) for x in tensors(rows, keys, dims=dims)]
    return [*low, *(0.5 + 0.5 * torch.rand(2, 2) for _ in range(3))]


def check(there: Any, here: Any) -> None:
    """(o, lse) of a GPU beside those of a CPU."""
    assert there[0].dtype is torch.bfloat16
    assert error(there[0], here[0]) < 0.04 and (there[1].cpu() - here[1]).abs().max() < 0.04


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window": (90, 10)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 16), (128, 64), (96, 208)],
    ids=str,
)
def test_values_in_rows(dims: tuple[int, int], features: dict[str, Any]) -> None:
    """As on a CPU; and where tiles have as many columns, bit for bit as of tiles."""
    here = eight_bits(dims)
    there = [x.cuda() for x in here]
    result = tessera.scaled_attention(*there, return_lse=True, **features)
    check(result, tessera.scaled_attention(*here, return_lse=True, **features))
    assert all(map(torch.equal, tessera.scaled_attention(*there, return_lse=True, **features), result))
    if "softcap" in features or dims not in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        return
    q, k, v, *factors = there
    # bfloat16 holds each element, and a scale of 1 changes none.
    made = tessera.quantize(v=v.bfloat16(), v_scale=torch.ones((), device="cuda"), v_tiles=True)
    tiles = tessera.scaled_attention(q, k, made.v, *factors, head_dim_v=dims[1], return_lse=True, **features)
    assert all(map(torch.equal, tiles, result))


def test_values_in_rows_of_any_strides() -> None:
    q, k, v, *factors = (x.cuda() for x in eight_bits())
    expected = tessera.scaled_attention(q, k, v, *factors)
    apart = torch.stack((v, v), 3)[..., 0, :]
    outside = v.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (apart, outside):
        assert not other.is_contiguous()
        assert torch.equal(tessera.scaled_attention(q, k, other, *factors), expected)
    one = v[:, :, :1].expand(-1, -1, 2, -1)
    same = tessera.scaled_attention(q, k, one.contiguous(), *factors)
    assert torch.equal(tessera.scaled_attention(q, k, one, *factors), same)


@pytest.mark.parametrize("v_scale", ["tensor", "channel", "block"])
def test_values_in_rows_by_every_scale(v_scale: str) -> None:
    wide = tensors()
    here = tessera.quantize(*wide, v_scale=v_scale, v_block=512)
    there = tessera.quantize(*map(on_device, wide), v_scale=v_scale, v_block=512)
    assert there.v.shape == here.v.shape == wide[2].shape
    check(there.attention(causal=True, return_lse=True), here.attention(causal=True, return_lse=True))


def test_packed_values_in_rows() -> None:
    """A sequence of nothing among them, and one that ends where a tile does."""
    q, k, v, *_ = (x[0] for x in eight_bits(rows=300, keys=700))
    at_q = torch.tensor([0, 140, 143, 150, 300], dtype=torch.int32)
    at_k = torch.tensor([0, 256, 256, 300, 700], dtype=torch.int32)
    factors = [0.5 + 0.5 * torch.rand(4, 2) for _ in range(3)]
    lengths = {"max_seqlen_q": 150, "max_seqlen_k": 400}
    here = tessera.scaled_attention(q, k, v, *factors, cu_seqlens_q=at_q, cu_seqlens_k=at_k, return_lse=True, **lengths)
    there = tessera.scaled_attention(
        q.cuda(), k.cuda(), v.cuda(), *map(on_device, factors), cu_seqlens_q=at_q.cuda(), cu_seqlens_k=at_k.cuda(),
        return_lse=True, **lengths,
    )  # fmt: skip
    assert error(there[0], here[0]) < 0.04
    assert torch.equal(there[1].cpu().isinf(), here[1].isinf())
    finite = here[1].isfinite()
    assert (there[1].cpu() - here[1])[finite].abs().max() < 0.04


def test_values_in_rows_on_other_streams_and_in_graphs_and_compiled() -> None:
    given = [x.cuda() for x in eight_bits()]
    expected = tessera.scaled_attention(*given, causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        o = tessera.scaled_attention(*given, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(o, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tessera.scaled_attention(*given, causal=True)
    o.zero_()
    given[2].copy_(given[2].flip(0))  # the tiles are made anew
    graph.replay()
    assert torch.equal(o, tessera.scaled_attention(*given, causal=True)) and not torch.equal(o, expected)
    compiled = torch.compile(lambda *x: tessera.scaled_attention(*x, causal=True), fullgraph=True)
    assert torch.equal(compiled(*given), o)


def test_flash_attention_3() -> None:
    """Every function that takes float8, beside a CPU."""
    q, k, v, *descales = eight_bits(rows=300, keys=300)
    names = ("q_descale", "k_descale", "v_descale")
    at = torch.tensor([0, 300, 600], dtype=torch.int32)
    used = torch.tensor([100, 300], dtype=torch.int32)
    qkv = torch.cat((q, k, v), 2)

    def results(place: Any) -> list[Any]:
        low, factors = [place(x) for x in (q, k, v)], dict(zip(names, map(place, descales), strict=True))
        more = {"causal": True, "return_attn_probs": True, **factors}
        packed = [x.flatten(0, 1) for x in low]
        return [
            fa3.flash_attn_func(*low, **more),
            fa3.flash_attn_qkvpacked_func(place(qkv), num_heads_q=4, **more),
            fa3.flash_attn_varlen_func(*packed, place(at), place(at), 300, 300, **more),
            fa3.flash_attn_varlen_func(
                *low, None, None, 300, 300, seqused_k=place(used), return_attn_probs=True, **factors
            ),
        ]  # fmt: skip

    for there, here in zip(results(on_device), results(lambda x: x), strict=True):
        check(there, here)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_factors_that_are_missing(name: str) -> None:
    q, k, v, *descales = (x.cuda() for x in eight_bits())
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    for wrong, said in ((None, "is None: must be float32"), (torch.ones(2, 1, device="cuda"), "of shape \\(2, 1\\)")):
        with pytest.raises(ValueError, match=f"^{name}_descale .*{said}"):
            fa3.flash_attn_func(q, k, v, **given | {f"{name}_descale": wrong})
