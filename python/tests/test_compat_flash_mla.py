"""FlashMLA's functions on Tessera, against the computation that its own tests compare with, in double."""

import importlib
import math
import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

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

    sparse = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    for name, value in [("is_fp8_kvcache", True), *((name, x) for name in sparse)]:
        with pytest.raises(NotImplementedError, match=f"flash_mla_with_kvcache: {name} is given.* The same "):
            decode(**{name: value})
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
    ]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            decode(**given)
    functions = (
        flash_mla.flash_mla_sparse_fwd, flash_mla.flash_attn_varlen_func, flash_mla.flash_attn_varlen_kvpacked_func,
        flash_mla.flash_attn_varlen_qkvpacked_func,
    )  # fmt: skip
    for function in functions:
        with pytest.raises(NotImplementedError, match=f"^{function.__name__}: .* has its result"):
            function(q, q, q)
