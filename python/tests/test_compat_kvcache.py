"""flash_attn_with_kvcache of FlashAttention-2 and -3, and pages in their other functions: what is appended is there bit
for bit, nothing else is touched, and attention is what plain torch computes in double from the cache as it is then."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

from tessera.compat import flash_attn_interface as fa3
from tessera.compat.flash_attn import flash_attn_interface as fa2

INFINITY = float("inf")
BATCH, CAPACITY = 4, 96


class Call:
    """One call at random, and what it must give."""

    def __init__(self, device: str, dtype: torch.dtype, version: int, **given: Any) -> None:
        def pick(name: str, *values: Any) -> Any:
            return given[name] if name in given else random.choice(values)

        group, heads_k, d = pick("group", 1, 2, 4), 2, pick("head_dim", 32, 64)
        if device == "cuda":  # rows of queries that share a head of keys
            given.setdefault("seqlen_q", random.choice([n for n in (1, 3, 8) if n * group <= 16]))
        self.version = version
        self.seqlen_q = seqlen_q = pick("seqlen_q", 1, 3, 8, 33)
        page_size = pick("page_size", None, 1, 4, 16, 128)
        self.with_index, with_leftpad = pick("index", False, True), pick("leftpad", False, True)
        rows = 2 * BATCH if self.with_index else BATCH
        self.cache = caches.random_cache(rows, CAPACITY, page_size, heads_k, (d, d), dtype, device)
        self.cache_rows = random.sample(range(rows), BATCH) if self.with_index else list(range(BATCH))
        self.with_new = pick("new", False, True)
        self.packed_q = version == 3 and pick("packed_q", False, True)
        self.packed_new = version == 3 and pick("packed_new", False, True)
        most_new = random.randint(1, 20) if self.with_new else 0
        self.news = [random.randint(0, most_new) if self.packed_new else most_new for _ in range(BATCH)]
        self.seqlens = caches.random_lengths(BATCH, self.cache.capacity - most_new, device)
        if pick("idle", False, True):
            self.seqlens[random.randrange(BATCH)] = -1
        lengths = self.seqlens.tolist()
        self.leftpad = [random.randint(0, max(n, 0)) if with_leftpad else 0 for n in lengths]

        self.queries = [random.randint(0, seqlen_q) if self.packed_q else seqlen_q for _ in range(BATCH)]
        shape = (sum(self.queries),) if self.packed_q else (BATCH, seqlen_q)
        self.q = torch.randn(*shape, group * heads_k, d, device=device, dtype=dtype)
        new = (sum(self.news),) if self.packed_new else (BATCH, most_new)
        self.k, self.v = torch.randn(2, *new, heads_k, d, device=device, dtype=dtype)
        self.options: dict[str, Any] = dict(
            pick("mask", {}, {"causal": True}, {"window_size": (7, 2)}, {"causal": True, "window_size": (5, -1)})
        )
        if version == 3:
            self.options |= pick("chunk", {}, {}, {"attention_chunk": 10})
        elif pick("alibi", False, True):
            self.options["alibi_slopes"] = torch.rand(group * heads_k, device=device)
        self.options |= pick("softcap", {}, {}, {"softcap": 3.0})

        self.rotary_dim = int(pick("rotary", 0.0, 0.5, 1.0) * d) if self.with_new else 0
        self.interleaved = pick("interleaved", False, True)
        self.starts = None
        if self.rotary_dim:
            tables = 2 * self.cache.capacity + 64
            angle = 6.28 * torch.rand(tables, self.rotary_dim // 2, device=device)
            self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
            if version == 3 and pick("starts", False, True):
                self.starts = torch.randint(0, self.cache.capacity, (BATCH,), device=device, dtype=torch.int32)
        self.device = device

    def run(self, cache: caches.Cache) -> tuple[Tensor, Tensor]:
        named: dict[str, Any] = {"cache_seqlens": self.seqlens, "return_softmax_lse": True, **self.options}
        if self.with_new:
            named |= {"k": self.k, "v": self.v}
        if any(self.leftpad):
            named["cache_leftpad"] = self.int32(self.leftpad)
        if self.with_index:
            named["cache_batch_idx"] = self.int32(self.cache_rows)
        if cache.page_table is not None:
            named["block_table" if self.version == 2 else "page_table"] = cache.page_table
        if self.rotary_dim:
            named |= {"rotary_cos": self.cos, "rotary_sin": self.sin, "rotary_interleaved": self.interleaved}
        if self.starts is not None:
            named["rotary_seqlens"] = self.starts
        if self.packed_q:
            named |= {"cu_seqlens_q": self.bounds(self.queries), "max_seqlen_q": self.seqlen_q}
        if self.packed_new:
            named["cu_seqlens_k_new"] = self.bounds(self.news)
        module: Any = fa2 if self.version == 2 else fa3
        out, lse, *rest = module.flash_attn_with_kvcache(self.q, cache.k, cache.v, **named)
        assert all(x.numel() == 0 for x in rest)
        return out, lse

    def int32(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def bounds(self, lengths: list[int]) -> Tensor:
        return self.int32([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def sequence(self, b: int, lengths: list[int]) -> Any:
        start = sum(lengths[:b])
        return slice(start, start + lengths[b])

    def expected(self, cache: caches.Cache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(k, v, rotated q, rows of k that are new) after the append; k and q in double."""
        k, v, q = self.cache.k.flatten(0, 1).double(), self.cache.v.flatten(0, 1).clone(), self.q.double()
        touched = torch.zeros(k.shape[0], dtype=torch.bool, device=self.device)
        left, right = self.options.get("window_size", (-1, -1))
        by_row = self.options.get("causal", False) or left >= 0 or "attention_chunk" in self.options
        # FlashAttention-3 takes a right end of seqlen_q - 1 for none.
        by_row |= right >= 0 and (self.version == 2 or right < self.seqlen_q - 1)
        for b in range(BATCH):
            length = int(self.seqlens[b])
            if length < 0 or not self.with_new:
                continue
            new = self.sequence(b, self.news) if self.packed_new else b
            at = cache.slots(self.cache_rows[b])[length : length + self.news[b]].to(self.device)
            assert (at >= 0).all()
            start = length if self.starts is None else int(self.starts[b])
            position = start + torch.arange(self.news[b])
            rows = self.k[new].double()
            k[at] = rows if not self.rotary_dim else caches.rotate(rows, position, self.cos, self.sin, self.interleaved)
            v[at] = self.v[new]
            touched[at] = True
            if self.rotary_dim:
                mine = self.sequence(b, self.queries) if self.packed_q else b
                position = start + torch.arange(self.queries[b]) * int(by_row)
                q[mine] = caches.rotate(self.q[mine], position, self.cos, self.sin, self.interleaved)
        return k, v, q, touched

    def check(self) -> None:
        cache = self.cache.clone()
        if cache.page_table is not None:  # what lies beyond the lengths is not read
            table = cache.page_table.clone()
            for b, row in enumerate(self.cache_rows):
                used = -(-max(int(self.seqlens[b]) + self.news[b], 0) // cache.k.shape[1])
                table[row, used:] = -1
            cache = cache._replace(page_table=table)
        result = self.run(cache)
        k, v, q, touched = self.expected(self.cache)
        mine = cache.k.flatten(0, 1)
        assert torch.equal(cache.v.flatten(0, 1), v), "values are not bit for bit what was appended"
        assert torch.equal(mine[~touched], self.cache.k.flatten(0, 1)[~touched]), "other keys were touched"
        eps = torch.finfo(mine.dtype).eps
        torch.testing.assert_close(mine.double(), k, rtol=eps, atol=16 * torch.finfo(torch.float32).eps)
        if not self.rotary_dim:
            assert torch.equal(mine, k.to(mine.dtype))

        sequences = []
        for b in range(BATCH):
            length = int(self.seqlens[b])
            end = 0 if length < 0 else length + self.news[b]
            rows = self.sequence(b, self.queries) if self.packed_q else b
            sequences.append((rows, self.cache_rows[b], self.leftpad[b], end))
        options = {"chunk" if name == "attention_chunk" else name: value for name, value in self.options.items()}
        if "window_size" in options:
            options["window"] = options.pop("window_size")
        q = q.to(mine.dtype)
        exact = caches.attend(q, cache, sequences, **options)
        plain = caches.attend(q, cache, sequences, dtype=mine.dtype, **options)
        if self.version == 2:
            exact = exact[0], exact[1].masked_fill(exact[1] == -INFINITY, INFINITY)
        caches.check_close(result, exact, plain, rotated=self.rotary_dim > 0)


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16] + ([torch.float32] if device == "cpu" else [])


