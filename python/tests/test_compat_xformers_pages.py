"""xformers' biases of keys in pages on Tessera: each class against attention over gathered keys; what is refused."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import caches
import pytest
import torch
from torch import Tensor

import tessera
from tessera.compat.xformers.ops import fmha
from tessera.compat.xformers.ops.fmha import _functions
from tessera.compat.xformers.ops.fmha import attn_bias as biases

HEADS, D, DV, WINDOW = 4, 32, 48, 5


class Case(NamedTuple):
    bias: Any
    q: Tensor  # (1, total, heads, head_dim)
    cache: caches.Cache
    sequences: list[tuple[slice, int, int, int]]  # as caches.attend takes them
    options: dict[str, Any]

    @property
    def key(self) -> Tensor:
        return self.cache.k.flatten(0, 1)[None]

    @property
    def value(self) -> Tensor:
        return self.cache.v.flatten(0, 1)[None]


class Kind(NamedTuple):
    paged: Any
    unpaged: Any
    options: dict[str, Any]  # what its band is for caches.attend


KINDS = [
    Kind(biases.PagedBlockDiagonalPaddedKeysMask, biases.BlockDiagonalPaddedKeysMask, {}),
    Kind(
        biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, biases.BlockDiagonalCausalWithOffsetPaddedKeysMask,
        {"causal": True},
    ),
    Kind(
        biases.PagedBlockDiagonalCausalLocalPaddedKeysMask, biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        {"window": (WINDOW - 1, 0)},
    ),
    Kind(biases.PagedBlockDiagonalGappyKeysMask, biases.BlockDiagonalGappyKeysMask, {}),
    Kind(
        biases.PagedBlockDiagonalCausalWithOffsetGappyKeysMask, biases.BlockDiagonalCausalWithOffsetGappyKeysMask,
        {"causal": True},
    ),
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.paged.__name__)


def is_gappy(kind: Kind) -> bool:
    return issubclass(kind.paged, biases.PagedBlockDiagonalGappyKeysMask)


def make_case(kind: Kind, page_size: int, device: str, make_paged: bool = False, heads_k: int = HEADS) -> Case:
    """Sequences without queries, without keys, and with more queries than keys are among them. Slots without a key of
    a sequence are NaN."""
    q_lengths = [1, 0, 7, random.randint(1, 4), 3]
    k_lengths = [random.randint(1, 40), random.randint(1, 40), 4, 0, 40]
    count = len(q_lengths)
    cache = caches.random_cache(count, 43, page_size, heads_k, (D, DV), torch.bfloat16, device)
    table = cache.page_table
    assert table is not None
    starts = [random.randint(0, cache.capacity - n) for n in k_lengths] if is_gappy(kind) else [0] * count
    window = {"window_size": WINDOW} if "window" in kind.options else {}
    own = "from_seqlens_local" if window else "from_seqlens"
    if not make_paged:
        begins = [starts] if is_gappy(kind) else []
        bias = getattr(kind.paged, own)(q_lengths, *begins, k_lengths, table, page_size, **window, device=device)
    elif is_gappy(kind):
        places = [i * cache.capacity + start for i, start in enumerate(starts)] + [count * cache.capacity]
        unpaged = kind.unpaged.from_seqlens(q_lengths, places, k_lengths, device=device)
        bias = unpaged.make_paged(table, page_size, cache.capacity, kind.paged)
    else:
        unpaged = getattr(kind.unpaged, own)(q_lengths, cache.capacity, k_lengths, **window, device=device)
        bias = unpaged.make_paged(table, page_size, kind.paged)
    ends = [sum(q_lengths[: i + 1]) for i in range(count)]
    sequences = [
        (slice(end - n, end), i, start, start + length)
        for i, (end, n, start, length) in enumerate(zip(ends, q_lengths, starts, k_lengths, strict=True))
    ]
    used = torch.zeros(cache.k.shape[0] * page_size, dtype=torch.bool)
    for _, row, first, end in sequences:
        used[cache.slots(row)[first:end]] = True
    for x in (cache.k, cache.v):
        x[~used.view(x.shape[:2]).to(x.device)] = torch.nan
    q = torch.randn(1, sum(q_lengths), HEADS, D, device=device, dtype=torch.bfloat16)
    return Case(bias, q, cache, sequences, kind.options)


def check(case: Case, out: Tensor, lse: Tensor, **more: Any) -> None:
    """(1, total, heads, head_dim_v) and (1, heads, total) are those over each sequence's gathered keys."""
    options = case.options | more
    exact = caches.attend(case.q[0], case.cache, case.sequences, **options)
    plain = caches.attend(case.q[0], case.cache, case.sequences, dtype=case.q.dtype, **options)
    caches.check_close((out[0], lse[0]), exact, plain)


