"""tessera.cached_attention and tessera.append: caches of keys and values, by lengths that the device reads."""

import inspect
import random
from typing import Any

import caches
import numpy
import pytest
import torch
from torch import Tensor

import tessera
import tessera.torch  # the operators

B, HEADS, HEADS_K, D, DV = 3, 4, 2, 32, 48
INFINITY = float("inf")


def int32(numbers: list[int], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def queries(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, HEADS, D, device=device, dtype=torch.bfloat16)


def random_cache(device: str, page_size: int | None = 16, rows: int = B, **more: Any) -> caches.Cache:
    return caches.random_cache(rows, 80, page_size, HEADS_K, (D, DV), torch.bfloat16, device, **more)


def check(
    result: Any, q: Tensor, cache: caches.Cache, sequences: list[tuple[Any, int, int, int]], **options: Any
) -> None:
    exact = caches.attend(q, cache, sequences, **options)
    plain = caches.attend(q, cache, sequences, dtype=q.dtype, **options)
    caches.check_close(result, exact, plain)


def spoil(cache: caches.Cache, sequences: list[tuple[Any, int, int, int]]) -> None:
    """NaN into every slot that holds no key of a sequence."""
    unused = torch.ones(cache.k.shape[0] * cache.k.shape[1], dtype=torch.bool)
    for _, row, first, end in sequences:
        unused[cache.slots(row)[first:end]] = False
    at = unused.view(cache.k.shape[:2]).to(cache.k.device)
    cache.k[at] = torch.nan
    cache.v[at] = torch.nan


@pytest.mark.parametrize("page_size", (None, 1, 6, 16))
@pytest.mark.parametrize("page_ids", (torch.int32, torch.int64), ids=str)
def test_places(page_size: int | None, page_ids: torch.dtype, device: str) -> None:
    """Rows, pages, both types of page numbers, index, left padding, what lengths count; nothing else is read."""
    cache = random_cache(device, page_size, 2 * B, page_ids=page_ids)
    rows = random.sample(range(2 * B), B)
    seqlens = caches.random_lengths(B, cache.capacity - 4, device)
    leftpad = [random.randint(0, n) for n in seqlens.tolist()]
    q = queries(device, B, 3)
    place: dict[str, Any] = {
        "page_table": cache.page_table,
        "cache_index": int32(rows, device),
        "leftpad": int32(leftpad, device),
        "causal": True,
        "return_lse": True,
    }
    full = tessera.cached_attention(q, cache.k, cache.v, **place)
    check(full, q, cache, [(b, rows[b], leftpad[b], cache.capacity) for b in range(B)], causal=True)
    for lengths, seqlen_new in (("before", 4), ("after", None)):
        sequences = [(b, rows[b], leftpad[b], n + (seqlen_new or 0)) for b, n in enumerate(seqlens.tolist())]
        spoil(cache, sequences)
        result = tessera.cached_attention(
            q, cache.k, cache.v, seqlens=seqlens, lengths=lengths, seqlen_new=seqlen_new, **place
        )
        check(result, q, cache, sequences, causal=True)


def test_packed_queries(device: str) -> None:
    cache = random_cache(device)
    counts, news = [2, 0, 3], [1, 4, 0]
    q, cu = queries(device, 5), int32([0, 2, 2, 5], device)
    seqlens, cu_new = int32([40, 7, 0], device), int32([0, 1, 5, 5], device)
    starts = [sum(counts[:b]) for b in range(B)]
    packed: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": 3, "page_table": cache.page_table, "window": (9, 0)}
    for more, added in (({"lengths": "before", "cu_seqlens_new": cu_new}, news), ({}, [0, 0, 0])):
        result = tessera.cached_attention(q, cache.k, cache.v, seqlens=seqlens, return_lse=True, **packed, **more)
        sequences = [
            (slice(starts[b], starts[b] + counts[b]), b, 0, n + added[b]) for b, n in enumerate(seqlens.tolist())
        ]
        check(result, q, cache, sequences, window=(9, 0))
        assert (result[1][:, 2:] == -INFINITY).all() and (result[0][2:] == 0).all()


@pytest.mark.parametrize(
    "options",
    (
        {"causal": True, "chunk": 16},
        {"chunk": 7},
        {"window": (10, 0), "sink_tokens": 3},
        {"causal": True, "chunk": 16, "sink_tokens": 5},
        {"softcap": 2.0, "softmax_scale": 0.3},
    ),
    ids=str,
)
def test_masks_and_scores(options: dict[str, Any], device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 5)
    seqlens = caches.random_lengths(B, cache.capacity, device)
    result = tessera.cached_attention(
        q, cache.k, cache.v, seqlens=seqlens, page_table=cache.page_table, return_lse=True, **options
    )
    check(result, q, cache, [(b, b, 0, n) for b, n in enumerate(seqlens.tolist())], **options)


def test_tree_mask_sinks_and_slopes(device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 6)
    seqlens = int32([80, 6, 41], device)
    sequences = [(b, b, 0, n) for b, n in enumerate(seqlens.tolist())]
    place: dict[str, Any] = {"seqlens": seqlens, "page_table": cache.page_table, "return_lse": True}
    mask = torch.randint(0, 2**6, (B, 6), device=device)
    result = tessera.cached_attention(q, cache.k, cache.v, tree_mask=mask, **place)
    check(result, q, cache, sequences, tree_mask=mask)
    wide = tessera.cached_attention(q, cache.k, cache.v, tree_mask=mask.to(torch.uint64), **place)
    assert torch.equal(wide[0], result[0])
    sink = torch.randn(HEADS, device=device)
    result = tessera.cached_attention(q, cache.k, cache.v, sink=sink, **place)
    check(result, q, cache, sequences, sink=sink)
    for slopes in (torch.rand(HEADS, device=device), torch.rand(B, HEADS, device=device)):
        result = tessera.cached_attention(q, cache.k, cache.v, alibi_slopes=slopes, causal=True, **place)
        check(result, q, cache, sequences, alibi_slopes=slopes, causal=True)


def test_bits_do_not_depend_on_the_batch(device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 2)
    assert cache.page_table is not None
    seqlens = caches.random_lengths(B, cache.capacity, device)
    whole = tessera.cached_attention(
        q, cache.k, cache.v, seqlens=seqlens, page_table=cache.page_table, batch_invariant=True
    )
    for b in range(B):
        alone = tessera.cached_attention(
            q[b : b + 1], cache.k, cache.v, seqlens=seqlens[b : b + 1], page_table=cache.page_table[b : b + 1],
            batch_invariant=True,
        )  # fmt: skip
        assert torch.equal(alone[0], whole[b])


def test_out(device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 2)
    expected = tessera.cached_attention(q, cache.k, cache.v, page_table=cache.page_table)
    out = torch.full((B, 2, HEADS, DV + 8), 7.0, device=device, dtype=q.dtype)
    given = out[..., :DV]
    assert tessera.cached_attention(q, cache.k, cache.v, page_table=cache.page_table, out=given) is given
    assert torch.equal(given, expected) and (out[..., DV:] == 7).all()


def new_rows(device: str, *shape: int) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(*shape, HEADS_K, d, device=device, dtype=torch.bfloat16) for d in (D, DV))
    return k, v