@pytest.mark.parametrize("version", (2, 3))
@pytest.mark.parametrize("page_size", (None, 1, 4, 16, 128))
def test_random_calls(version: int, page_size: int | None, device: str) -> None:
    for number in range(30):
        Call(device, random.choice(dtypes(device)), version, page_size=page_size, new=number % 3 > 0).check()


@pytest.mark.parametrize("version", (2, 3))
@pytest.mark.parametrize("rotary", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window_size": (4, 1)}), ids=("none", "causal", "window"))
def test_rotary_positions(version: int, rotary: float, mask: dict[str, Any], device: str) -> None:
    """Of queries, above all: by row if a mask says so, otherwise the first one's."""
    for interleaved in (False, True):
        for seqlen_q in (1, 3, 8):
            Call(
                device, torch.bfloat16, version, new=True, rotary=rotary, mask=mask, interleaved=interleaved,
                seqlen_q=seqlen_q, group=2, chunk={},
            ).check()  # fmt: skip


def small(device: str, seqlen_q: int = 1, seqlen_new: int = 1) -> tuple[Tensor, ...]:
    """q, k_cache, v_cache, k, v of two sequences."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    cache = (torch.randn(2, 16, 2, 32, **kind) for _ in range(2))
    new = (torch.randn(2, seqlen_new, 2, 32, **kind) for _ in range(2))
    return torch.randn(2, seqlen_q, 4, 32, **kind), *cache, *new


def test_windows_that_hide_nothing_are_none(device: str) -> None:
    """For the positions of rotated queries, where upstream says so: it differs between versions."""
    q, k_cache, v_cache, k, v = small(device, 3, 3)
    angle = torch.rand(40, 8, device=device)
    rotary: dict[str, Any] = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_seqlens": 5}
    assert k_cache.shape[1] == 16

    def out(module: Any, left: int, right: int) -> Tensor:
        caches_ = k_cache.clone(), v_cache.clone()
        o: Tensor = module.flash_attn_with_kvcache(q, *caches_, k, v, window_size=(left, right), **rotary)
        return o

    for module, left, right in ((fa2, 16, 16), (fa3, 15, 2)):
        assert torch.equal(out(module, left, -1), out(module, -1, -1))
        assert torch.equal(out(module, -1, right), out(module, -1, -1))
        assert not torch.equal(out(module, left - 1, -1), out(module, -1, -1))
        assert not torch.equal(out(module, -1, right - 1), out(module, -1, -1))


def test_padding_rows_are_left_alone(device: str) -> None:
    """Sequences of negative length, as continuous batching pads its batches, with page numbers of -1."""
    q, _, _, k, v = small(device)
    cache = caches.random_cache(2, 16, 4, 2, (32, 32), torch.bfloat16, device)
    assert cache.page_table is not None
    cache.page_table[1] = -1
    before = cache.clone()
    seqlens = torch.tensor([3, -1], dtype=torch.int32, device=device)
    for module, name, empty in ((fa2, "block_table", INFINITY), (fa3, "page_table", -INFINITY)):
        out, lse, *_ = module.flash_attn_with_kvcache(  # type: ignore[attr-defined]
            q, cache.k, cache.v, k, v, cache_seqlens=seqlens, causal=True, return_softmax_lse=True,
            **{name: cache.page_table},
        )  # fmt: skip
        assert (out[1] == 0).all() and (lse[1] == empty).all() and (out[0] != 0).any() and lse[0].isfinite().all()
    at = int(cache.slots(0)[3])
    changed = (cache.v != before.v).flatten(0, 1).any((-1, -2)).nonzero().flatten().tolist()
    assert changed == [at]


def test_every_row_is_appended(device: str) -> None:
    """Also of a sequence without queries, and what no query's window reaches."""
    q, k_cache, v_cache, k, v = small(device, 2, 4)
    cu = torch.tensor([0, 2, 2], dtype=torch.int32, device=device)
    fa3.flash_attn_with_kvcache(
        q[0], k_cache, v_cache, k, v, cache_seqlens=6, cu_seqlens_q=cu, max_seqlen_q=2, causal=True, window_size=(0, 0)
    )
    assert torch.equal(k_cache[:, 6:10], k) and torch.equal(v_cache[:, 6:10], v)


def test_lengths(device: str) -> None:
    """An int, a tensor, and none, which is the whole cache."""
    q, k_cache, v_cache, _, _ = small(device)
    for module in (fa2, fa3):
        number = module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
        tensor = torch.full((2,), 7, dtype=torch.int32, device=device)
        assert torch.equal(number, module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=tensor))
        assert torch.equal(number, module.flash_attn_with_kvcache(q, k_cache[:, :7], v_cache[:, :7]))


