"""tessera.quantize: bit by bit where torch says them, else by the values that elements and scales stand for (S14)."""

import dataclasses
import inspect
import itertools
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import reference
import tessera
from tessera.arguments import Quantization
from tessera.torch import quantize as torch_quantize

E4M3 = torch.float8_e4m3fn
KINDS = (E4M3, torch.int8)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {E4M3: 448.0, torch.int8: 127.0}


@pytest.fixture(autouse=True)
def on_a_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("bits are compared with those of a CPU elsewhere")


def tensors(
    dtype: torch.dtype = torch.float32,
    rows: int = 19,
    keys: int = 150,
    dims: tuple[int, int] = (32, 40),
    batch: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of many sizes, and a few rows of zeros."""
    shapes = ((batch, rows, 4, dims[0]), (batch, keys, 2, dims[0]), (batch, keys, 2, dims[1]))
    q, k, v = (torch.randn(shape) * torch.randn(shape[:-1])[..., None].exp() for shape in shapes)
    k[:, 3] = 0
    q[:, 2, 1] = 0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = LIMITS[dtype]
    return (x.round() if dtype is torch.int8 else x).clamp(-limit, limit).to(dtype)


def written(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, factor) that the library writes."""
    limit = LIMITS[dtype]
    return torch.where(amax == 0, 1.0, amax / limit), torch.where(amax == 0, 1.0, torch.full_like(amax, limit) / amax)


def by_key(scale: Tensor, block: int, keys: int) -> Tensor:
    return scale.repeat_interleave(block, 2)[..., :keys].transpose(1, 2)[..., None]


def bits(x: Any) -> Tensor:
    result: Tensor = x.view(torch.uint8)
    return result


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_bits(dtype: torch.dtype, wide: torch.dtype) -> None:
    """The element is the nearest of number times factor."""
    q, k, v = tensors(wide)
    k_block, v_block = random.randint(1, 200), random.randint(1, 200)
    made = tessera.quantize(q, k, v, dtype=dtype, k_block=k_block, v_block=v_block)
    assert made.q.dtype is made.k.dtype is made.v.dtype is dtype
    scale, factor = written(q.float().abs().amax(-1).transpose(1, 2), dtype)
    assert torch.equal(made.q_scale, scale)
    assert torch.equal(bits(made.q), bits(cast(q.float() * factor.transpose(1, 2)[..., None], dtype)))
    for x, result, result_scale, block in ((k, made.k, made.k_scale, k_block), (v, made.v, made.v_scale, v_block)):
        amax = torch.stack([part.float().abs().amax((1, 3)) for part in x.split(block, 1)], -1)
        scale, factor = written(amax, dtype)
        assert torch.equal(result_scale, scale)
        assert torch.equal(bits(result), bits(cast(x.float() * by_key(factor, block, x.shape[1]), dtype)))
    assert (made.k_block, made.v_block, made.head_dim_v) == (k_block, v_block, None)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_scales_that_are_given_or_computed(dtype: torch.dtype) -> None:
    q, k, v = tensors()
    limit = LIMITS[dtype]

    def largest(x: Tensor, way: str) -> Tensor:
        by_head = x.abs().unflatten(2, (2, -1))
        return by_head.amax({"tensor": (0, 1, 2, 3, 4), "head": (1, 3, 4), "channel": (1, 3)}[way])

    def spread(scale: Tensor, heads: int) -> Tensor:
        if scale.dim() < 2:
            return scale
        return scale[:, None] if scale.dim() == 3 else scale.repeat_interleave(heads // 2, 1)[:, None, :, None]

    for way in ("tensor", "head", "channel"):
        names = ("v",) if way == "channel" else ("q", "k", "v")
        made = tessera.quantize(q, k, v, dtype=dtype, **{f"{name}_scale": way for name in names})
        given = {f"{name}_scale": getattr(made, f"{name}_scale") for name in names}
        again = tessera.quantize(q, k, v, dtype=dtype, **given)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if name not in names:
                continue
            scale, result = getattr(made, f"{name}_scale"), getattr(made, name)
            torch.testing.assert_close(scale.squeeze(), largest(x, way) / limit, rtol=1e-6, atol=0)
            assert torch.equal(bits(result), bits(cast(x * (1 / spread(scale, x.shape[2])), dtype)))
            assert torch.equal(bits(getattr(again, name)), bits(result))
        assert again.k_block == (0 if "k" in names else 128) and again.v_block == 0
    zeros = tessera.quantize(v=torch.zeros(1, 5, 2, 8), v_scale="channel")
    assert torch.equal(zeros.v_scale, torch.ones(1, 2, 8)) and not bits(zeros.v).any()


def test_given_scales_are_not_written() -> None:
    q, k, v = tensors()
    scale = torch.full((2, 2), 0.5)
    tessera.quantize(q, k, v, q_scale=scale, k_scale=scale, v_scale=scale)
    assert torch.equal(scale, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("tiles", (False, True))
def test_packed(tiles: bool) -> None:
    """A sequence becomes what it becomes alone."""
    starts_q, starts_k = [0, 5, 5, 40, 73], [0, 130, 134, 134, 500]
    q, k, v = torch.randn(73, 4, 32), torch.randn(500, 2, 32), torch.randn(500, 2, 40)
    at_q, at_k = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    for k_block, v_block, ways in ((32, 64, {}), (50, 128, {"v_scale": "channel"}), (7, 13, {"k_scale": "head"})):
        options: dict[str, Any] = {"k_block": k_block, "v_block": v_block, "v_tiles": tiles, **ways}
        made = tessera.quantize(q, k, v, cu_seqlens_q=at_q, cu_seqlens_k=at_k, **options)
        assert made.q_scale.shape == (1, 4, 73)
        for b in range(4):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            alone = tessera.quantize(q[None, rows], k[None, keys], v[None, keys], **options)
            assert torch.equal(bits(made.q[rows]), bits(alone.q[0])) and torch.equal(
                bits(made.k[keys]), bits(alone.k[0])
            )
            assert torch.equal(made.q_scale[0, :, rows], alone.q_scale[0])
            for scale, one, block in ((made.k_scale, alone.k_scale, k_block), (made.v_scale, alone.v_scale, v_block)):
                if one.shape[1:] == scale.shape[1:]:  # by head or channel
                    assert torch.equal(scale[b], one[0])
                else:
                    first = starts_k[b] // block + b
                    assert torch.equal(scale[:, first : first + one.shape[2]], one[0])
            first = starts_k[b] // 128 + b
            values = made.v[:, first : first + alone.v.shape[2]] if tiles else made.v[keys]
            assert torch.equal(bits(values), bits(alone.v[0]))
        o, lse = made.attention(causal=True, dtype=torch.float32, return_lse=True)
        exact, _ = tessera.attention(q, k, v, cu_seqlens_q=at_q, cu_seqlens_k=at_k, causal=True, return_lse=True)
        assert (o - exact).norm() < 0.1 * exact.norm() and lse.shape == (4, 73)


def test_tiles() -> None:
    """Where the elements of v stand (S14), one by one."""
    for keys, columns, padded in ((300, 40, 64), (128, 96, 96), (5, 130, 192), (257, 256, 256)):
        v = torch.randn(2, keys, 2, columns)
        rows = tessera.quantize(v=v, v_scale="channel")
        made = tessera.quantize(v=v, v_scale="channel", v_tiles=True)
        assert made.head_dim_v == columns and made.v.shape == (2, 2, -(-keys // 128), 4, padded + 8, 32)
        tile = bits(made.v)
        for _ in range(200):
            b, j, h, c = (random.randrange(n) for n in (2, tile.shape[2] * 128, 2, padded))
            expected = int(bits(rows.v)[b, j, h, c]) if j < keys and c < columns else 0
            half, place = (j // 16 ^ c // 4) & 1, j & 1 | (j & 6) << 1 | (j & 8) >> 2
            assert tile[b, h, j // 128, j % 128 // 32, c, 16 * half + place] == expected
        ones = tile[..., padded:, :]
        assert ((ones == 0x38) | (ones == 0)).all() and (ones == 0x38).any()
        back = torch_quantize.values_in_rows(made.v, columns, keys, None)
        assert torch.equal(bits(back), bits(rows.v))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool) -> Tensor:
    """x in double, the row i of sequence b at position first[b] + i."""
    at = first[:, None] + torch.arange(x.shape[1])
    c, s = (table.double()[at][:, :, None] for table in (cos, sin))
    n = 2 * cos.shape[1]
    y = x.double().clone()
    a, b = (y[..., 0:n:2], y[..., 1:n:2]) if interleaved else (y[..., : n // 2], y[..., n // 2 : n])
    turned = a * c - b * s, b * c + a * s
    if interleaved:
        y[..., 0:n:2], y[..., 1:n:2] = turned
    else:
        y[..., : n // 2], y[..., n // 2 : n] = turned
    return y


def hadamard(x: Tensor, block: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.double)
    while matrix.shape[0] < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double), matrix)
    return (x.unflatten(-1, (-1, block)) @ matrix / block**0.5).flatten(-2)


def assert_rounded(elements: Tensor, scale: Tensor, exact: Tensor) -> None:
    """Every element times its scale is exact but for half a step of its type; scales are the largest number's."""
    value = elements.double() * scale.double()
    size = exact.abs()
    step = size * 2**-4 if elements.dtype is E4M3 else torch.zeros_like(size)
    least = scale.double() * (2**-10 if elements.dtype is E4M3 else 0.5)
    error = (value - exact).abs()
    assert (error <= torch.maximum(step, least.expand_as(step)) * 1.0001 + 1e-6 * size.amax()).all()


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_step(dtype: torch.dtype, interleaved: bool) -> None:
    q, k, v = tensors()
    cos, sin = torch.rand(300, 12).cos(), torch.rand(300, 12).sin()
    first = torch.tensor([0, random.randrange(100)], dtype=torch.int32)
    signs = torch.where(torch.rand(32) < 0.5, -1.0, 1.0)
    mean, shift = torch.randn(2, 2, 32), torch.randn(2, 2, 40)
    made = tessera.quantize(
        q, k, v, dtype=dtype, hadamard=16, signs=signs, k_mean=mean, v_shift=shift, rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved, rotary_seqlens=first,
    )  # fmt: skip
    q_turned = rotated(q, cos, sin, first + 150 - 19, interleaved)
    k_turned = rotated(k, cos, sin, first, interleaved)
    torch.testing.assert_close(
        made.score_shift.double(), torch.einsum("bihd,bhd->bhi", q_turned, mean.double().repeat_interleave(2, 1)),
        rtol=1e-5, atol=1e-4,
    )  # fmt: skip
    exact = hadamard(q_turned * signs, 16)
    assert_rounded(made.q, made.q_scale.transpose(1, 2)[..., None], exact)
    assert_rounded(made.k, by_key(made.k_scale, 128, 150), hadamard((k_turned - mean.double()[:, None]) * signs, 16))
    assert_rounded(made.v, by_key(made.v_scale, 512, 150), v.double() - shift.double()[:, None])
    assert made.v_shift is shift
    o, lse = made.attention(dtype=torch.float32, softmax_scale=0.005, return_lse=True)
    # Attention of what they were rounded to, score_shift as one more column: beside that of the originals a row of
    # large scores may be any distance off.
    values = made.v.double() * by_key(made.v_scale, 512, 150).double() + shift.double()[:, None]
    low_q = made.q.double() * made.q_scale.double().transpose(1, 2)[..., None]
    low_k = made.k.double() * by_key(made.k_scale, 128, 150).double()
    low_q = torch.cat((low_q, made.score_shift.double().transpose(1, 2)[..., None]), -1)
    low_k = torch.cat((low_k, torch.ones_like(low_k[..., :1])), -1)
    full, full_lse = reference.dense(low_q, low_k, values, softmax_scale=0.005)
    assert (o - full).norm() < 1e-4 * full.norm() and (lse - full_lse).abs().max() < 1e-3

    # Queries of one position, and alone: then they have the positions.
    one = tessera.quantize(q, dtype=dtype, rotary_cos=cos, rotary_sin=sin, rotary_seqlens=first, rotary_constant_q=True)
    at = torch.stack([rotated(q[:, i : i + 1], cos, sin, first, False)[:, 0] for i in range(19)], 1)
    assert_rounded(one.q, one.q_scale.transpose(1, 2)[..., None], at)


def test_smoothing_changes_nothing_but_rounding() -> None:
    """Keys and values with means: o and lse come back as they were."""
    q, k, v = (torch.randn(2, 100, 2, 64) for _ in range(3))
    k, v = k + 8 * torch.randn(64), v + 8
    exact, exact_lse = tessera.attention(q, k, v, return_lse=True)
    errors = []
    for mean, shift in ((None, None), (k.mean(1), v.mean(1))):
        o, lse = tessera.quantize(q, k, v, k_mean=mean, v_shift=shift).attention(dtype=torch.float32, return_lse=True)
        errors.append((float((o - exact).norm()), float((lse - exact_lse).norm())))
    assert errors[1][0] < errors[0][0] / 3 and errors[1][1] < errors[0][1] / 2


def test_each_alone() -> None:
    q, k, v = tensors()
    options: dict[str, Any] = {"hadamard": 32, "k_mean": torch.randn(2, 2, 32)}
    whole = tessera.quantize(q, k, v, **options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        more = {} if name == "v" else options
        alone = tessera.quantize(**{name: x}, **more)
        for field in (name, f"{name}_scale", *(["score_shift"] if name == "q" else [])):
            assert torch.equal(bits(getattr(alone, field)), bits(getattr(whole, field))), field
        others = [getattr(alone, other) for other in ("q", "k", "v") if other != name]
        assert others == [None, None]
    at = torch.tensor([0, 4, 19], dtype=torch.int32)
    both = tessera.quantize(q[0], cu_seqlens_q=at), tessera.quantize(k=k[0, :19], cu_seqlens_k=at)
    assert [made.cu_seqlens_k is at for made in both] == [True, True]


def test_v_of_16_bits_stays() -> None:
    q, k, v = tensors(torch.bfloat16)
    made = tessera.quantize(q, k, v, dtype=torch.int8, v_scale=None)
    assert made.v is v and made.v_scale is None and made.v_block == 0
    o = made.attention(causal=True)
    low_q = made.q.double() * made.q_scale.double().transpose(1, 2)[..., None]
    low_k = made.k.double() * by_key(made.k_scale, 128, k.shape[1]).double()
    rounded, _ = reference.dense(low_q, low_k, v.double(), causal=True)
    assert o.dtype is torch.bfloat16 and (o - rounded).norm() < 0.01 * rounded.norm()
    assert torch.equal(tessera.quantize(q, k, dtype="int8").attention(v=v, causal=True), o)


def test_tiles_have_the_bits_of_rows() -> None:
    """On a CPU; also of packed sequences (test_packed)."""
    q, k, v = tensors()
    for options in ({}, {"v_scale": "channel"}, {"v_shift": torch.randn(2, 2, 40)}):
        rows, tiles = (tessera.quantize(q, k, v, v_tiles=x, **options) for x in (False, True))
        for features in ({}, {"causal": True, "softcap": 3.0}):
            one, other = (x.attention(return_lse=True, **features) for x in (rows, tiles))
            assert all(map(torch.equal, one, other))
    assert "v_tiles" in tiles.explain(causal=True)


def test_strides_and_signs() -> None:
    q, k, v = tensors()
    expected = tessera.quantize(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        for other in (turned, torch.cat([x, x], -1)[..., : x.shape[-1]], torch._neg_view(-x)):
            made = tessera.quantize(**{"q": q, "k": k, "v": v} | {name: other})
            assert torch.equal(bits(getattr(made, name)), bits(getattr(expected, name)))


def test_sequences_of_none() -> None:
    for rows, keys, batch in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)):
        q, k, v = (
            x[:batch] for x in (torch.randn(2, rows, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, keys, 2, 8))
        )
        for options in ({}, {"v_tiles": True}, {"q_scale": "head", "k_scale": "tensor", "v_scale": "channel"}):
            o = tessera.quantize(q, k, v, **options).attention()
            assert o.shape == q.shape and not o.any()


# ---- torch's machinery


def test_opcheck() -> None:
    q, k, v = tensors()
    none = (None,) * 3
    mean, shift, signs = torch.randn(2, 2, 32), torch.randn(2, 2, 40), torch.ones(32)
    table = torch.rand(200, 8)
    tail = (0, 0, 128, 64, 32)
    for arguments in (
        (q, k, v, *none, mean, shift, signs, None, None, table, table, None, *tail, False, False, False, torch.int8),
        (q, k, None, torch.ones(2, 2), torch.ones(1), *(None,) * 9, *tail, False, False, False, torch.int8),
    ):
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.tessera.quantize, arguments, test_utils=tests)
    arguments = (q, k, v, *none, *none, *none, None, None, *tail, True, False, False, E4M3)
    torch.library.opcheck(torch.ops.tessera.quantize, arguments, test_utils=("test_faketensor",))


def test_compiled() -> None:
    """One graph from wide tensors to o, with the bits of the direct calls."""
    torch._dynamo.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = tessera.quantize(q * 2, k, v, hadamard=32, v_scale="channel", v_tiles=True)
        result: Tensor = made.attention(causal=True, dtype=torch.float32)
        return result + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for keys in (40, 150, 290):
        q, k, v = tensors(keys=keys)
        assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_fake_tensors() -> None:
    q, k, v = tensors()
    whole = tessera.quantize(q, k, v, v_tiles=True, k_mean=torch.randn(2, 2, 32))
    with FakeTensorMode() as mode:
        fake = tessera.quantize(
            *map(mode.from_tensor, (q, k, v)), v_tiles=True, k_mean=mode.from_tensor(torch.randn(2, 2, 32))
        )
        assert fake.attention().shape == (2, 19, 4, 40)
    for x, y in zip(whole, fake, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) if isinstance(x, Tensor) else x == y


def test_there_are_no_gradients() -> None:
    q, k, v = tensors()
    with pytest.raises(
        NotImplementedError, match="k requires a gradient: quantize has none; .* or tessera.attention with"
    ):
        tessera.quantize(q, k.requires_grad_(), v)


# ---- wrong use

Q, K, V = torch.ones(2, 5, 4, 16), torch.ones(2, 7, 2, 16), torch.ones(2, 7, 2, 8)
AT = torch.tensor([0, 2, 5], dtype=torch.int32)
TABLE = torch.ones(9, 4)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None, "k": None, "v": None}, ValueError, "q, k and v are None: at least one of them is quantised"),
    ({"k": 3}, TypeError, "k is of type 'int', but q is a torch tensor"),
    ({"q": Q.double()}, ValueError, "q.dtype = float64: must be float32, bfloat16 or float16"),
    ({"q": Q.half()}, ValueError, "k.dtype = float32, but q.dtype = float16: they must be the same"),
    ({"q": Q[0]}, ValueError, "q has shape (5, 4, 16): must be (batch, seqlen, heads, head_dim); with cu_seqlens_q"),
    ({"k": K[..., :8]}, ValueError, "k has shape (2, 7, 2, 8): must be (2, 7, 2, 16)"),
    ({"v": V[:, :3]}, ValueError, "v has shape (2, 3, 2, 8): must be (2, 7, 2, 8)"),
    ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "q: stride of the last dimension = 4: must"),
    ({"dtype": torch.float16}, ValueError, "dtype = torch.float16: must be torch.float8_e4m3fn or torch.int8"),
    ({"q_scale": "row"}, ValueError, "q_scale = 'row': must be 'token', 'head', 'tensor', or float32 scales"),
    ({"q_scale": None}, ValueError, "q_scale = None: must be 'token', 'head', 'tensor', or float32 scales"),
    ({"v_scale": "token"}, ValueError,
     "v_scale = 'token': must be 'block', 'channel', 'head', 'tensor', or float32 scales, or None"),
    ({"k_scale": 2.0}, TypeError, "k_scale is of type 'float', but q is a torch tensor"),
    ({"q_scale": torch.ones(2, 4, 5)}, ValueError,
     "q_scale has shape (2, 4, 5): must be () or (batch, num_heads_k) = (2, 2)"),
    ({"k_scale": torch.ones(2)}, ValueError, "k_scale has shape (2,): must be () or (batch, num_heads_k) = (2, 2)"),
    ({"v_scale": torch.ones(2, 2).half()}, ValueError, "v_scale.dtype = float16: must be float32"),
    ({"q_scale": "head", "hadamard": 16}, ValueError,
     "q_scale = 'head' together with hadamard = 16: must be 'token' or float32 scales"),
    ({"k_scale": "tensor", "rotary_cos": TABLE, "rotary_sin": TABLE}, ValueError,
     "k_scale = 'tensor' together with rotary_cos: must be 'block' or float32 scales"),
    ({"v_scale": None}, ValueError, "v_scale is None, but v.dtype = torch.float32: what stays as it is has 16 bits"),
    ({"k_block": 0}, ValueError, "k_block = 0: must be 1 or more keys"),
    ({"v_block": 1 << 40}, ValueError, "v_block = 1099511627776: must lie in [1, 536870912]"),
    ({"v_tiles": True, "dtype": torch.int8}, ValueError,
     "v_tiles = True together with dtype = int8: tiles are of float8_e4m3fn"),
    ({"v": torch.ones(2, 7, 2, 300), "v_tiles": True}, ValueError, "head_dim_v = 300: v_tiles have up to 256 columns"),
    ({"hadamard": 12}, ValueError, "hadamard = 12: must be 0, or a power of two up to 256 that divides head_dim = 16"),
    ({"hadamard": 1.5}, TypeError, "hadamard = 1.5: must be an integer"),
    ({"signs": torch.ones(8)}, ValueError, "signs has shape (8,): must be (head_dim,)"),
    ({"k_mean": torch.ones(2, 2, 8)}, ValueError,
     "k_mean has shape (2, 2, 8): must be (batch, num_heads_k, head_dim) = (2, 2, 16)"),
    ({"v_shift": torch.ones(2, 8)}, ValueError,
     "v_shift has shape (2, 8): must be (batch, num_heads_k, head_dim_v) = (2, 2, 8)"),
    ({"rotary_cos": TABLE}, ValueError, "rotary_sin is None: a tensor is required"),
    ({"rotary_cos": TABLE[:4], "rotary_sin": TABLE[:4]}, ValueError, "rotary.positions = 4"),
    ({"rotary_seqlens": AT}, ValueError, "rotary_seqlens is given, but rotary_cos is None"),
    ({"cu_seqlens_k": AT}, ValueError, "cu_seqlens_k is given, but cu_seqlens_q is None: packed tensors need"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is given, but cu_seqlens_q is None"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        tessera.quantize(**{"q": Q, "k": K, "v": V} | arguments)


def test_wrong_tiles() -> None:
    """What `scaled_attention` says of v in tiles."""
    made = tessera.quantize(Q, K, V, v_tiles=True)
    v = made.v
    for given, error, text in (
        ({"head_dim_v": None}, ValueError, "v has shape (2, 2, 1, 4, 72, 32): must be (batch, seqlen, heads,"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v = 0: must lie in [1, 256], the columns of tiles, or be None"),
        ({"head_dim_v": "8"}, TypeError, "head_dim_v = '8': must be an integer, or None where v lies in rows"),
        ({"head_dim_v": 65}, ValueError,
         "v has shape (2, 2, 1, 4, 72, 32): must be (batch, num_heads_k, tiles, 4, rows, 32) = (2, 2, 1, 4, 104, 32), "
         "as head_dim_v = 65 says that it lies in tiles"),
        ({"v": bits(v)}, ValueError, "v.dtype = torch.uint8: must be"),
        ({"v": v.view(torch.int8)}, ValueError, "v.dtype = int8: must be q's type, float8_e4m3fn, or bfloat16"),
        ({"v": v[:, :1]}, ValueError, "v has shape (2, 1, 1, 4, 72, 32): must be (batch, num_heads_k, tiles"),
        ({"v": v.transpose(4, 5).contiguous().transpose(4, 5)}, ValueError, "v: stride of dimension 5 = 72: must be 1"),
        ({"v": torch.zeros(2 * 2 * 9216 + 8, dtype=torch.uint8)[8:].view(E4M3).view_as(v)}, ValueError,
         "v begins at no multiple of 16 bytes: must, as it lies in tiles"),
    ):  # fmt: skip
        for function in (made.attention, made.explain):
            with pytest.raises(error, match=re.escape(text)):
                function(**given)


def test_signature_agrees_with_one_description(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(tessera.quantize).parameters
    names = [field.name for field in dataclasses.fields(Quantization)]
    assert list(parameters) == ["q", "k", "v", *names]
    arrived: list[Quantization] = []
    monkeypatch.setattr(torch_quantize, "quantize", lambda q, k, v, given: arrived.append(given))
    values = {name: object() for name in names}
    tessera.quantize(Q, K, V, **values)
    assert {name: getattr(arrived[0], name) for name in names} == values
    assert tessera.Quantized._fields[:3] == ("q", "k", "v")
    scaled = inspect.signature(tessera.scaled_attention).parameters
    assert set(tessera.Quantized._fields) <= set(scaled)


def test_many_shapes() -> None:
    """Any sizes: rows and tiles agree, and attention is near that of the wide tensors."""
    for _, (tiles, group) in itertools.product(range(3), itertools.product((False, True), (1, 3))):
        d, dv, n, m = (random.randint(1, x) for x in (140, 256, 40, 300))
        q, k, v = torch.randn(1, n, 2 * group, d), torch.randn(1, m, 2, d), torch.randn(1, m, 2, dv)
        made = tessera.quantize(q, k, v, v_tiles=tiles, v_block=random.choice([32, 128, 512]), hadamard=d & -d)
        exact = tessera.attention(q, k, v)
        assert (made.attention(dtype=torch.float32) - exact).norm() < 0.12 * exact.norm()
