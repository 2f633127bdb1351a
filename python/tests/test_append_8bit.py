"""Appends to caches of 8 bits: every new row is the nearest elements of its values over their scale, nothing else is
touched; attention sees what is stored."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

import tessera
import tessera.torch  # the operators

B, HEADS, HEADS_K, D, DV, CAPACITY = 3, 4, 2, 64, 48, 48
TYPES = (torch.float8_e4m3fn, torch.int8)
SCALES = ("tensor", "head", "token")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
VALUES = E4M3[E4M3.isfinite()].unique()  # sorted


def assert_nearest(elements: Tensor, wanted: Tensor) -> None:
    """wanted: in double, before it is rounded, or cut off at the type's ends."""
    largest = LARGEST[elements.dtype]
    wanted = wanted.cpu().clamp(-largest, largest)
    found = elements.cpu().double()
    values = VALUES if elements.dtype is torch.float8_e4m3fn else torch.arange(-127.0, 128.0, dtype=torch.double)
    above = torch.searchsorted(values, wanted.contiguous()).clamp(1, len(values) - 1)
    best = torch.minimum((values[above] - wanted).abs(), (wanted - values[above - 1]).abs())
    # fp32 may lie on the other side of the middle between two elements.
    assert bool(((found - wanted).abs() <= best + 2e-6 * wanted.abs() + 1e-9).all())