def test_hints_change_nothing(device: str) -> None:
    q, k_cache, v_cache, _, _ = small(device)
    seqlens = torch.tensor([7, 16], dtype=torch.int32, device=device)
    expected = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens)
    schedule = fa3.get_scheduler_metadata(2, 1, 16, 4, 2, 32, seqlens, causal=True)
    assert schedule.dtype is torch.int32 and schedule.device == seqlens.device
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seqlens, scheduler_metadata=schedule, num_splits=3, pack_gqa=True,
        sm_margin=4, cu_seqlens_k_new=seqlens,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(fa2.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, num_splits=3), expected)


def paged(device: str) -> tuple[Tensor, Tensor, caches.Cache, list[Any], dict[str, Any]]:
    """Packed q, how many keys its three sequences have, their cache, `sequences` of caches.attend, and arguments."""
    cache = caches.random_cache(3, CAPACITY, 16, 2, (32, 32), torch.bfloat16, device)
    q = torch.randn(7, 4, 32, device=device, dtype=torch.bfloat16)
    keys = caches.random_lengths(3, CAPACITY, device)
    sequences = [(slice(*at), b, 0, int(keys[b])) for b, at in enumerate(((0, 2), (2, 4), (4, 7)))]
    cu = torch.tensor([0, 2, 4, 7], dtype=torch.int32, device=device)
    return q, keys, cache, sequences, {"cu_seqlens_q": cu, "max_seqlen_q": 3}


