"""tessera.cached_attention with new rows: in one call what `append` and then `cached_attention` do, bit for bit."""

import random
from typing import Any

import caches
import pytest
import torch
from test_cache import DV, HEADS_K, B, D, int32, queries, random_cache
from torch import Tensor

import tessera

ROTARY = 16
Step = tuple[Tensor, Tensor, Tensor, caches.Cache, dict[str, Any], dict[str, Any]]


def random_step(device: str, page_size: int | None, lengths: str, packed: bool, rotates: bool) -> Step:
    """q, k_new, v_new, a cache, where everything lies, and what else an append takes."""
    cache = random_cache(device, page_size, 2 * B)
    new = [random.randint(0, 3) for _ in range(B)] if packed else [2] * B
    seqlens = caches.random_lengths(B, cache.capacity - 4, device)
    seqlens[random.randrange(B)] = -1
    if lengths == "after":
        seqlens += torch.where(seqlens < 0, 0, int32(new, device))
    shape = (sum(new),) if packed else (B, 2)
    k, v = (torch.randn(*shape, HEADS_K, d, device=device, dtype=torch.bfloat16) for d in (D, DV))
    place: dict[str, Any] = {
        "page_table": cache.page_table, "cache_index": int32(random.sample(range(2 * B), B), device),
        "seqlens": seqlens, "lengths": lengths,
    }  # fmt: skip
    if packed:
        place |= {"cu_seqlens_q": int32([0, *new], device).cumsum(0).int(), "max_seqlen_q": 3}
    rotary: dict[str, Any] = {}
    if rotates:
        angles = torch.randn(cache.capacity, ROTARY // 2, device=device)
        rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": True}
    return queries(device, *shape), k, v, cache, place, rotary


def in_two(q: Tensor, k: Tensor, v: Tensor, cache: caches.Cache, place: Any, rotary: Any, **more: Any) -> Any:
    boundaries = place.get("cu_seqlens_q")
    queries_of = {} if boundaries is None or not rotary else {"cu_seqlens_q": boundaries, "max_seqlen_q": 3}
    common = {name: x for name, x in place.items() if name not in ("cu_seqlens_q", "max_seqlen_q")}
    rotated = tessera.append(
        k, v, cache.k, cache.v, cu_seqlens_new=boundaries, q=q if rotary else None, **common, **queries_of, **rotary
    )
    q = q if rotated is None else rotated
    if place["lengths"] == "before":
        more |= {"seqlen_new": k.shape[1]} if boundaries is None else {"cu_seqlens_new": boundaries}
    return tessera.cached_attention(q, cache.k, cache.v, **place, **more)


def in_one(q: Tensor, k: Tensor, v: Tensor, cache: caches.Cache, place: Any, rotary: Any, **more: Any) -> Any:
    more |= {"cu_seqlens_new": place.get("cu_seqlens_q"), "k_new": k, "v_new": v}
    return tessera.cached_attention(q, cache.k, cache.v, **place, **rotary, **more)


@pytest.mark.parametrize("rotates", (False, True))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("lengths", ("before", "after"))
@pytest.mark.parametrize("page_size", (None, 16))
def test_steps(page_size: int | None, lengths: str, packed: bool, rotates: bool, device: str) -> None:
    """Outputs and caches are those of two calls; also where torch watches, and there the operators are called."""
    q, k, v, cache, place, rotary = random_step(device, page_size, lengths, packed, rotates)
    caches_of = [cache.clone() for _ in range(3)]
    options: dict[str, Any] = {"causal": True, "window": (20, 0), "sink_tokens": 3, "return_lse": True}
    expected = in_two(q, k, v, caches_of[0], place, rotary, **options)
    result = in_one(q, k, v, caches_of[1], place, rotary, **options)
    torch._dynamo.reset()  # each of these is another program to it
    compiled = torch.compile(in_one, backend="eager", fullgraph=True)(q, k, v, caches_of[2], place, rotary, **options)
    for found, written in ((result, caches_of[1]), (compiled, caches_of[2])):
        assert all(map(torch.equal, found, expected))
        assert torch.equal(written.k, caches_of[0].k) and torch.equal(written.v, caches_of[0].v)
    # A sequence of length -1 is left alone, and all packed rows may be its.
    rows = place["cu_seqlens_q"].diff() if packed else torch.full_like(place["seqlens"], 2)
    assert bool(rows[place["seqlens"] >= 0].sum() > 0) != torch.equal(caches_of[1].k, cache.k)


def test_rows_that_kernels_cannot_read(device: str) -> None:
    """Columns apart, signs that torch has put off, of q, of new rows and of the tables; a class derived from Tensor."""
    q, k, v, cache, place, rotary = random_step(device, 16, "before", False, True)
    expected = in_one(q, k, v, (one := cache.clone()), place, rotary)
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    tables = {name: x.t().contiguous().t() if isinstance(x, Tensor) else x for name, x in rotary.items()}
    negative = [torch._neg_view(-x) for x in (q, k, v)]
    turned = {name: torch._neg_view(-x) if isinstance(x, Tensor) else x for name, x in rotary.items()}
    derived = [torch.nn.Parameter(x, requires_grad=False) for x in (q, k, v)]
    for rows, these in ((apart, tables), (negative, turned), (derived, rotary)):
        assert torch.equal(in_one(*rows, (other := cache.clone()), place, these), expected)
        assert torch.equal(other.k, one.k) and torch.equal(other.v, one.v)


def test_graphs(device: str) -> None:
    """A captured step is replayed with other lengths, rows and tokens."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    make = (device, 16, "before", False, True)
    q, k, v, cache, place, rotary = random_step(*make)
    in_one(q, k, v, cache, place, rotary)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = in_one(q, k, v, cache, place, rotary)
    for _ in range(2):
        q_2, k_2, v_2, cache_2, place_2, rotary_2 = random_step(*make)
        for to, x in zip(
            (q, k, v, cache.k, cache.v, *place.values(), *rotary.values()),
            (q_2, k_2, v_2, cache_2.k, cache_2.v, *place_2.values(), *rotary_2.values()),
            strict=True,
        ):
            if isinstance(to, Tensor):
                to.copy_(x)
        graph.replay()
        expected = in_two(q_2, k_2, v_2, cache_2, place_2, rotary_2)
        assert torch.equal(out, expected) and torch.equal(cache.k, cache_2.k) and torch.equal(cache.v, cache_2.v)


def test_refusals(device: str) -> None:
    """What is refused has written nothing."""
    q, k, v, cache, place, rotary = random_step(device, 16, "before", False, True)
    before = cache.clone()
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"v_new": None}, ValueError, "k_new is given, but v_new is None"),
        ({"k_new": None, "v_new": None}, ValueError, "rotary_cos is given, but k_new is None"),
        ({"seqlen_new": 2}, ValueError, "seqlen_new = 2 is given, but k_new is, too"),
        ({"lengths": "full", "seqlens": None}, ValueError, "seqlens is None: new rows go behind lengths"),
        ({"rotary_sin": None}, ValueError, "rotary_sin"),
        ({"k_new": k[:, :1]}, ValueError, r"v_new has shape \(3, 2, 2, 48\): must be \(3, 1, 2, 48\)"),
        ({"out": q}, ValueError, r"out has shape \(3, 2, 4, 32\): must be \(3, 2, 4, 48\)"),
        ({"chunk": -1}, ValueError, "chunk = -1"),
        ({"k_new": k.clone().requires_grad_()}, NotImplementedError, "k_new requires a gradient: cached_attention has"),
        ({"v_new": [1]}, TypeError, "v_new is of type 'list'"),
        ({"rotary_cos": [1]}, TypeError, "rotary_cos is of type 'list'"),
    ]
    for named, error, said in refused:
        with pytest.raises(error, match=said):
            tessera.cached_attention(q, cache.k, cache.v, **{**place, **rotary, "k_new": k, "v_new": v, **named})
    assert torch.equal(cache.k, before.k) and torch.equal(cache.v, before.v)