class Rows:
    """A cache of 8 bits in which nothing is yet, its scales, and where rows go."""

    def __init__(self, dtype: torch.dtype, scales: str, device: str, page_size: int | None) -> None:
        plain = caches.random_cache(B, CAPACITY, page_size, HEADS_K, (D, DV), torch.float32, device)
        self.cache = plain._replace(k=plain.k.mul(9).to(dtype), v=plain.v.mul(9).to(dtype))
        slots, self.scales = plain.k.shape[:3], scales
        shapes = {"tensor": (2,), "head": (2, B, HEADS_K), "token": (*slots, 2)}
        numbers = torch.rand(shapes[scales], device=device) / 30 + 0.02
        self.k_scale, self.v_scale = numbers.unbind(-1 if scales == "token" else 0)

    def all(self) -> tuple[Tensor, ...]:
        return (*(x.view(torch.uint8) for x in (self.cache.k, self.cache.v)), self.k_scale, self.v_scale)

    def scale_arguments(self) -> dict[str, Tensor]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def check(self, before: tuple[Tensor, ...], written: list[tuple[int, int, Tensor, Tensor]]) -> None:
        """written: sequence, slot, and what was to be stored there, in double: (heads, columns) of k and of v."""
        untouched = [x.clone() for x in self.all()]
        for b, slot, *rows in written:
            at = int(self.cache.slots(b)[slot])
            place = (at // self.cache.k.shape[1], at % self.cache.k.shape[1])
            for i, (x, scale) in enumerate(((self.cache.k, self.k_scale), (self.cache.v, self.v_scale))):
                row = rows[i].double()
                factor = {"tensor": scale, "head": scale[b % len(scale)] if scale.dim() else scale, "token": scale}[
                    self.scales
                ]
                factor = factor[place] if self.scales == "token" else factor
                if self.scales == "token":
                    exact = row.abs().amax(-1) / LARGEST[x.dtype]
                    torch.testing.assert_close(factor.double(), exact.to(factor.device), rtol=1e-6, atol=0)
                    untouched[2 + i][place] = before[2 + i][place]
                assert_nearest(x[place], row / factor.double().reshape(-1, 1).to(row.device))
                untouched[i][place] = before[i][place]
        assert all(map(torch.equal, untouched, before))


def new_rows(device: str, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(*shape, HEADS_K, d, device=device, dtype=dtype) for d in (D, DV))
    return k, v


@pytest.mark.parametrize("page_size", (None, 1, 6, 16))
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("source", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_by_lengths(page_size: int | None, scales: str, dtype: torch.dtype, source: torch.dtype, device: str) -> None:
    """Behind lengths, or as the last rows of them; dense and packed; a sequence that is none is left alone."""
    for lengths, packed in (("before", False), ("after", True)):
        rows = Rows(dtype, scales, device, page_size)
        counts = [random.randint(0, 5) for _ in range(B)] if packed else [3] * B
        first = [random.randint(0, CAPACITY - 5) for _ in range(B)]
        idle = random.randrange(B)
        seqlens = torch.tensor([n + (c if lengths == "after" else 0) for n, c in zip(first, counts, strict=True)])
        seqlens[idle] = -1
        k, v = new_rows(device, source, *((sum(counts),) if packed else (B, 3)))
        starts = [sum(counts[:b]) for b in range(B + 1)]
        boundaries = torch.tensor(starts, dtype=torch.int32, device=device) if packed else None
        before = tuple(x.clone() for x in rows.all())
        result = tessera.append(
            k, v, rows.cache.k, rows.cache.v, seqlens=seqlens.int().to(device), lengths=lengths,
            cu_seqlens_new=boundaries, page_table=rows.cache.page_table, **rows.scale_arguments(),
        )  # fmt: skip
        assert result is None
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (k, v)]
        rows.check(before, [
            (b, first[b] + i, flat[0][starts[b] + i], flat[1][starts[b] + i])
            for b in range(B) if b != idle for i in range(counts[b])
        ])  # fmt: skip


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_slots_from_one_packed_tensor(scales: str, dtype: torch.dtype, device: str) -> None:
    """As engines call it: q, k and v are parts of the rows that one product made; -1 is no slot. q is rotated."""
    rows = Rows(dtype, scales, device, 16)
    if scales == "head":  # there are no sequences
        rows.k_scale, rows.v_scale = rows.k_scale[:1], rows.v_scale[:1]
    count = 11
    qkv = torch.randn(count, HEADS * D + HEADS_K * (D + DV), device=device, dtype=torch.bfloat16)
    q, k, v = (
        x.unflatten(-1, (heads, -1))
        for x, heads in zip(qkv.split((HEADS * D, HEADS_K * D, HEADS_K * DV), -1), (HEADS, HEADS_K, HEADS_K),
                            strict=True)
    )  # fmt: skip
    places = random.sample([(b, slot) for b in range(B) for slot in range(CAPACITY)], count)
    slots = torch.tensor([int(rows.cache.slots(b)[slot]) for b, slot in places], device=device)
    skipped = random.randrange(count)
    slots[skipped] = -1
    angle = torch.rand(CAPACITY, D // 4, device=device)
    positions = torch.randint(CAPACITY, (count,), device=device, dtype=torch.int32)
    before = tuple(x.clone() for x in rows.all())
    cache = tessera.KVCache(rows.cache.k, rows.cache.v, rows.k_scale, rows.v_scale)
    rotated = cache.write(k, v, slots, q=q, rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_positions=positions)
    exact_q, exact_k = (caches.rotate(x, positions.long(), angle.cos(), angle.sin(), False) for x in (q, k))
    torch.testing.assert_close(rotated, exact_q.bfloat16(), rtol=2**-7, atol=2**-8)
    rows.check(before, [
        (b, slot, exact_k[i], v[i]) for i, (b, slot) in enumerate(places) if i != skipped
    ])  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_at_the_ends(dtype: torch.dtype, device: str) -> None:
    """Too large ones, infinities and NaN with a scale that is given; rows of zeros and tiny ones with one written."""
    rows = Rows(dtype, "tensor", device, None)
    rows.k_scale, rows.v_scale = (torch.tensor(x, device=device) for x in (0.5, 2.0))
    k, v = new_rows(device, torch.float32, B, 1)
    special = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-30], device=device)
    k[0, 0, 0, :8] = v[0, 0, 0, :8] = special
    seqlens = torch.zeros(B, dtype=torch.int32, device=device)
    tessera.append(k, v, rows.cache.k, rows.cache.v, seqlens=seqlens, **rows.scale_arguments())
    largest = LARGEST[dtype]
    for x in (rows.cache.k, rows.cache.v):
        found = x[0, 0, 0, :8].float()
        nan = found.isnan() if dtype is torch.float8_e4m3fn else found == 0
        assert found[:4].tolist() == [largest, -largest, largest, -largest] and bool(nan[4])
        assert found[5:].tolist() == [0, 0, 0]
    rows = Rows(dtype, "token", device, None)
    k, v = torch.zeros_like(k), torch.full_like(v, 1e-12)
    tessera.append(k, v, rows.cache.k, rows.cache.v, seqlens=seqlens, **rows.scale_arguments())
    assert bool((rows.cache.k[:, 0].float() == 0).all()) and bool((rows.k_scale[:, 0] == 1).all())
    assert bool((rows.cache.v[:, 0].float() == largest).all())


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rotates", (False, True))
def test_step(rotates: bool, scales: str, dtype: torch.dtype, device: str) -> None:
    """Append and attention in one call, also where torch watches: the operators in two, bit for bit."""
    first = Rows(dtype, scales, device, 16)
    q = torch.randn(B, 2, HEADS, D, device=device, dtype=torch.bfloat16)
    k, v = new_rows(device, torch.bfloat16, B, 2)
    seqlens = torch.tensor([5, -1, 40], dtype=torch.int32, device=device)
    angle = torch.rand(CAPACITY, D // 2, device=device)
    rotary: dict[str, Any] = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()} if rotates else {}

    def copy() -> Rows:
        other = Rows(dtype, scales, device, 16)
        other.cache = first.cache._replace(k=first.cache.k.clone(), v=first.cache.v.clone())
        other.k_scale, other.v_scale = first.k_scale.clone(), first.v_scale.clone()
        return other

    def step(q: Tensor, k: Tensor, v: Tensor, to: Rows) -> Any:
        return tessera.cached_attention(
            q, to.cache.k, to.cache.v, seqlens=seqlens, lengths="before", k_new=k, v_new=v, causal=True,
            page_table=to.cache.page_table, **to.scale_arguments(), **rotary,
        )  # fmt: skip

    in_two, in_one, watched = copy(), copy(), copy()
    place: dict[str, Any] = {"seqlens": seqlens, "page_table": in_two.cache.page_table, **in_two.scale_arguments()}
    rotated = tessera.append(k, v, in_two.cache.k, in_two.cache.v, q=q if rotates else None, **place, **rotary)
    expected = tessera.cached_attention(
        q if rotated is None else rotated, in_two.cache.k, in_two.cache.v, lengths="before", seqlen_new=2, causal=True,
        **place,
    )  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for result, to in ((step(q, k, v, in_one), in_one), (compiled(q, k, v, watched), watched)):
        assert torch.equal(result, expected) and all(map(torch.equal, to.all(), in_two.all()))
    assert not all(map(torch.equal, first.all(), in_two.all()))