def both(q: Tensor, cache: caches.Cache, sequences: list[Any], **options: Any) -> tuple[Any, Any]:
    """In double and in q's type."""
    exact = caches.attend(q, cache, sequences, **options)
    return exact, caches.attend(q, cache, sequences, dtype=q.dtype, **options)


def test_blocks_of_packed_keys(device: str) -> None:
    """flash_attn_varlen_func of version 2 with a block_table, and the function under it with all about pages."""
    q, keys, cache, sequences, packed = paged(device)
    cu_k = torch.nn.functional.pad(keys.cumsum(0), (1, 0)).to(torch.int32)
    exact, plain = both(q, cache, sequences, causal=True, softcap=5.0)
    exact = exact[0], exact[1].masked_fill(exact[1] == -INFINITY, INFINITY)
    out, lse, matrix = fa2.flash_attn_varlen_func(
        q, cache.k, cache.v, **packed, cu_seqlens_k=cu_k, max_seqlen_k=CAPACITY, causal=True, softcap=5.0,
        block_table=cache.page_table, return_attn_probs=True,
    )  # fmt: skip
    caches.check_close((out, lse), exact, plain)
    assert matrix.numel() == 0

    leftpad = [random.randint(0, n) for n in keys.tolist()]
    sequences = [(rows, b, pad, end) for (rows, b, _, end), pad in zip(sequences, leftpad, strict=True)]
    exact, plain = both(q, cache, sequences, window=(9, 3))
    exact = exact[0], exact[1].masked_fill(exact[1] == -INFINITY, INFINITY)
    out, lse, *_ = fa2._flash_attn_varlen_forward(
        q, cache.k, cache.v, packed["cu_seqlens_q"], cu_k, 3, CAPACITY, 0.0, 32**-0.5, False, 9, 3,
        block_table=cache.page_table, seqused_k=keys,
        leftpad_k=torch.tensor(leftpad, dtype=torch.int32, device=device),
    )  # fmt: skip
    caches.check_close((out, lse), exact, plain)

    cu_q = packed["cu_seqlens_q"]
    with pytest.raises(NotImplementedError, match="with block_table: q requires a gradient"):
        fa2.flash_attn_varlen_func(
            q.clone().requires_grad_(), cache.k, cache.v, cu_q, cu_k, 3, 3, block_table=cache.page_table
        )
    with pytest.raises(NotImplementedError, match=r"dropout_p = 0\.1 with block_table: must be 0"):
        fa2.flash_attn_varlen_func(q, cache.k, cache.v, cu_q, cu_k, 3, 3, dropout_p=0.1, block_table=cache.page_table)