@every_kind
@pytest.mark.parametrize("page_size", (1, 3, 16))
@pytest.mark.parametrize("make_paged", (False, True))
def test_pages(kind: Kind, page_size: int, make_paged: bool, device: str) -> None:
    """o and lse are those over gathered keys, and nothing beside a sequence's keys is read."""
    case = make_case(kind, page_size, device, make_paged)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(case.q, case.key, case.value, case.bias, scale=0.3)
    assert out.shape == (*case.q.shape[:-1], DV) and lse.shape == (1, HEADS, case.q.shape[1])
    check(case, out, lse, softmax_scale=0.3)
    assert torch.equal(fmha.memory_efficient_attention(case.q, case.key, case.value, case.bias, scale=0.3), out)
    moved = case.bias.to(device)
    assert type(moved) is kind.paged
    assert torch.equal(fmha.memory_efficient_attention_forward(case.q, case.key, case.value, moved, scale=0.3), out)


@every_kind
def test_pages_stay_where_they_lie(kind: Kind, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels are given is the caller's memory, page by page, and the caller's table."""
    case = make_case(kind, 16, device)
    given: list[tuple[Any, ...]] = []
    whole: Callable[..., Any] = tessera.cached_attention

    def cached_attention(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        given.append((q, k, v, keywords["page_table"]))
        return whole(q, k, v, **keywords)

    monkeypatch.setattr(_functions.tessera, "cached_attention", cached_attention)
    fmha.memory_efficient_attention(case.q, case.key, case.value, case.bias)
    ((q, k, v, table),) = given
    assert table is case.bias.block_tables
    assert q.data_ptr() == case.q.data_ptr()
    for x, whole_x in ((k, case.cache.k), (v, case.cache.v)):
        assert (x.data_ptr(), x.shape, x.stride()) == (whole_x.data_ptr(), whole_x.shape, whole_x.stride())


@pytest.mark.parametrize("form", ["shared", "groups"])
def test_forms(form: str, device: str) -> None:
    """A head that is expanded over all heads, or over its group."""
    case = make_case(KINDS[1], 16, device, heads_k=1 if form == "shared" else 2)
    q, key, value = case.q, case.key, case.value
    if form == "shared":
        key, value = (x.expand(-1, -1, HEADS, -1) for x in (key, value))
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, key, value, case.bias)
    else:
        key, value = (x.unsqueeze(3).expand(-1, -1, -1, 2, -1) for x in (key, value))
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q.unflatten(2, (2, 2)), key, value, case.bias)
        assert out.shape[2:4] == (2, 2) and lse.shape[1:3] == (2, 2)
        out, lse = out.flatten(2, 3), lse.flatten(1, 2)
    check(case, out, lse)


@every_kind
def test_materialize(kind: Kind, device: str) -> None:
    """The matrix has a column for every slot of the pages up to the highest in the table: 0 where a query sees it."""
    case = make_case(kind, 3, device)
    table = case.bias.block_tables
    queries, slots = case.q.shape[1], (int(table.max()) + 1) * 3
    seen = torch.full((queries, slots), float("-inf"))
    for rows, row, first, end in case.sequences:
        count = rows.stop - rows.start
        for i in range(count):
            for j, slot in enumerate(case.cache.slots(row)[first:end].tolist()):
                right = (end - first - 1 - j) - (count - 1 - i)  # how much nearer the last query is than the last key
                hidden = case.options and right < 0 or "window" in case.options and right >= WINDOW
                if not hidden:
                    seen[rows.start + i, slot] = 0
    shape = (2, queries, table.numel() * 3)
    assert torch.equal(case.bias.materialize(shape), seen.expand(2, -1, -1))
    with pytest.raises(ValueError, match=rf"shape = .*: must end with \({queries}, {table.numel() * 3}\)"):
        case.bias.materialize((queries, slots + 1))


def test_lengths_in_place(device: str) -> None:
    """A bias whose lengths are changed in place means the new ones."""
    case = make_case(KINDS[1], 16, device)
    lengths = [max(n - 1, 0) for n in case.bias.k_seqinfo.seqlen_py]
    case.bias.k_seqinfo.from_seqlens_padded_inplace(lengths)
    sequences = [(rows, row, 0, n) for (rows, row, _, _), n in zip(case.sequences, lengths, strict=True)]
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(case.q, case.key, case.value, case.bias)
    check(case._replace(sequences=sequences), out, lse)


def test_refused(device: str) -> None:
    """Each by the name of what was given."""
    case = make_case(KINDS[1], 16, device)
    attention = fmha.memory_efficient_attention
    q, key, value, bias = case.q, case.key, case.value, case.bias
    name = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
    with pytest.raises(NotImplementedError, match=f"with a {name}: query requires a gradient"):
        attention(q.clone().requires_grad_(), key, value, bias)
    with pytest.raises(NotImplementedError, match=f"p = 0.5 with a {name}: must be 0"):
        attention(q, key, value, bias, p=0.5)
    with pytest.raises(NotImplementedError, match=f"{name}: keys in pages have no gradients"):
        fmha.memory_efficient_attention_backward(q, q, q, q, key, value, bias)
    with pytest.raises(ValueError, match=f"key has {key.shape[1] - 1} tokens: must have whole pages"):
        attention(q, key[:, 1:], value[:, 1:], bias)
    with pytest.raises(ValueError, match=f"query has {q.shape[1] - 1} tokens: must have {q.shape[1]}"):
        attention(q[:, 1:], key, value, bias)
    with pytest.raises(ValueError, match="query has a batch of 2: must be 1"):
        attention(*(x.expand(2, -1, -1, -1) for x in (q, key, value)), bias)
    for table in (bias.block_tables[:-1], bias.block_tables[0]):
        wrong = biases.PagedBlockDiagonalPaddedKeysMask(bias.q_seqinfo, bias.k_seqinfo, table, 16)
        with pytest.raises(ValueError, match=r"block_tables has shape .*: must be \(5, pages\)"):
            attention(q, key, value, wrong)
    with pytest.raises(ValueError, match="window_size = 0: must be at least 1"):
        biases.PagedBlockDiagonalCausalLocalPaddedKeysMask.from_seqlens_local([1], [1], bias.block_tables[:1], 16, 0)
    with pytest.raises(ValueError, match=r"seqlens\[0\] = 49: must be at most padding = 48"):
        biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [49], bias.block_tables[:1], 16)
    with pytest.raises(ValueError, match="seqstarts has 2 numbers: must have 1"):
        biases.PagedBlockDiagonalGappyKeysMask.from_seqlens([1], [0, 4], [3], bias.block_tables[:1], 16)


def test_make_paged_keeps_the_band(device: str) -> None:
    """A class of pages with another band, or of other keys, is refused: it would mean something else."""
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    padded = biases.BlockDiagonalPaddedKeysMask.from_seqlens([3], 4, [3], device=device)
    for wrong in (
        biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, biases.PagedBlockDiagonalGappyKeysMask,
        biases.BlockDiagonalPaddedKeysMask,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"paged_type = {wrong.__name__}: its keys or its band"):
            padded.make_paged(table, 4, wrong)
    for local in (padded.make_local_attention(2, 0), padded.make_local_attention(1, 1)):
        with pytest.raises(ValueError, match="not those of BlockDiagonalLocalAttentionPaddedKeysMask"):
            local.make_paged(table, 4, biases.PagedBlockDiagonalPaddedKeysMask)
    gappy = biases.BlockDiagonalGappyKeysMask.from_seqlens([3, 2], [1, 9, 16], [3, 4], device=device)
    with pytest.raises(ValueError, match="notional_padding = 7: must be a multiple of page_size = 4"):
        gappy.make_paged(table, 4, 7, biases.PagedBlockDiagonalGappyKeysMask)
    for padding, keys in ((12, "sequence 1 has the keys 9...12"), (4, "sequence 1 has the keys 9...12")):
        with pytest.raises(ValueError, match=keys):
            gappy.make_paged(table, 4, padding, biases.PagedBlockDiagonalGappyKeysMask)
