"""Caches of 8 bits beside queries of more: cached_attention over the values that are stored, whatever their scales."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

import tessera
import tessera.torch  # the operators

B, HEADS, HEADS_K, D, DV = 3, 4, 2, 64, 48
TYPES = (torch.float8_e4m3fn, torch.int8)
SCALES = ("tensor", "head", "token")


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 30).round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else (x * 20).to(dtype)


class Stored:
    """A cache of 8 bits and its scales, and what they mean."""

    def __init__(self, dtype: torch.dtype, scales: str, device: str, page_size: int | None = 16, rows: int = B) -> None:
        plain = caches.random_cache(rows, 80, page_size, HEADS_K, (D, DV), torch.float32, device)
        self.cache = plain._replace(k=narrowed(plain.k, dtype), v=narrowed(plain.v, dtype))
        slots = plain.k.shape[:3]
        # A part of something larger, as scales within pages are.
        shapes = {"tensor": (2,), "head": (2, B, HEADS_K), "token": (*slots, 2)}
        numbers = torch.rand(shapes[scales], device=device) / 30 + 0.01
        self.k_scale, self.v_scale = numbers.unbind(-1 if scales == "token" else 0)
        self.scales = scales

    def arguments(self) -> dict[str, Any]:
        return {"page_table": self.cache.page_table, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def values(self, sequence: int, dtype: torch.dtype = torch.double) -> caches.Cache:
        def of(x: Tensor, scale: Tensor) -> Tensor:
            factor = scale[sequence, None, None] if self.scales == "head" else scale
            factor = factor[..., None] if factor.dim() > 0 else factor
            return (x.double() * factor.double()).to(dtype)

        return self.cache._replace(k=of(self.cache.k, self.k_scale), v=of(self.cache.v, self.v_scale))

    def check(self, result: Any, q: Tensor, sequences: list[tuple[Any, int, int, int]], **options: Any) -> None:
        """Of dense queries."""
        exact, plain = (
            [caches.attend(q, self.values(b, dtype), [sequence], dtype=dtype, **options) for b, sequence in
             enumerate(sequences)]
            for dtype in (torch.double, q.dtype)
        )  # fmt: skip
        whole = [tuple(torch.cat(parts) for parts in zip(*results, strict=True)) for results in (exact, plain)]
        caches.check_close(result, whole[0], whole[1])


def queries(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    if device == "cuda" and dtype is torch.float32:
        pytest.skip("a GPU takes queries of 16 bits")
    return torch.randn(*shape, HEADS, D, device=device, dtype=dtype)


@pytest.mark.parametrize("page_size", (None, 1, 6, 16))
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("q_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_places(page_size: int | None, scales: str, dtype: torch.dtype, q_dtype: torch.dtype, device: str) -> None:
    q = queries(device, q_dtype, B, 3)
    stored = Stored(dtype, scales, device, page_size, 2 * B)
    rows = random.sample(range(2 * B), B)
    seqlens = caches.random_lengths(B, stored.cache.capacity, device)
    leftpad = [random.randint(0, n) for n in seqlens.tolist()]
    result = tessera.cached_attention(
        q, stored.cache.k, stored.cache.v, seqlens=seqlens, causal=True, return_lse=True, **stored.arguments(),
        cache_index=torch.tensor(rows, dtype=torch.int32, device=device),
        leftpad=torch.tensor(leftpad, dtype=torch.int32, device=device),
    )  # fmt: skip
    stored.check(result, q, [(b, rows[b], leftpad[b], n) for b, n in enumerate(seqlens.tolist())], causal=True)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {"causal": True, "chunk": 16},
        {"window": (10, 0), "sink_tokens": 3},
        {"softcap": 2.0, "softmax_scale": 0.3},
        {"softmax_scale": -0.2},
    ),
    ids=str,
)
def test_masks_and_scores(options: dict[str, Any], scales: str, dtype: torch.dtype, device: str) -> None:
    q, stored = queries(device, torch.bfloat16, B, 5), Stored(dtype, scales, device)
    seqlens = caches.random_lengths(B, stored.cache.capacity, device)
    result = tessera.cached_attention(
        q, stored.cache.k, stored.cache.v, seqlens=seqlens, return_lse=True, **stored.arguments(), **options
    )
    stored.check(result, q, [(b, b, 0, n) for b, n in enumerate(seqlens.tolist())], **options)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_queries_and_many(dtype: torch.dtype, device: str) -> None:
    """More rows than a decoding kernel has at a time."""
    counts, starts = [2, 0, 70], [0, 2, 2]
    q, stored = queries(device, torch.bfloat16, 72), Stored(dtype, "token", device)
    cu = torch.tensor([0, 2, 2, 72], dtype=torch.int32, device=device)
    seqlens = torch.tensor([40, 7, 80], dtype=torch.int32, device=device)
    o, lse = tessera.cached_attention(
        q, stored.cache.k, stored.cache.v, seqlens=seqlens, causal=True, return_lse=True, cu_seqlens_q=cu,
        max_seqlen_q=70, **stored.arguments(),
    )  # fmt: skip
    for b, (first, count) in enumerate(zip(starts, counts, strict=True)):
        part = slice(first, first + count)
        if count > 0:
            one = (o[part][None], lse[None, :, part])
            row = [(0, b, 0, int(seqlens[b]))]
            exact, plain = (
                caches.attend(q[part][None], stored.values(b, dtype), row, dtype=dtype, causal=True)
                for dtype in (torch.double, q.dtype)
            )
            caches.check_close(one, exact, plain)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_far_from_one(dtype: torch.dtype, device: str) -> None:
    """Queries beyond fp16, scales that differ by 2^30 from key to key, keys that none but the last outweighs."""
    q, stored = 1e6 * queries(device, torch.bfloat16, B, 1), Stored(dtype, "token", device)
    stored.k_scale *= 1e-6
    stored.v_scale *= torch.exp2(torch.randint(-15, 15, stored.v_scale.shape, device=device).float())
    seqlens = caches.random_lengths(B, stored.cache.capacity, device)
    result = tessera.cached_attention(
        q, stored.cache.k, stored.cache.v, seqlens=seqlens, return_lse=True, **stored.arguments()
    )
    stored.check(result, q, [(b, b, 0, n) for b, n in enumerate(seqlens.tolist())])


def test_objects_and_operators(device: str) -> None:
    stored, q = Stored(torch.float8_e4m3fn, "token", device), queries(device, torch.bfloat16, B, 1)
    seqlens = caches.random_lengths(B, stored.cache.capacity, device)
    expected = tessera.cached_attention(q, stored.cache.k, stored.cache.v, seqlens=seqlens, **stored.arguments())
    cache = tessera.KVCache(stored.cache.k, stored.cache.v, stored.k_scale, stored.v_scale)
    sequences = tessera.CachedSequences(seqlens, stored.cache.page_table, lengths="after")
    assert torch.equal(cache.attend(q, sequences), expected)
    # Bits of e4m3, as engines keep them.
    as_bytes = (x.view(torch.uint8) for x in (stored.cache.k, stored.cache.v))
    assert torch.equal(tessera.cached_attention(q, *as_bytes, seqlens=seqlens, **stored.arguments()), expected)
    compiled = torch.compile(
        lambda *x: tessera.cached_attention(*x, seqlens=seqlens, **stored.arguments()), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    assert torch.equal(compiled(q, stored.cache.k, stored.cache.v), expected)
    copies = torch.tensor([[0, 1]], device=device)
    cache.copy_pages(copies)
    for x in (cache.k.view(torch.uint8), cache.v.view(torch.uint8), cache.k_scale, cache.v_scale):
        assert x is not None and torch.equal(x[0], x[1])
    line = tessera.explain_cached(q, cache.k, cache.v, seqlens=seqlens, **stored.arguments()).splitlines()[0]
    assert "kv=e4m3 scales=none/token/token" in line


def test_wrong_scales(device: str) -> None:
    stored, q = Stored(torch.int8, "head", device), queries(device, torch.bfloat16, B, 1)
    place: dict[str, Any] = {"page_table": stored.cache.page_table}
    k, v, good = stored.cache.k, stored.cache.v, stored.k_scale
    for scales, text in (
        ({}, "k_scale is None: must be .*missing one is not 1"),
        ({"k_scale": good}, "v_scale is None"),
        ({"k_scale": good[:2], "v_scale": good}, "k_scale has shape"),
        ({"k_scale": good.double(), "v_scale": good}, "k_scale.dtype = float64: must be float32"),
    ):
        with pytest.raises(ValueError, match=text):
            tessera.cached_attention(q, k, v, **place, **scales)
    with pytest.raises(ValueError, match="v_cache.dtype = bfloat16, but k_cache.dtype = int8"):
        tessera.cached_attention(q, k, v.bfloat16(), **place, k_scale=good, v_scale=good)
    with pytest.raises(ValueError, match="only caches of 8 bits have scales"):
        tessera.cached_attention(q, k.bfloat16(), v.bfloat16(), **place, k_scale=good)
    with pytest.raises(ValueError, match="k_scale is None, but k is of"):
        tessera.KVCache(k, v)
    with pytest.raises(ValueError, match="k_scale is given, but k is of"):
        tessera.KVCache(k.bfloat16(), v.bfloat16(), good, good)