def test_pages_of_the_operator(device: str) -> None:
    """torch.ops.flash_attn_3._flash_attn_forward over a cache: pages, an index of their table's rows, left padding."""
    q, keys, cache, sequences, packed = paged(device)
    rows, leftpad = random.sample(range(3), 3), [random.randint(0, n) for n in keys.tolist()]
    sequences = [(mine, rows[b], leftpad[b], end) for b, (mine, _, _, end) in enumerate(sequences)]
    exact, plain = both(q, cache, sequences, causal=True, chunk=12)
    out, lse, *rest = fa3._flash_attn_forward(
        q, cache.k, cache.v, **packed, seqused_k=keys, page_table=cache.page_table, causal=True, attention_chunk=12,
        kv_batch_idx=torch.tensor(rows, dtype=torch.int32, device=device),
        leftpad_k=torch.tensor(leftpad, dtype=torch.int32, device=device), scheduler_metadata=keys,
    )  # fmt: skip
    caches.check_close((out, lse), exact, plain)
    assert all(x.numel() == 0 for x in rest)
    for name in ("cu_seqlens_k", "seqused_q"):
        with pytest.raises(NotImplementedError, match=f"_flash_attn_forward over a cache: {name} is given"):
            fa3._flash_attn_forward(q, cache.k, cache.v, **packed, page_table=cache.page_table, **{name: keys})


def test_attention_chunk(device: str) -> None:
    """Of dense keys, in all functions that have it, where no gradient is asked for."""
    qkv = torch.randn(2, 8, 3, 2, 32, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    cache = caches.Cache(k, v, None, 8)
    for options in ({"causal": True}, {"window": (2, 1)}):
        exact, plain = both(q, cache, [(0, 0, 0, 8), (1, 1, 0, 8)], chunk=3, **options)
        named = {{"window": "window_size"}.get(name, name): value for name, value in options.items()}
        named |= {"attention_chunk": 3, "return_attn_probs": True}
        caches.check_close(fa3.flash_attn_func(q, k, v, **named), exact, plain)
        caches.check_close(fa3.flash_attn_qkvpacked_func(qkv, **named), exact, plain)
        used = torch.tensor([8, 5], dtype=torch.int32, device=device)
        exact, plain = both(q, cache, [(0, 0, 0, 8), (1, 1, 0, 5)], chunk=3, **options)
        result = fa3.flash_attn_varlen_func(q, k, v, None, None, None, None, seqused_k=used, **named)
        caches.check_close(result, exact, plain)


def test_refusals(device: str) -> None:
    q, k_cache, v_cache, k, v = small(device)
    for module in (fa2, fa3):
        call: Any = module.flash_attn_with_kvcache
        with pytest.raises(ValueError, match="v is None, but k is given"):
            call(q, k_cache, v_cache, k, cache_seqlens=3)
        with pytest.raises(ValueError, match="cache_seqlens is None, but k is given"):
            call(q, k_cache, v_cache, k, v)
        with pytest.raises(ValueError, match="rotary_cos is given, but k is None"):
            call(q, k_cache, v_cache, rotary_cos=k, rotary_sin=k, cache_seqlens=3)
        with pytest.raises(ValueError, match=r"rotary_sin is None: a tensor is required"):
            call(q, k_cache, v_cache, k, v, rotary_cos=torch.ones(9, 8, device=device), cache_seqlens=3)
        with pytest.raises(ValueError, match=r"k_cache has shape \(1, 16, 2, 32\): must have a row for each of the 2"):
            call(q, k_cache[:1], v_cache[:1], cache_seqlens=3)
        with pytest.raises(ValueError, match=r"seqlens\.dtype = int64: must be int32"):
            call(q, k_cache, v_cache, cache_seqlens=torch.tensor([3, 3], device=device))
        with pytest.raises(ValueError, match=r"window_size = 3: must be a pair"):
            call(q, k_cache, v_cache, window_size=3)
        with pytest.raises(NotImplementedError, match=r"^q\.dtype = torch.float8_e5m2: float8 is for"):
            call(q.to(torch.float8_e5m2), k_cache, v_cache)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"cache.seqlens\[0\] = 16: before 1 new rows must lie in \[0, 15\]"):
                call(q, k_cache, v_cache, k, v, cache_seqlens=16)
    with pytest.raises(NotImplementedError, match=r"^k_cache\.dtype = torch.float8_e4m3fn: float8 is for"):
        fa2.flash_attn_with_kvcache(q, k_cache.to(torch.float8_e4m3fn), v_cache)