def changed_slots(cache: caches.Cache, before: caches.Cache) -> list[int]:
    differs = [(x != y).flatten(0, 1).any((-1, -2)) for x, y in ((cache.k, before.k), (cache.v, before.v))]
    assert torch.equal(*differs)
    return differs[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("page_size", (None, 1, 6, 16))
def test_append_by_lengths(page_size: int | None, device: str) -> None:
    """Before and after are two names of the same slots."""
    for lengths in ("before", "after"):
        cache = random_cache(device, page_size, 2 * B)
        before, rows = cache.clone(), random.sample(range(2 * B), B)
        counts = [3, 0, 5]
        starts = [random.randint(0, cache.capacity - n) for n in counts]
        seqlens = int32([s + n * (lengths == "after") for s, n in zip(starts, counts, strict=True)], device)
        k_new, v_new = new_rows(device, sum(counts))
        result = tessera.append(
            k_new, v_new, cache.k, cache.v, seqlens=seqlens, lengths=lengths, page_table=cache.page_table,
            cache_index=int32(rows, device), cu_seqlens_new=int32([0, 3, 3, 8], device),
        )  # fmt: skip
        assert result is None
        at = torch.cat([cache.slots(rows[b])[starts[b] : starts[b] + counts[b]] for b in range(B)])
        assert torch.equal(cache.k.flatten(0, 1)[at.to(device)], k_new)
        assert torch.equal(cache.v.flatten(0, 1)[at.to(device)], v_new)
        assert changed_slots(cache, before) == sorted(at.tolist())


def test_append_by_slots(device: str) -> None:
    """Rows with slots and positions of their own; one goes nowhere, and some queries are longer than the new rows."""
    for page_size in (None, 16):
        cache = random_cache(device, page_size)
        before = cache.clone()
        k_new, v_new = new_rows(device, 4)
        slots = torch.tensor([17, -1, 3, 30], device=device)
        positions = torch.tensor([5, 0, 9, 2, 7], device=device)
        angle = torch.rand(10, D // 4, device=device)
        q = queries(device, 5)
        for kind in (torch.int64, torch.int32):
            rotated = tessera.append(
                k_new, v_new, cache.k, cache.v, slot_mapping=slots, q=q, rotary_cos=angle.cos(),
                rotary_sin=angle.sin(), rotary_positions=positions.to(kind),
            )  # fmt: skip
            assert rotated is not None and changed_slots(cache, before) == [3, 17, 30]
            expected = caches.rotate(q, positions, angle.cos(), angle.sin(), False)
            torch.testing.assert_close(rotated.double(), expected, rtol=2**-8, atol=1e-5)
            keys = caches.rotate(k_new, positions[:4], angle.cos(), angle.sin(), False)
            seen = slots >= 0
            mine = cache.k.flatten(0, 1)[slots[seen]].double()
            torch.testing.assert_close(mine, keys[seen], rtol=2**-8, atol=1e-5)
            assert torch.equal(cache.v.flatten(0, 1)[slots[seen]], v_new[seen])


def step(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, table: Tensor, cos: Tensor,
    sin: Tensor,
) -> Tensor:  # fmt: skip
    """A decoding step of one layer."""
    place: dict[str, Any] = {"seqlens": seqlens, "page_table": table}
    rotated = tessera.append(k, v, k_cache, v_cache, **place, q=q, rotary_cos=cos, rotary_sin=sin)
    assert rotated is not None
    o: Tensor = tessera.cached_attention(
        rotated, k_cache, v_cache, **place, lengths="before", seqlen_new=1, causal=True
    )
    return o


def step_arguments(device: str) -> tuple[Tensor, ...]:
    cache = random_cache(device)
    assert cache.page_table is not None
    angle = torch.rand(80, D // 2, device=device)
    return (
        queries(device, B, 1), *new_rows(device, B, 1), cache.k.contiguous(), cache.v.contiguous(),
        int32([70, 3, 15], device), cache.page_table, angle.cos(), angle.sin(),
    )  # fmt: skip


def copied(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in arguments)


def test_compiles(device: str) -> None:
    """The cache is written in place there, too."""
    arguments = step_arguments(device)
    mine, theirs = copied(arguments), copied(arguments)
    expected = step(*mine)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*theirs), expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[3], arguments[3]) and not torch.equal(mine[4], arguments[4])


def test_operators(device: str) -> None:
    """torch's own checks of them."""
    q, k, v, k_cache, v_cache, seqlens, table, cos, sin = step_arguments(device)
    arrays = (seqlens, None, table, None)
    tests = ("test_schema", "test_faketensor")
    forward = torch.ops.tessera.cached_forward.default
    for none in (0, None):  # bounds of what is not packed
        more = (None, None, None, None, None, none, "after", none, None, 0.0, -1, 0, 0, 0, False, False, 0)
        torch.library.opcheck(forward, (q, k_cache, v_cache, None, None, None, *arrays, *more), test_utils=tests)
    append = torch.ops.tessera.append.default
    rest = (cos, sin, None, None, None, None, "before", 0, 0, False, False)
    torch.library.opcheck(append, (k, v, k_cache, v_cache, q, *arrays, None, None, *rest), test_utils=tests)
    torch.library.opcheck(append, (k, v, k_cache, v_cache, None, *arrays, None, None, *rest), test_utils=tests)


@pytest.mark.parametrize("seqlen_q", (1, 3))
@pytest.mark.parametrize("ids", (torch.int32, torch.int64))
def test_skipped_pages(seqlen_q: int, ids: torch.dtype, device: str) -> None:
    """Bit for bit what a table without them gives, with the lengths that are left: the last page may not be full."""
    cache, q = random_cache(device), queries(device, B, seqlen_q)
    assert cache.page_table is not None
    page_size, table = cache.k.shape[1], cache.page_table[:B].to(ids)
    seqlens = int32([3 * page_size + 5, 2 * page_size, 4 * page_size - 1], device)
    skipped = table.clone()
    skipped[0, 1], skipped[1, :2], skipped[2, 3] = -1, -7, -1
    kept = table.clone()
    kept[0, 1:3], kept[2, 3] = table[0, 2:4], 0
    left = int32([2 * page_size + 5, 0, 3 * page_size], device)
    result = tessera.cached_attention(
        q, cache.k, cache.v, seqlens=seqlens, page_table=skipped, skip_pages=True, return_lse=True
    )
    same = tessera.cached_attention(q, cache.k, cache.v, seqlens=left, page_table=kept, return_lse=True)
    assert all(map(torch.equal, result, same))
    assert "pages=" in (text := tessera.explain_cached(
        q, cache.k, cache.v, seqlens=seqlens, page_table=skipped, skip_pages=True
    )) and ":skip" in text  # fmt: skip


@pytest.mark.parametrize("seqlen_q", (1, 2))
@pytest.mark.parametrize("ids", (torch.int32, torch.int64))
def test_shared_prefixes(seqlen_q: int, ids: torch.dtype, device: str) -> None:
    """Sequences with the same pages first: prefix_levels changes nothing but how a GPU reads them."""
    batch, page_size = 12, 16
    cache = caches.random_cache(batch, 500, page_size, HEADS_K, (D, DV), torch.bfloat16, device)
    assert cache.page_table is not None
    table = cache.page_table.to(ids)
    table[:, :15] = table[0, :15]  # all of them
    table[5:9, 15:28] = table[5, 15:28]  # and some of these further ones
    q = queries(device, batch, seqlen_q)
    seqlens = torch.randint(300, 500, (batch,), dtype=torch.int32, device=device)
    shared: dict[str, Any] = {"seqlens": seqlens, "page_table": table, "causal": True, "return_lse": True}
    plain = tessera.cached_attention(q, cache.k, cache.v, **shared)
    for levels in (1, 2, 4):
        result = tessera.cached_attention(q, cache.k, cache.v, prefix_levels=levels, **shared)
        if device == "cpu":
            assert all(map(torch.equal, result, plain))
        else:
            torch.testing.assert_close(result[0].float(), plain[0].float(), rtol=0.02, atol=0.02)
            torch.testing.assert_close(result[1], plain[1], rtol=1e-4, atol=1e-4)
    del shared["return_lse"]
    assert " prefixes=2 " in tessera.explain_cached(q, cache.k, cache.v, prefix_levels=2, **shared)


def test_shared_prefixes_in_a_graph(device: str) -> None:
    """What is shared is found anew in every replay."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    batch = 24
    cache = caches.random_cache(batch, 400, 16, HEADS_K, (D, DV), torch.bfloat16, device)
    assert cache.page_table is not None
    q, table, seqlens = queries(device, batch, 1), cache.page_table.clone(), int32([400] * batch, device)

    def step(levels: int) -> Any:
        return tessera.cached_attention(q, cache.k, cache.v, seqlens=seqlens, page_table=table, prefix_levels=levels)

    step(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(2)
    for shared in ([], [(0, 24, 20)], [(0, 12, 15), (12, 20, 10)], [(3, 24, 10), (8, 16, 20)], [(0, 24, 20)]):
        table.copy_(cache.page_table)
        for first, end, pages in shared:
            table[first:end, :pages] = table[first, :pages]
        seqlens.copy_(torch.randint(150, 401, (batch,)))
        graph.replay()
        torch.testing.assert_close(out.float(), step(0).float(), rtol=0.02, atol=0.02)


def test_graphs(device: str) -> None:
    """A captured step is replayed with other lengths, pages and rows."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    captured = step_arguments(device)
    step(*captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*captured)
    for _ in range(2):
        arguments = step_arguments(device)
        for to, x in zip(captured, arguments, strict=True):
            to.copy_(x)
        graph.replay()
        expected = step(*arguments)
        assert torch.equal(out, expected) and all(map(torch.equal, captured, arguments))


def test_refusals(device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 2)
    table, seqlens = cache.page_table, int32([5, 6, 7], device)
    assert table is not None
    place: dict[str, Any] = {"page_table": table}

    def attend(**named: Any) -> None:
        tessera.cached_attention(named.pop("q", q), cache.k, cache.v, **(place | named))

    refused: list[tuple[dict[str, Any], str]] = [
        ({"lengths": "all", "seqlens": seqlens}, "lengths = 'all': must be 'after', 'before' or 'full'"),
        ({"lengths": "before"}, "seqlens is None: the lengths of the sequences are required"),
        ({"lengths": "full", "seqlens": seqlens}, "seqlens is given, but lengths = 'full'"),
        ({"seqlens": seqlens[:2]}, r"seqlens has shape \(2,\): must be \(batch,\)"),
        ({"seqlens": seqlens, "seqlen_new": 1}, "seqlen_new = 1: must be 0"),
        ({"page_table": table.float()}, r"page_table\.dtype = float32: must be int32 or int64"),
        ({"page_table": table[:2]}, r"page_table has shape \(2, 5\): must have a row for each of the 3 sequences"),
        ({"cache_index": seqlens[:1]}, r"cache_index has shape \(1,\): must be \(batch,\)"),
        ({"tree_mask": seqlens}, r"tree_mask\.dtype = int32: must be int64"),
        ({"cu_seqlens_new": seqlens}, "cu_seqlens_new is given: only cu_seqlens_q"),
        ({"max_seqlen_q": 3}, "max_seqlen_q is given, but cu_seqlens_q is None"),
        ({"window": (-2, 0)}, r"window\[0\] = -2: must be 0 or more"),
        ({"chunk": -1}, "chunk = -1"),
        ({"out": q}, r"out has shape \(3, 2, 4, 32\): must be \(3, 2, 4, 48\)"),
        ({"q": q[..., :8]}, r"k_cache has shape \(18, 16, 2, 32\): must be \(18, 16, 2, 8\)"),
        ({"q": q.half()}, r"k_cache\.dtype = bfloat16, but q\.dtype = float16"),
        ({"skip_pages": True, "page_table": None}, "skip_pages = True, but page_table is None"),
        ({"prefix_levels": 1, "page_table": None}, "prefix_levels = 1, but page_table is None"),
        ({"prefix_levels": 5}, r"prefix_levels = 5: must lie in \[0, 4\]"),
        ({"skip_pages": True, "causal": True}, "skip_pages = True: .* no positions, which causal or window asks for"),
        ({"skip_pages": True, "leftpad": seqlens}, "skip_pages = True: .* no positions, which leftpad asks for"),
    ]
    if device == "cpu":
        refused += [
            ({"seqlens": seqlens + 80}, r"seqlens\[0\] = 85: must not exceed seqlen_k = 80"),
            ({"page_table": table + 20, "seqlens": seqlens}, r"page_table\[0\]\[0\] = \d+: must lie in \[0, num_pages"),
            ({"cache_index": seqlens, "seqlens": seqlens}, r"index\[0\] = 5: must lie in \[0, rows\) = \[0, 3\)"),
        ]
    for named, said in refused:
        with pytest.raises(ValueError, match=said):
            attend(**named)
    with pytest.raises(NotImplementedError, match="q requires a gradient: cached_attention has none"):
        attend(q=q.clone().requires_grad_())
    with pytest.raises(TypeError, match="seqlens is of type 'list'"):
        attend(seqlens=[1, 2, 3])
    with pytest.raises(TypeError, match="seqlens is of type 'ndarray': must be a torch tensor"):
        attend(seqlens=seqlens.cpu().numpy())
    array = numpy.zeros((1, 1, 1, 8), dtype=numpy.float32)
    with pytest.raises(TypeError, match="q is of type 'ndarray': a cache must be of torch tensors"):
        tessera.cached_attention(array, array, array)


def test_refusals_of_appends(device: str) -> None:
    cache, q = random_cache(device), queries(device, B, 2)
    k, v = new_rows(device, B, 2)
    seqlens, slots = int32([5, 6, 7], device), torch.arange(6, device=device)
    angle = torch.rand(80, D // 2, device=device)
    rotary: dict[str, Any] = {"rotary_cos": angle, "rotary_sin": angle}
    packed = {"k_new": k.flatten(0, 1), "v_new": v.flatten(0, 1), "slot_mapping": slots}
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "seqlens is None: new rows go behind lengths, or have slots"),
        ({"seqlens": seqlens, "lengths": "full"}, "lengths = 'full': must be 'before' or 'after'"),
        ({"seqlens": seqlens, "q": q}, "q is given, but rotary_cos is None"),
        ({"seqlens": seqlens, "rotary_seqlens": seqlens}, "rotary_seqlens is given, but rotary_cos is None"),
        ({"seqlens": seqlens, "v_new": v[..., :8]}, r"v_new has shape \(3, 2, 2, 8\): must be \(3, 2, 2, 48\)"),
        ({"seqlens": seqlens, "k_new": k.half()}, r"k_new\.dtype = float16, but k_cache\.dtype = bfloat16"),
        ({"seqlens": seqlens, **rotary, "rotary_sin": angle[:9]}, r"rotary_sin has shape \(9, 16\): must be \(80, 16"),
        ({"seqlens": seqlens, "rotary_cos": k[0, 0].repeat(9, 2)[:, :64], "rotary_sin": angle}, "rotary_sin has shape"),
        ({**packed, "seqlens": seqlens}, "seqlens is given, but slot_mapping is, too"),
        ({**packed, "page_table": None, **rotary}, "rotary_positions is None: with slot_mapping"),
        ({**packed, "page_table": None, "slot_mapping": slots[:2]}, r"slot_mapping has shape \(2,\): must be \(total,"),
        ({"seqlens": seqlens, "k_new": k.repeat(1, 50, 1, 1)}, r"a sequence has only 80 slots"),
    ]
    if device == "cpu":
        refused += [
            ({"seqlens": seqlens + 74}, r"seqlens\[0\] = 79: before 2 new rows must lie in \[0, 78\]"),
            ({**packed, "page_table": None, "slot_mapping": slots + 10**6}, r"slot_mapping\[0\] = 1000000: must be -1"),
            ({"seqlens": seqlens, "rotary_cos": angle[:6], "rotary_sin": angle[:6]}, "positions 5 to 6 must lie in"),
        ]
    for named, said in refused:
        arguments = {"k_new": k, "v_new": v, "k_cache": cache.k, "v_cache": cache.v, "page_table": cache.page_table}
        before = cache.clone()
        with pytest.raises(ValueError, match=said):
            tessera.append(**(arguments | named))
        assert changed_slots(cache, before) == []
    with pytest.raises(NotImplementedError, match="k_new requires a gradient: append has none"):
        tessera.append(k.clone().requires_grad_(), v, cache.k, cache.v, seqlens=seqlens, page_table=cache.page_table)


