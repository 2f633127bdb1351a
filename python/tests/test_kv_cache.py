"""tessera.KVCache and tessera.CachedSequences, and the account of their pages: tessera.PagePool, PagedSequence."""

import inspect
import pickle
import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tessera
from tessera.torch import cache

HEADS, HEADS_K, D, DV = 4, 2, 32, 48
DTYPE = torch.bfloat16


def int32(numbers: list[int], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def normal(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=DTYPE)


def layers(device: str, pages: int, size: int) -> dict[str, tessera.KVCache]:
    """One of each way in which keys and values lie in memory; full of NaN, which nobody may read."""

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=device, dtype=DTYPE)

    columns = empty(pages, size, HEADS_K, D + DV)
    heads_first = empty(2, pages, HEADS_K, size, D)
    return {
        "separate": tessera.KVCache(empty(pages, size, HEADS_K, D), empty(pages, size, HEADS_K, DV)),
        "key and value pages in turns": tessera.KVCache(*empty(pages, 2, size, HEADS_K, D).unbind(1)),
        "side by side": tessera.KVCache(columns[..., :D], columns[..., D:]),
        "heads outside slots": tessera.KVCache(*heads_first.transpose(2, 3)),
    }


class Model:
    """What should be there: for each name the sequence, and the keys and values of its tokens in every layer."""

    def __init__(self, device: str, pool: tessera.PagePool):
        self.pool, self.layers = pool, layers(device, pool.num_pages, pool.page_size)
        self.paged: dict[int, tessera.PagedSequence] = {}
        self.rows: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self.names = 0

    def add(self, paged: tessera.PagedSequence, rows: dict[str, tuple[Tensor, Tensor]]) -> int:
        self.names += 1
        self.paged[self.names], self.rows[self.names] = paged, rows
        return self.names

    def start(self) -> int:
        none = {at: (x.k[0, :0], x.v[0, :0]) for at, x in self.layers.items()}
        return self.add(tessera.PagedSequence(self.pool), none)

    def cut(self, name: int, length: int) -> dict[str, tuple[Tensor, Tensor]]:
        return {at: (k[:length], v[:length]) for at, (k, v) in self.rows[name].items()}

    def change(self) -> None:
        """Sequences begin, share, shrink and end."""
        names = list(self.paged)
        what = random.choice(("start", "fork", "fork", "truncate", "free")) if names else "start"
        if what == "start" or (what == "fork" and len(names) > 6):
            self.start()
            return
        name = random.choice(names)
        paged = self.paged[name]
        length = random.choice((paged.length, random.randint(0, paged.length)))
        if what == "fork":
            free = self.pool.num_free
            self.add(paged.fork(length), self.cut(name, length))
            assert self.pool.num_free == free
        elif what == "truncate":
            paged.truncate(length)
            self.rows[name] = self.cut(name, length)
        else:
            paged.free()
            assert paged.pages == [] and paged.length == 0
            del self.paged[name], self.rows[name]

    def check_pages(self) -> None:
        """Every page is held by as many as the sequences say, and a sequence has just the pages for its slots."""
        size, held = self.pool.page_size, [0] * self.pool.num_pages
        for paged in self.paged.values():
            assert len(paged.pages) == len(set(paged.pages)) == (paged.length + size - 1) // size
            for page in paged.pages:
                held[page] += 1
        assert [self.pool.holders(page) for page in range(self.pool.num_pages)] == held
        assert self.pool.num_free == held.count(0)

    def extend(self, name: int, added: int) -> list[tuple[int, int]] | None:
        """None if there are too few pages, which then is right, and changes nothing."""
        paged, size = self.paged[name], self.pool.page_size
        others = {page for other, x in self.paged.items() if other != name for page in x.pages}
        copied = added > 0 and paged.length % size > 0 and paged.pages[-1] in others
        wanted = len(range(paged.length, paged.length + added)[-paged.length % size :: size]) + copied
        before, free = (list(paged.pages), paged.length), self.pool.num_free
        try:
            copies = paged.extend(added)
        except tessera.OutOfPages as error:
            assert wanted > free and (error.wanted, error.free) == (wanted, free)
            assert f"{wanted} pages are wanted, but only {free} of {self.pool.num_pages} are free" in str(error)
            assert (paged.pages, paged.length) == before and self.pool.num_free == free
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            return None
        assert free - self.pool.num_free == wanted and paged.length == before[1] + added
        assert [source for source, _ in copies] == ([before[0][-1]] if copied else [])
        return copies

    def step(self, sequences: tessera.CachedSequences, way: str, rotary: tuple[Tensor, Tensor] | None) -> int:
        """New rows for some of them, in every layer, and their queries; returns how many sequences had room."""
        device = next(iter(self.layers.values())).k.device.type
        work, copies = [], []
        for name in random.sample(list(self.paged), min(len(self.paged), random.randint(1, 4))):
            added = random.choice((0, 1, 1, 2, random.randint(1, 9)))
            copied = self.extend(name, added)
            if copied is not None:
                work.append((name, added))
                copies += copied
        if copies:
            for layer in self.layers.values():
                layer.copy_pages(torch.tensor(copies, device=device))
        befores = [len(self.rows[name]["separate"][0]) for name, _ in work]
        afters = [before + added for before, (_, added) in zip(befores, work, strict=True)]
        # Those of "after" by one copy here, by an addition on the device there.
        counted = afters if sequences.lengths == "after" and way == "slots" else befores
        sequences.assign(counted, [self.paged[name].pages for name, _ in work])
        assert sequences.seqlens is not None
        batch = sequences.seqlens.shape[0]
        ends = [sum(added for _, added in work[:b]) for b in range(batch + 1)]
        cu, total = int32(ends, device), ends[-1]
        if sequences.lengths == "after" and way == "lengths":
            sequences.advance(cu.diff())
        positions = torch.tensor([p for a, b in zip(befores, afters, strict=True) for p in range(a, b)]).long()
        place: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": 9}
        turned: dict[str, Any] = {} if rotary is None else {"rotary_cos": rotary[0], "rotary_sin": rotary[1]}
        for at, layer in self.layers.items():
            q, k, v = (normal(device, total, h, d) for h, d in ((HEADS, D), (HEADS_K, D), (HEADS_K, layer.v.shape[-1])))
            if way == "lengths":
                # Without a rotary embedding there is nothing to do for q.
                given = {"q": q, **place} if rotary else {}
                rotated = layer.append(k, v, sequences, cu_seqlens_new=cu, max_seqlen_new=9, **given, **turned)
            else:
                size = self.pool.page_size
                slots = [
                    self.paged[name].pages[s // size] * size + s % size
                    for (name, _), a, b in zip(work, befores, afters, strict=True) for s in range(a, b)
                ]  # fmt: skip
                given = {"q": q, "rotary_positions": positions.to(device)} if rotary else {}
                rotated = layer.write(k, v, torch.tensor(slots, dtype=torch.int64, device=device), **given, **turned)
            assert (rotated is None) == (rotary is None)
            if rotated is not None and rotary is not None:
                expected = caches.rotate(q, positions, *rotary, False)
                torch.testing.assert_close(rotated.double(), expected, rtol=2**-8, atol=1e-5)
                q, k = rotated, caches.rotate(k, positions, *rotary, False).to(DTYPE)
            for b, (name, _) in enumerate(work):
                old, mine = self.rows[name][at], slice(ends[b], ends[b + 1])
                self.rows[name][at] = torch.cat((old[0], k[mine])), torch.cat((old[1], v[mine]))
            result = layer.attend(q, sequences, causal=True, return_lse=True, **place)
            self.check_attention(at, [name for name, _ in work], q, ends, result)
        if sequences.lengths == "before":
            sequences.advance(cu.diff())
        assert sequences.seqlens.tolist() == afters + [-1] * (batch - len(work))
        return len(work)

    def gathered(self, at: str, name: int) -> tuple[Tensor, Tensor]:
        """What lies in the slots of a sequence: what was written, and no other's."""
        layer, paged, size = self.layers[at], self.paged[name], self.pool.page_size
        slots = torch.tensor([paged.pages[s // size] * size + s % size for s in range(paged.length)], dtype=torch.int64)
        k, v = (x.flatten(0, 1)[slots.to(x.device)] for x in (layer.k, layer.v))
        torch.testing.assert_close(k, self.rows[name][at][0], rtol=2**-7, atol=1e-5)
        assert torch.equal(v, self.rows[name][at][1])
        return k, v

    def check_attention(self, at: str, names: list[int], q: Tensor, ends: list[int], result: Any) -> None:
        """Dense attention over the gathered keys."""
        for b, name in enumerate(names):
            k, v = self.gathered(at, name)
            mine = slice(ends[b], ends[b + 1])
            if ends[b] == ends[b + 1]:
                continue
            row = caches.Cache(k[None], v[None], None, len(k))
            exact, plain = (
                caches.attend(q[mine][None], row, [(0, 0, 0, len(k))], causal=True, dtype=dtype)
                for dtype in (torch.double, DTYPE)
            )
            caches.check_close((result[0][mine][None], result[1][None, :, mine]), exact, plain)


@pytest.mark.parametrize(
    ("lengths", "way", "rotated", "size"),
    (
        ("before", "lengths", False, 3),
        ("before", "lengths", True, 16),
        ("after", "lengths", True, 4),
        ("after", "slots", True, 5),
        ("before", "slots", False, 4),
        ("after", "lengths", False, 1),
    ),
)
def test_random_operations(lengths: Any, way: str, rotated: bool, size: int, device: str) -> None:
    """Whatever is extended, shared, cut and freed, each sequence keeps its own keys, and attention sees just these."""
    pool = tessera.PagePool(max(12, 96 // size), size)
    model = Model(device, pool)
    sequences = tessera.CachedSequences.paged(5, pool.num_pages, device=device, lengths=lengths)
    angle = torch.rand(pool.num_pages * size + 9, D // 2, device=device)
    rotary = (angle.cos(), angle.sin()) if rotated else None
    served = 0
    for _ in range(20):
        for _ in range(random.randint(0, 2)):
            model.change()
            model.check_pages()
        if model.paged:
            served += model.step(sequences, way, rotary)
            model.check_pages()
    for name in list(model.paged):
        for at in model.layers:
            model.gathered(at, name)
        model.paged.pop(name).free()
        model.check_pages()
    assert served > 5 and pool.num_free == pool.num_pages


def test_a_decode_step_reads_nothing_on_the_host(device: str) -> None:
    """Lengths and table change by one copy each, the table's only if it is another one; `advance` copies nothing."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.copied_to: list[int] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(op.name().removeprefix("aten::"))
            if self.names[-1] == "copy_":
                self.copied_to.append(args[0].data_ptr())
            return op(*args, **(kwargs or {}))

    def copied_to(call: Any) -> list[int]:
        with Operators() as operators:
            call()
        assert not {"_local_scalar_dense", "_to_copy", "nonzero"} & set(operators.names)
        return [at for at in operators.copied_to if at in places]

    pool = tessera.PagePool(8, 4)
    sequences = tessera.CachedSequences.paged(3, 8, device=device)
    layer = layers(device, 8, 4)["separate"]
    one, two = tessera.PagedSequence(pool), tessera.PagedSequence(pool)
    one.extend(4), two.extend(2)

    def assign() -> None:
        sequences.assign([one.length - 1, two.length - 1], [one.pages, two.pages])

    assert sequences.seqlens is not None and sequences.page_table is not None
    seqlens, table = places = sequences.seqlens.data_ptr(), sequences.page_table.data_ptr()
    assert copied_to(assign) == [table, seqlens]
    assert sequences.seqlens.tolist() == [3, 1, -1] and sequences.page_table[:2, 0].tolist() == [0, 1]
    q, k, v = (normal(device, 3, 1, heads, d) for heads, d in ((HEADS, D), (HEADS_K, D), (HEADS_K, DV)))

    def step() -> None:
        layer.append(k, v, sequences)
        o = layer.attend(q, sequences, causal=True)
        assert o.shape == (3, 1, HEADS, DV)

    assert copied_to(step) == []
    assert copied_to(lambda: sequences.advance(1)) == []
    assert sequences.seqlens.tolist() == [4, 2, -1]
    two.extend(1)
    assert copied_to(assign) == [seqlens]
    assert sequences.seqlens.tolist() == [3, 2, -1]
    one.extend(1)
    assert copied_to(assign) == [table, seqlens]
    assert sequences.page_table[0, :2].tolist() == one.pages and sequences.seqlens.tolist() == [4, 2, -1]
    assert places == (sequences.seqlens.data_ptr(), sequences.page_table.data_ptr())


def test_compiles(device: str) -> None:
    """A step of one layer without a graph break: cache and lengths are changed in place there, too."""
    sequences = tessera.CachedSequences.paged(3, 4, device=device)
    layer = tessera.KVCache(*normal(device, 12, 2, 4, HEADS_K, D).unbind(1))
    q, k, v = (normal(device, 3, 1, heads, D) for heads in (HEADS, HEADS_K, HEADS_K))
    sequences.assign([5, 0], [[7, 3], [1]])
    before = layer.k.clone(), layer.v.clone()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.append(k, v, sequences)
        o: Tensor = layer.attend(q, sequences.first(3), causal=True)
        sequences.advance(1)
        return o

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        layer.k.copy_(before[0])
        layer.v.copy_(before[1])
        sequences.assign([5, 0])
        assert sequences.seqlens is not None
        results.append((function(q, k, v), layer.k.clone(), layer.v.clone(), sequences.seqlens.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][3].tolist() == [6, 1, -1] and not torch.equal(results[0][1], before[0])


def test_graphs(device: str) -> None:
    """A captured step is replayed after `assign` and `advance`."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    pool = tessera.PagePool(16, 4)
    sequences = tessera.CachedSequences.paged(3, 8, device=device)
    layer = layers(device, 16, 4)["side by side"]
    q, k, v = (normal(device, 3, 1, heads, d) for heads, d in ((HEADS, D), (HEADS_K, D), (HEADS_K, DV)))

    def step() -> Tensor:
        layer.append(k, v, sequences)
        o: Tensor = layer.attend(q, sequences, causal=True)
        sequences.advance(1)
        return o

    step()  # of no sequences
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    held = [tessera.PagedSequence(pool) for _ in range(2)]
    for length in range(1, 10):
        for x in held:
            x.extend(1)
        sequences.assign([length - 1] * 2, [x.pages for x in held])
        graph.replay()
        assert sequences.seqlens is not None and sequences.seqlens.tolist() == [length, length, -1]
        sequences.assign([length - 1] * 2)
        assert torch.equal(out, step()) and (out[2] == 0).all()


def test_rows_with_an_index_and_left_padding(device: str) -> None:
    """A cache without pages: each step by the object is the same as by the functions."""
    layer = tessera.KVCache(normal(device, 6, 20, HEADS_K, D), normal(device, 6, 20, HEADS_K, DV))
    k_cache, v_cache = layer.k.clone(), layer.v.clone()
    place: dict[str, Any] = {"cache_index": int32([4, 0, 5], device)}
    leftpad = int32([2, 0, 1], device)
    for lengths in ("before", "after"):
        sequences = tessera.CachedSequences(int32([7, 3, -1], device), leftpad=leftpad, lengths=lengths, **place)
        assert sequences.seqlens is not None
        expected_lengths = [7, 3, -1]
        for added in (3, 1):
            q, k, v = (normal(device, 3, added, h, d) for h, d in ((HEADS, D), (HEADS_K, D), (HEADS_K, DV)))
            counts = {"seqlens": int32(expected_lengths, device)}
            expected_lengths = [n + added if n >= 0 else n for n in expected_lengths]
            tessera.append(k, v, k_cache, v_cache, **counts, **place)
            expected = tessera.cached_attention(
                q, k_cache, v_cache, **counts, **place, lengths="before", seqlen_new=added, leftpad=leftpad, causal=True
            )
            if lengths == "after":
                sequences.advance(int32([added, added, 9], device))
            layer.append(k, v, sequences)
            assert torch.equal(layer.attend(q, sequences, causal=True), expected)
            if lengths == "before":
                sequences.advance(added)
            assert sequences.seqlens.tolist() == expected_lengths
            assert torch.equal(layer.k, k_cache) and torch.equal(layer.v, v_cache)
            pair = layer.attend(q[:2], sequences.first(2), causal=True, seqlen_new=0 if lengths == "before" else None)
            assert torch.equal(pair, expected[:2])
    q = normal(device, 6, 1, HEADS, D)
    everything = layer.attend(q, tessera.CachedSequences(None))
    assert torch.equal(everything, tessera.cached_attention(q, layer.k, layer.v))


def test_views_of_the_first_sequences(device: str) -> None:
    """They share lengths, table, and what `assign` remembers of it."""
    sequences = tessera.CachedSequences.paged(4, 3, device=device, lengths="after")
    assert sequences.seqlens is not None and sequences.page_table is not None
    sequences.assign([9, 8, 7, 6], [[1, 2], [3], [4], [5]])
    two = sequences.first(2)
    two.assign([1, 2], [[1, 2], [6, 7, 8]])
    assert sequences.seqlens.tolist() == [1, 2, 7, 6] and two.lengths == "after"
    assert [row[0] for row in sequences.page_table.tolist()] == [1, 6, 4, 5]
    sequences.assign([1, 2, 3], [[1, 2], [3], [4]])
    assert [row[0] for row in sequences.page_table.tolist()] == [1, 3, 4, 5]
    assert sequences.seqlens.tolist() == [1, 2, 3, -1]
    sequences.assign([])
    assert sequences.seqlens.tolist() == [-1] * 4


def test_pages_are_read_before_any_is_written(device: str) -> None:
    """A page that was freed and is the target of one copy may be the source of another."""
    cache = layers(device, 4, 2)["heads outside slots"]
    cache.k.copy_(torch.arange(4.0, device=device).view(4, 1, 1, 1).expand_as(cache.k))
    cache.v.copy_(cache.k)
    cache.copy_pages(torch.tensor([[0, 1], [1, 2], [2, 0]], device=device))
    for x in (cache.k, cache.v):
        assert x[:, 0, 0, 0].tolist() == [2, 0, 1, 3] and x[:, -1, -1, -1].tolist() == [2, 0, 1, 3]


def test_signatures_are_those_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what the objects hold; each argument arrives in the place of the name under which it is given, and defaults
    of the function in those of the others."""
    places = {
        name: tuple(inspect.signature(getattr(cache, name)).parameters) for name in ("append", "cached_attention")
    }
    sequences = tessera.CachedSequences(
        int32([1], "cpu"), int32([0], "cpu")[None], int32([0], "cpu"), int32([0], "cpu")
    )
    of_layer = {"k_cache": "k", "v_cache": "v", "k_scale": "k_scale", "v_scale": "v_scale"}
    elements = torch.zeros(1, 4, 1, 8, dtype=torch.int8)
    layer = tessera.KVCache(elements, elements.clone(), torch.ones(()), torch.ones(()))
    held = {*of_layer, "seqlens", "lengths", "page_table", "cache_index", "leftpad"}
    slots = {"slot_mapping", "rotary_positions"}
    by_sequence = {
        "cu_seqlens_new",
        "max_seqlen_new",
        "cu_seqlens_q",
        "max_seqlen_q",
        "rotary_seqlens",
        "rotary_constant_q",
    }
    for method, function, missing, positional in (
        (layer.append, tessera.append, slots, (sequences,)),
        (layer.write, tessera.append, by_sequence, ()),
        (layer.attend, tessera.cached_attention, set(), (sequences,)),
    ):
        whole = inspect.signature(function).parameters
        expected = {name: x.default for name, x in whole.items() if name not in held | missing}
        mine = inspect.signature(method).parameters
        found = {name: x.default for name, x in mine.items() if name != "sequences"}
        expected |= {"slot_mapping": inspect.Parameter.empty} if "slot_mapping" in found else {}
        assert found == expected
        arrived: dict[str, Any] = {}

        def record(*all_of_them: Any, into: dict[str, Any] = arrived, names: Any = places[function.__name__]) -> None:
            into.update(zip(names, all_of_them, strict=False))

        monkeypatch.setattr(cache, function.__name__, record)
        given: dict[str, Any] = {name: torch.zeros(1) if name == "q" else object() for name in found}
        tensors = [given.pop(name) for name, x in mine.items() if name in given and x.kind is not x.KEYWORD_ONLY]
        if method == layer.append or method == layer.attend:
            tensors[len(tensors) :] = positional
        method(*tensors, **given)
        assert set(arrived) - {"detaches"} == set(whole)
        for name, value in given.items():
            assert arrived[name] is value, name
        for name in missing if positional else (missing | held - {*of_layer, "leftpad"}):
            assert arrived[name] == whole[name].default, name
        for name, attribute in of_layer.items():
            assert arrived[name] is getattr(layer, attribute), name
        if positional:
            for name in held & set(whole) - {*of_layer, "lengths"}:
                assert arrived[name] is getattr(sequences, name), name
            assert arrived["lengths"] == "before"


def test_refusals(device: str) -> None:
    rows = normal(device, 2, 8, HEADS_K, D)
    seqlens, table = int32([1, 2], device), int32([0, 1], device)[:, None]
    full, paged = tessera.CachedSequences(None), tessera.CachedSequences(seqlens, table)
    indexed = tessera.CachedSequences(seqlens, table, cache_index=seqlens)
    pool = tessera.PagePool(2, 4)
    three = tessera.PagedSequence(pool)
    three.extend(3)
    for call, said in (
        (lambda: tessera.KVCache(rows[0], rows), r"k has shape \(8, 2, 32\): must be \(rows or pages, slots"),
        (lambda: tessera.KVCache(rows, rows[:1]), r"v has shape \(1, 8, 2, 32\), but k has \(2, 8, 2, 32\)"),
        (lambda: tessera.KVCache(rows, rows.half()), r"v is of torch.float16 .* but k is of torch.bfloat16"),
        (
            lambda: tessera.KVCache(rows.transpose(2, 3), rows),
            r"k has strides \(512, 64, 1, 32\): the last one must be 1",
        ),
        (
            lambda: tessera.KVCache(rows, rows).copy_pages(table.long()),
            r"copies has shape \(2, 1\): must be \(copies, 2",
        ),
        (lambda: tessera.KVCache(rows, rows).copy_pages(table), r"copies.dtype = int32: must be int64"),
        (lambda: tessera.CachedSequences(seqlens.long()), r"seqlens.dtype = int64: must be int32"),
        (lambda: tessera.CachedSequences(table), r"seqlens has shape \(2, 1\): must be \(batch,\)"),
        (lambda: tessera.CachedSequences(seqlens, seqlens), r"page_table has shape \(2,\): must be \(batch, pages"),
        (
            lambda: tessera.CachedSequences(seqlens, table.float()),
            r"page_table.dtype = float32: must be int32 or int64",
        ),
        (lambda: tessera.CachedSequences(seqlens, lengths="full"), r"lengths = 'full': must be 'before' or 'after'"),
        (lambda: paged.assign([1, 2, 3]), "seqlens has 3 lengths: must not be more than the 2 sequences"),
        (lambda: paged.assign([1, 2], [[0]]), "pages has 1 rows: must be one for each of the 2 lengths"),
        (lambda: paged.assign([1], [[0, 1]]), r"pages\[0\] has 2 pages: must not be more than 1"),
        (lambda: indexed.assign([1], [[0]]), "pages is given, but cache_index picks rows"),
        (lambda: tessera.CachedSequences(seqlens).assign([1], [[0]]), "pages is given, but page_table is None"),
        (lambda: full.assign([1]), "seqlens is None: there are no lengths to assign"),
        (lambda: full.advance(1), "seqlens is None: there are no lengths to advance"),
        (lambda: paged.first(3), r"count = 3: must lie in \[0, 2\]"),
        (lambda: tessera.PagePool(0, 4), "num_pages = 0: must be 1 or more"),
        (lambda: tessera.PagePool(4, -1), "page_size = -1: must be 1 or more"),
        (lambda: pool.holders(2), r"page = 2: must lie in \[0, 2\)"),
        (lambda: three.extend(-1), "added = -1: must be 0 or more"),
        (lambda: three.fork(4), r"length = 4: must lie in \[0, 3\], the slots of this sequence"),
        (lambda: three.truncate(-1), r"length = -1: must lie in \[0, 3\]"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match="v is of type 'list': must be a torch tensor"):
        tessera.KVCache(rows, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seqlens is of type 'list': must be a torch tensor"):
        tessera.CachedSequences([1])  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'KVCaches'"):
        tessera.KVCaches  # noqa: B018
    with pytest.raises(tessera.OutOfPages, match="2 pages are wanted, but only 1 of 2 are free"):
        three.extend(6)