def test_operator(device: str) -> None:
    """torch's own checks of what it writes."""
    rows = Rows(torch.int8, "token", device, None)
    k, v = new_rows(device, torch.bfloat16, B, 2)
    seqlens = torch.tensor([5, 0, 40], dtype=torch.int32, device=device)
    scales = (rows.k_scale.clone(), rows.v_scale.clone())
    rest = (seqlens, *(None,) * 9, *scales, "before", 0, 0, False, False)
    torch.library.opcheck(
        torch.ops.tessera.append.default, (k, v, rows.cache.k.clone(), rows.cache.v.clone(), None, *rest),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_refusals(device: str) -> None:
    """Nothing is written then."""
    rows = Rows(torch.int8, "token", device, None)
    k, v = new_rows(device, torch.bfloat16, B, 1)
    before = tuple(x.clone() for x in rows.all())
    good = rows.scale_arguments() | {"seqlens": torch.zeros(B, dtype=torch.int32, device=device)}
    cache = (rows.cache.k, rows.cache.v)
    refused: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((k, v, *cache), {"k_scale": None}, "k_scale is None: must be .*missing one is not 1"),
        ((k, v, *cache), {"v_scale": rows.v_scale[:2]}, "v_scale has shape"),
        ((k, v, *cache), {"k_scale": rows.k_scale.double()}, "k_scale.dtype = float64: must be float32"),
        ((k.to(torch.int8), v, *cache), {}, "k_new.dtype = int8: must be float32, bfloat16 or float16"),
        ((k, v.float(), *cache), {}, "v_new.dtype = float32"),
        ((k, v, cache[0].bfloat16(), cache[1].bfloat16()), {}, "only caches of 8 bits have scales"),
        ((k, v, cache[0], cache[1].bfloat16()), {}, "v_cache.dtype = bfloat16, but k_cache.dtype = int8"),
    ]
    for tensors, wrong, text in refused:
        with pytest.raises(ValueError, match=text):
            tessera.append(*tensors, **(good | wrong))
    assert all(map(torch.equal, rows.all(), before))