def test_explain(device: str) -> None:
    """The plan of what cached_attention would run, here or on another device, in the words of the problem."""
    signature = inspect.signature(tessera.cached_attention).parameters
    explained = dict(inspect.signature(tessera.explain_cached).parameters)
    assert explained.pop("device").default is None
    for name, parameter in explained.items():
        assert (parameter.kind, parameter.default) == (signature[name].kind, signature[name].default), name
    rotary = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_seqlens", "rotary_constant_q")
    rows = ("k_new", "v_new", "max_seqlen_new", *rotary)  # an append has no plan
    assert [*explained, *rows, "out", "return_lse"] == list(signature)

    cache = random_cache(device, 16, 2 * B)
    place: dict[str, Any] = {
        "seqlens": int32([5, 80, 0], device),
        "page_table": cache.page_table,
        "cache_index": int32([4, 0, 2], device),
    }
    more: dict[str, Any] = {"leftpad": int32([0, 3, 0], device), "causal": True, "chunk": 32, "softcap": 20.0}
    text = tessera.explain_cached(queries(device, B, 2), cache.k, cache.v, **place, **more)
    pages = cache.k.shape[0]
    assert text.startswith(
        f"problem    fwd bf16 b=3 h=4/2 q=2 k=80 d=32/48 cache=after pages={pages}x16 rows=6 leftpad causal chunk=32 "
    ), text
    # Two queries see at most one key of a chunk and all 32 of the next.
    assert "\nkeys       up to 33 a sequence" in text and "\nbytes      up to 31,680 of keys and values" in text
    packed = {"cu_seqlens_q": int32([0, 1, 3, 3], device), "max_seqlen_q": 2, "lengths": "before", "seqlen_new": 4}
    new = int32([0, 1, 4, 4], device)
    text = tessera.explain_cached(
        queries(device, 3), cache.k, cache.v, **place, **packed, cu_seqlens_new=new, batch_invariant=True, device="h200"
    )
    assert " packed=3 cache=before:4 " in text and "kernel     sm90.forward.decode.bf16.d64.16x64" in text, text
    assert "one a unit" in text or "none: an item is one unit" in text
    with pytest.raises(ValueError, match="v_cache has shape"):
        tessera.explain_cached(queries(device, B, 2), cache.k, cache.v[:-1], **place)
    with pytest.raises(TypeError, match="seqlens is of type 'list'"):
        tessera.explain_cached(queries(device, B, 2), cache.k, cache.v, seqlens=[1, 2, 3])
    with pytest.raises(ValueError, match="max_seqlen_q is given, but cu_seqlens_q is None"):
        tessera.explain_cached(queries(device, B, 2), cache.k, cache.v, max_seqlen_q=2, **place)
    with pytest.raises(TypeError, match="q is of type 'ndarray': a cache must be of torch tensors"):
        tessera.explain_cached(numpy.zeros((1, 1, 1, 8), numpy.float32), cache.k, cache.v)  # type: ignore[arg-type]
