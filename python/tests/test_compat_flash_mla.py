"""FlashMLA's functions on Tessera, against the computation that its own tests compare with, in double."""

import importlib
import math
import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

import reference
import tessera
import tessera.compat
from tessera.compat import flash_mla


def rows_of(cache: Tensor, table: Tensor, b: int, length: int) -> Tensor:
    """The latent rows of a sequence: (length, columns)."""
    at = torch.arange(max(length, 0), device=cache.device)
    page_size = cache.shape[1]
    return cache[table[b, at // page_size].long(), at % page_size, 0]


def expected(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, dv: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Every row is key, and its first columns are value; the scale is that of whole rows."""
    causal, scale = more.get("causal", False), more.get("softmax_scale") or q.shape[-1] ** -0.5
    results = []
    for b, length in enumerate(lengths.tolist()):
        x = rows_of(cache, table, b, length).to(more.get("dtype", torch.double))
        s = torch.einsum("ihd,jd->hij", q[b].to(x.dtype), x) * scale
        if causal:
            hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).tril(s.shape[2] - s.shape[1])
            s = s.masked_fill(~hidden, -math.inf)
        lse = s.logsumexp(-1)
        p = (s - lse[..., None]).exp()
        o = torch.einsum("hij,jd->ihd", p, x[:, :dv])
        alone = lse == -math.inf
        results.append((o.masked_fill(alone.T[..., None], 0), lse.masked_fill(alone, math.inf)))
    return torch.stack([o for o, _ in results]), torch.stack([lse for _, lse in results])


def operands(
    device: str, page_size: int, heads: int, seqlen_q: int, columns: int = 576, batch: int = 4, most: int = 140
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, block_table, cache_seqlens; pages of a sequence in any order, NaN in the slots of nobody."""
    dtype = torch.bfloat16
    pages = -(-most // page_size)
    table = torch.randperm(batch * pages + 2)[: batch * pages].view(batch, pages).to(device, torch.int32)
    cache = torch.full((batch * pages + 2, page_size, 1, columns), torch.nan, device=device, dtype=dtype)
    lengths = caches.random_lengths(batch, most, device)
    for b, length in enumerate(lengths.tolist()):
        at = torch.arange(length, device=device)
        new = torch.randn(length, columns, device=device, dtype=dtype)
        cache[table[b, at // page_size].long(), at % page_size, 0] = new
        table[b, -(-length // page_size) :] = -1
    q = torch.randn(batch, seqlen_q, heads, columns, device=device, dtype=dtype)
    return q, cache, table, lengths


@pytest.mark.parametrize("page_size", (1, 16, 64))
@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("seqlen_q", (1, 2))
def test_decoding(page_size: int, heads: int, seqlen_q: int, device: str) -> None:
    q, cache, table, lengths = operands(device, page_size, heads, seqlen_q)
    lengths[random.randrange(4)] = 0
    before = cache.clone()
    causal = random.choice((False, True)) if seqlen_q == 1 else True
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, seqlen_q * heads, 1)
    o, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata, num_splits, causal=causal)
    assert o.shape == (4, seqlen_q, heads, 512) and o.dtype is torch.bfloat16
    assert lse.shape == (4, heads, seqlen_q) and lse.dtype is torch.float32
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    exact = expected(q, cache, table, lengths, 512, causal=causal)
    plain = expected(q, cache, table, lengths, 512, causal=causal, dtype=torch.bfloat16)
    caches.check_close((o, lse), exact, plain)


def test_other_sizes_and_scale(device: str) -> None:
    q, cache, table, lengths = operands(device, 6, 5, 3, columns=56)
    given: dict[str, Any] = {"softmax_scale": 0.1, "causal": True}
    result = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 40, *flash_mla.get_mla_metadata(), **given)
    exact, plain = (expected(q, cache, table, lengths, 40, dtype=t, **given) for t in (torch.double, torch.bfloat16))
    caches.check_close(result, exact, plain)


def expected_of_lists(q: Tensor, cache: Tensor, indices: Tensor, dv: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Row by row: the slots that are listed, sinks beside them."""
    slots = cache.reshape(-1, cache.shape[-1])
    lengths, sink, dtype = more.get("topk_length"), more.get("attn_sink"), more.get("dtype", torch.double)
    o = torch.zeros(*q.shape[:3], dv, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.inf, dtype=dtype, device=q.device)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            chosen = indices[b, i] if lengths is None else indices[b, i, : int(lengths[b])]
            x = slots[chosen[chosen >= 0].long()].to(dtype)
            if not len(x):
                continue
            s = q[b, i].to(dtype) @ x.T * q.shape[-1] ** -0.5
            lse[b, :, i] = s.logsumexp(-1)
            total = lse[b, :, i] if sink is None else torch.logaddexp(lse[b, :, i], sink.to(dtype))
            o[b, i] = (s - total[:, None]).exp() @ x[:, :dv]
    return o, lse


@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("seqlen_q", (1, 2))
@pytest.mark.parametrize("has_lengths", (False, True))
@pytest.mark.parametrize("has_sink", (False, True))
def test_lists(heads: int, seqlen_q: int, has_lengths: bool, has_sink: bool, device: str) -> None:
    q, cache, _, _ = operands(device, 16, heads, seqlen_q)
    cache = torch.randn_like(cache)
    topk = random.choice((1, 5, 64, 129, 300))
    indices = torch.randint(-1 - cache[:, :, 0, 0].numel() // 3, cache[:, :, 0, 0].numel(), (4, seqlen_q, topk))
    indices = indices.clamp(min=-1).to(device, torch.int32)
    indices[1, 0], indices[2, -1, -1] = -1, -1
    given: dict[str, Any] = {}
    if has_lengths:
        given["topk_length"] = torch.tensor([0, topk, 1, topk // 2], dtype=torch.int32, device=device)
    if has_sink:
        given["attn_sink"] = torch.randn(heads, device=device) * 3
    print("topk", topk)
    metadata = flash_mla.get_mla_metadata()
    result = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, *metadata, indices=indices, **given)
    assert result[0].shape == (4, seqlen_q, heads, 512) and result[1].shape == (4, heads, seqlen_q)
    exact, plain = (expected_of_lists(q, cache, indices, 512, dtype=t, **given) for t in (torch.double, torch.bfloat16))
    caches.check_close(result, exact, plain)


def test_lists_of_a_part_of_a_cache(device: str) -> None:
    """Slots at equal distances, some pages into another tensor; no slot is copied."""
    q, cache, _, _ = operands(device, 4, 3, 1, columns=56)
    layers = torch.randn(2, *cache.shape, device=device, dtype=cache.dtype)
    indices = torch.randint(-1, cache.shape[0] * 4, (4, 1, 9)).to(device, torch.int32)
    result = flash_mla.flash_mla_with_kvcache(q, layers[1], None, None, 40, None, indices=indices)
    exact, plain = (expected_of_lists(q, layers[1], indices, 40, dtype=t) for t in (torch.double, torch.bfloat16))
    caches.check_close(result, exact, plain)
    inside = torch.randn(cache.shape[0], 2, *cache.shape[1:], device=device, dtype=cache.dtype)[:, 1]
    with pytest.raises(ValueError, match=r"k_cache has strides .* so the first must be 224"):
        flash_mla.flash_mla_with_kvcache(q, inside, None, None, 40, None, indices=indices)


def rows_of_bytes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache in rows of 656 bytes, and the values that they stand for in double."""
    values, rotated = cache.split((512, 64), dim=-1)
    groups = values.float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1).nan_to_num(nan=1.0).clamp(min=1e-4) / 448
    elements = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    bytes_of = [
        elements.flatten(-2).view(torch.uint8),
        scales.view(torch.uint8),
        rotated.contiguous().view(torch.uint8),
    ]
    stored = (elements.double() * scales.double()[..., None]).flatten(-2)
    return torch.cat(bytes_of, -1), torch.cat((stored, rotated.double()), -1)


def check_rounded(result: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> None:
    """Of values that a GPU rounds to bfloat16 before they are keys, as plain torch does: both results by its errors."""
    reference.assert_output_close(result[0], exact[0], plain[0])
    seen = exact[1].isfinite()
    assert torch.equal(result[1].isfinite(), seen)
    reference.assert_close("lse", result[1][seen], exact[1][seen], plain[1][seen], floor=2e-5)


@pytest.mark.parametrize("page_size", (1, 64))
@pytest.mark.parametrize("heads", (16, 40))
@pytest.mark.parametrize("seqlen_q", (1, 2))
def test_rows_of_bytes(page_size: int, heads: int, seqlen_q: int, device: str) -> None:
    """Dense: elements of e4m3, scales that a group of columns shares, rotated columns as they are."""
    q, cache, table, lengths = operands(device, page_size, heads, seqlen_q)
    # Groups of all sizes, so that a wrong scale is seen.
    cache[..., :512] *= torch.exp2(torch.randint(-3, 4, (*cache.shape[:3], 4), device=device)).repeat_interleave(
        128, -1
    )
    packed, stored = rows_of_bytes(cache)
    as_type = random.choice((torch.uint8, torch.int8, torch.float8_e4m3fn))
    given: dict[str, Any] = {"causal": True, "softmax_scale": 0.02}
    result = flash_mla.flash_mla_with_kvcache(
        q, packed.view(as_type), table, lengths, 512, None, is_fp8_kvcache=True, **given
    )
    exact, plain = (expected(q, stored, table, lengths, 512, dtype=t, **given) for t in (torch.double, torch.bfloat16))
    check_rounded(result, exact, plain)


@pytest.mark.parametrize("is_fp8", (False, True))
@pytest.mark.parametrize("has_sink", (False, True))
def test_two_caches(is_fp8: bool, has_sink: bool, device: str) -> None:
    """Lists into each, of different lengths and page sizes, some of them empty."""
    seqlen_q, heads = 2, 16
    q, first, _, _ = operands(device, 16, heads, seqlen_q)
    second = torch.randn(5, 8, 1, 576, device=device, dtype=q.dtype)
    first = torch.randn_like(first)
    counts = [x.shape[0] * x.shape[1] for x in (first, second)]
    lists = [torch.randint(-n // 3, n, (4, seqlen_q, k)).clamp(min=-1) for n, k in zip(counts, (70, 9), strict=True)]
    lists[0][1], lists[1][2], lists[0][3, 0], lists[1][3, 0] = -1, -1, -1, -1
    lists = [x.to(device, torch.int32) for x in lists]
    lengths = torch.tensor([9, 4, 0, 1], dtype=torch.int32, device=device)
    packed = [rows_of_bytes(x) if is_fp8 else (x, x.double()) for x in (first, second)]
    given = {"attn_sink": torch.randn(heads, device=device) * 3} if has_sink else {}
    result = flash_mla.flash_mla_with_kvcache(
        q, packed[0][0], None, None, 512, None, is_fp8_kvcache=is_fp8, indices=lists[0], extra_k_cache=packed[1][0],
        extra_indices_in_kvcache=lists[1], extra_topk_length=lengths, **given,
    )  # fmt: skip
    beyond = torch.arange(lists[1].shape[2], device=device) >= lengths[:, None, None]
    joined = torch.cat((lists[0], torch.where((lists[1] < 0) | beyond, -1, lists[1] + counts[0])), -1)
    slots = torch.cat([stored.reshape(-1, 576) for _, stored in packed])[:, None, None]
    exact, plain = (expected_of_lists(q, slots, joined, 512, dtype=t, **given) for t in (torch.double, torch.bfloat16))
    (check_rounded if is_fp8 else caches.check_close)(result, exact, plain)


@pytest.mark.parametrize("has_lengths", (False, True))
@pytest.mark.parametrize("indexer_topk", (0, 5, 40))
def test_many_queries_with_lists(has_lengths: bool, indexer_topk: int, device: str) -> None:
    """flash_mla_sparse_fwd: numbers of no row are none, whichever side they lie on."""
    seqlen_q, heads, topk = 37, 64, 40
    q = torch.randn(seqlen_q, heads, 576, device=device, dtype=torch.bfloat16)
    kv = torch.randn(90, 1, 576, device=device, dtype=torch.bfloat16)
    indices = torch.randint(-20, 120, (seqlen_q, 1, topk), device=device, dtype=torch.int32)
    indices[3], indices[4, 0, :5] = 2**31 - 1, -1
    lengths = torch.randint(0, topk + 1, (seqlen_q,), device=device, dtype=torch.int32) if has_lengths else None
    sink = torch.randn(heads, device=device)
    given: dict[str, Any] = {"attn_sink": sink, "topk_length": lengths, "indexer_topk": indexer_topk}
    out, largest, lse, *indexer = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 576**-0.5, **given)
    assert largest is None and out.shape == (seqlen_q, heads, 512) and lse.shape == (seqlen_q, heads)
    chosen = torch.where((indices >= 0) & (indices < 90), indices, -1)
    if lengths is not None:
        chosen[torch.arange(topk, device=device) >= lengths[:, None, None]] = -1
    rows, slots = q[:, None], kv[:, None]
    exact, plain = (
        expected_of_lists(rows, slots, chosen, 512, dtype=t, attn_sink=sink) for t in (torch.double, torch.bfloat16)
    )
    caches.check_close((out[:, None], lse[..., None]), exact, plain)
    assert len(indexer) == (1 if indexer_topk else 0)
    if indexer:
        of_some = expected_of_lists(rows, slots, chosen[..., :indexer_topk], 512)[1]
        torch.testing.assert_close(indexer[0][..., None].double(), of_some, rtol=1e-4, atol=1e-3)
    for wrong, text in (
        ({"d_v": 576}, r"d_v = 576: must lie in \[1, 575\]"),
        ({"indexer_topk": 41}, r"indexer_topk = 41: must lie in \[0, topk\] = \[0, 40\]"),
        ({"topk_length": torch.ones(2)}, r"topk_length has shape \(2,\): must be \(seqlen_q,\) = \(37,\)"),
        ({"indices": indices[0]}, r"indices has shape \(1, 40\): must be \(seqlen_q, 1, topk\)"),
        ({"kv": kv[:, 0]}, r"kv \(90, 576\): must be"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_mla.flash_mla_sparse_fwd(**{"q": q, "kv": kv, "indices": indices, "sm_scale": 1.0, **wrong})


def test_nothing_is_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a row reach the library as views."""
    q, cache, table, lengths = operands(device, 16, 16, 1)
    seen: list[int] = []
    forward = tessera._native.cached_forward
    views = (0, 1, 2, 16)  # q, k_cache, v_cache, qv

    def record(*arguments: Any) -> Any:
        seen.extend(arguments[i].untyped_storage().data_ptr() for i in views)
        return forward(*arguments)

    monkeypatch.setattr(tessera._native, "cached_forward", record)
    flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, None)
    of_q, of_cache = q.untyped_storage().data_ptr(), cache.untyped_storage().data_ptr()
    assert seen == [of_q, of_cache, of_cache, of_q]


def test_metadata(device: str) -> None:
    """What callers of every generation do with it."""
    lengths = torch.tensor([3, 70, 0], dtype=torch.int32, device=device)
    for more in ({}, {"num_heads_q": 128}, {"num_heads_q": 128, "is_fp8_kvcache": True, "topk": 2048}):
        metadata, num_splits = flash_mla.get_mla_metadata(lengths, 128, 1, **more)
        assert metadata.dtype is num_splits.dtype is torch.int32 and metadata.device == lengths.device
        assert metadata.shape == (1, 8) and num_splits.shape == (4,)
        # Into buffers of a graph, made for more sequences.
        held, held_splits = flash_mla.get_mla_metadata(lengths.new_ones(9), 128, 1)
        held.copy_(metadata)
        held_splits[:4].copy_(num_splits)
    flash_mla.get_mla_metadata(cache_seqlens=lengths, num_heads_per_head_k=128, num_heads_k=1)
    flash_mla.get_mla_metadata(cache_seqlens=lengths, num_q_tokens_per_head_k=128, num_heads_k=1)
    scheduled, none = flash_mla.get_mla_metadata()
    assert none is None and isinstance(scheduled, flash_mla.flash_mla_interface.FlashMLASchedMeta)
    assert not scheduled.have_initialized


def test_graphs(device: str) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs")
    q, cache, table, lengths = operands(device, 64, 16, 1)

    def step() -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, 512, *flash_mla.get_mla_metadata(lengths, 16, 1)
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    lengths.copy_((lengths.float() * torch.rand(4, device=device)).int())
    graph.replay()
    assert all(map(torch.equal, (out, lse), step()))


def test_compiles(device: str) -> None:
    q, cache, table, lengths = operands(device, 16, 16, 1)

    def layer(q: Tensor, cache: Tensor) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, 512, *flash_mla.get_mla_metadata(lengths, 16, 1)
        )

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, cache)
    assert all(map(torch.equal, layer(q, cache), compiled))


def test_names() -> None:
    """Those that callers import."""
    with tessera.compat.install(["flash_mla"]):
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # type: ignore[import-not-found]

        assert flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
        assert get_mla_metadata is flash_mla.get_mla_metadata
        with pytest.raises(tessera.compat.MissingModuleError, match="flash_mla_with_kvcache is there"):
            importlib.import_module("flash_mla.cuda")


def test_refusals(device: str) -> None:
    q, cache, table, lengths = operands(device, 16, 16, 1)
    x = torch.zeros(1, device=device)

    def decode(**given: Any) -> Any:
        arguments = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": 512}
        return flash_mla.flash_mla_with_kvcache(**(arguments | {"tile_scheduler_metadata": None} | given))

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_table": None}, "block_table is None: a tensor is required"),
        ({"cache_seqlens": None}, "cache_seqlens is None: a tensor is required"),
        ({"head_dim_v": 576}, r"head_dim_v = 576: must lie in \[1, 575\]"),
        ({"head_dim_v": 0}, r"head_dim_v = 0: must lie in \[1, 575\]"),
        ({"k_cache": cache[..., :512]}, r"k_cache has shape .*: its rows must have 576 columns, as q's have"),
        ({"k_cache": cache.half()}, "k_cache.dtype = float16, but q.dtype = bfloat16"),
        ({"block_table": table[:2]}, "page_table has shape"),
        ({"cache_seqlens": lengths.long()}, "seqlens.dtype = int64: must be int32"),
        ({"topk_length": lengths}, "topk_length is given, but indices is None"),
        ({"attn_sink": x}, r"attn_sink has shape \(1,\): must be \(num_heads,\) = \(16,\)"),
        ({"indices": table}, r"indices has shape .*: must be \(batch, seqlen_q, topk\) = \(4, 1, topk\)"),
        ({"indices": table[:, None], "causal": True}, "causal = True together with indices"),
        ({"indices": table[:, None], "topk_length": x}, r"topk_length has shape \(1,\): must be \(batch,\) = \(4,\)"),
        ({"extra_k_cache": cache}, "extra_k_cache is given, but indices is None"),
        ({"indices": table[:, None], "extra_k_cache": cache}, "extra_k_cache and extra_indices_in_kvcache: both"),
        ({"extra_topk_length": x}, "extra_topk_length is given, but extra_k_cache is None"),
        (
            {"indices": table[:, None], "extra_k_cache": cache, "extra_indices_in_kvcache": table},
            r"extra_indices_in_kvcache has shape .*: must be \(batch, seqlen_q, topk\)",
        ),
        ({"is_fp8_kvcache": True}, r"its rows must have 656 bytes: 512 of values, 16 of scales, the rest rotated"),
        ({"is_fp8_kvcache": True, "head_dim_v": 500}, "head_dim_v = 500: must be a multiple of 128"),
        ({"is_fp8_kvcache": True, "q": q.half()}, "q.dtype = torch.float16: must be torch.bfloat16"),
    ]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            decode(**given)
    functions = (
        flash_mla.flash_attn_varlen_func, flash_mla.flash_attn_varlen_kvpacked_func,
        flash_mla.flash_attn_varlen_qkvpacked_func,
    )  # fmt: skip
    for function in functions:
        with pytest.raises(NotImplementedError, match=f"^{function.__name__}: .* has its result"):
            function(q, q, q)
