"""qv, a second query that multiplies v (S12): latent attention with absorbed weights, against plain torch in double."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

import reference
import tessera
import tessera.torch  # the operators

D, DV = 16, 40


def rows(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def both(q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention without qv: one product of wide rows, whose default scale is that of both."""
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), v


def check(
    result: tuple[Tensor, Tensor], q: Tensor, qv: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, **options: Any
) -> None:
    wide = both(q, qv, k, v)
    with reference.recording() as steps:
        o, lse = reference.dense(*(x.double() for x in wide), **options)
    plain, _ = reference.dense(*wide, **options)
    reference.assert_output_close(result[0], o, plain)
    reference.assert_lse_close(result[1], lse, steps)


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.1},
    "window": {"window": (3, 4)},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("heads", ((4, 4), (6, 2), (16, 1)), ids=str)
@pytest.mark.parametrize("lengths", ((1, 37), (2, 70), (33, 21)), ids=str)
def test_dense(feature: str, heads: tuple[int, int], lengths: tuple[int, int], device: str) -> None:
    dtype = random.choice((torch.float32, torch.bfloat16, torch.float16)) if device == "cpu" else torch.bfloat16
    q, qv = (rows(device, 2, lengths[0], heads[0], d, dtype=dtype) for d in (D, DV))
    k, v = (rows(device, 2, lengths[1], heads[1], d, dtype=dtype) for d in (D, DV))
    options = FEATURES[feature]
    if device == "cuda" and feature == "softcap":
        with pytest.raises(NotImplementedError, match="takes no softcap"):
            tessera.attention(q, k, v, qv=qv, **options)
        return
    check(tessera.attention(q, k, v, qv=qv, return_lse=True, **options), q, qv, k, v, dtype, **options)


@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("seqlen_q", (1, 2))
def test_sizes_of_deepseek(heads: int, seqlen_q: int, device: str) -> None:
    """512 columns of v and 64 of k, in one row of 576 or apart, and queries likewise."""
    q_row, row = rows(device, 2, seqlen_q, heads, 576), rows(device, 2, 75, 1, 576)
    parts = q_row[..., 512:], q_row[..., :512], row[..., 512:], row[..., :512]
    q, qv, k, v = parts
    result = tessera.attention(q, k, v, qv=qv, causal=True, return_lse=True)
    check(result, *parts, torch.bfloat16, causal=True)
    apart = tessera.attention(*(x.clone() for x in (q, k, v)), qv=qv.clone(), causal=True, return_lse=True)
    assert all(map(torch.equal, result, apart))


def test_packed(device: str) -> None:
    lengths_q, lengths_k = [1, 0, 19, 2], [13, 5, 40, 0]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths_q, lengths_k))
    q, qv = (rows(device, sum(lengths_q), 6, d) for d in (D, DV))
    k, v = (rows(device, sum(lengths_k), 2, d) for d in (D, DV))
    o, lse = tessera.attention(
        q, k, v, qv=qv, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=19, max_seqlen_k=40, causal=True,
        return_lse=True,
    )  # fmt: skip
    for at_q, end_q, at_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        of_q, of_k = slice(int(at_q), int(end_q)), slice(int(at_k), int(end_k))
        one = (o[None, of_q], lse[None, :, of_q])
        check(one, q[None, of_q], qv[None, of_q], k[None, of_k], v[None, of_k], q.dtype, causal=True)


def wide_cache(cache: caches.Cache) -> caches.Cache:
    """Without qv: rows of k beside those of v."""
    return cache._replace(k=torch.cat((cache.k, cache.v), -1))


def check_cached(
    result: Any, q: Tensor, qv: Tensor, cache: caches.Cache, sequences: list[tuple[Any, int, int, int]], **options: Any
) -> None:
    wide = torch.cat((q, qv), -1)
    exact = caches.attend(wide, wide_cache(cache), sequences, **options)
    caches.check_close(result, exact, caches.attend(wide, wide_cache(cache), sequences, dtype=q.dtype, **options))


@pytest.mark.parametrize("page_size", (None, 1, 16, 64))
@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("seqlen_q", (1, 2))
def test_cache(page_size: int | None, heads: int, seqlen_q: int, device: str) -> None:
    """Slots of 576 columns, lengths that the device reads, some of them none."""
    batch = 4
    cache = caches.random_cache(batch, 150, page_size, 1, (64, 512), torch.bfloat16, device)
    seqlens = caches.random_lengths(batch, cache.capacity, device)
    seqlens[random.randrange(batch)] = -1
    q, qv = (rows(device, batch, seqlen_q, heads, d) for d in (64, 512))
    result = tessera.cached_attention(
        q, cache.k, cache.v, qv=qv, seqlens=seqlens, page_table=cache.page_table, causal=True, return_lse=True
    )
    check_cached(result, q, qv, cache, [(b, b, 0, int(n)) for b, n in enumerate(seqlens)], causal=True)


def test_cache_of_packed_queries(device: str) -> None:
    cache = caches.random_cache(3, 50, 16, 2, (D, DV), torch.bfloat16, device)
    seqlens = caches.random_lengths(3, cache.capacity, device)
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    q, qv = (rows(device, 5, 4, d) for d in (D, DV))
    result = tessera.cached_attention(
        q, cache.k, cache.v, qv=qv, seqlens=seqlens, page_table=cache.page_table, cu_seqlens_q=cu, max_seqlen_q=3,
        window=(20, 0), return_lse=True,
    )  # fmt: skip
    slices = [slice(int(a), int(b)) for a, b in zip(cu[:-1], cu[1:], strict=True)]
    sequences = [(s, b, 0, int(n)) for b, (s, n) in enumerate(zip(slices, seqlens, strict=True))]
    check_cached(result, q, qv, cache, sequences, window=(20, 0))


def test_step(device: str) -> None:
    """New rows are appended in the same call, and q is rotated with the new k. qv and v are not."""
    cache = caches.random_cache(3, 64, 16, 1, (D, DV), torch.bfloat16, device)
    table = cache.page_table
    assert table is not None
    before = torch.tensor([0, 17, 60], dtype=torch.int32, device=device)
    q, qv = (rows(device, 3, 2, 8, d) for d in (D, DV))
    k, v = (rows(device, 3, 2, 1, d) for d in (D, DV))
    angle = torch.rand(64, D // 2, device=device) * 6
    tables: dict[str, Any] = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    layer, twin = tessera.KVCache(cache.k, cache.v), cache.clone()
    o = layer.attend(q, tessera.CachedSequences(before, table), qv=qv, k_new=k, v_new=v, causal=True, **tables)
    where: dict[str, Any] = {"seqlens": before, "lengths": "before", "page_table": table}
    turned = tessera.append(k, v, twin.k, twin.v, q=q, **where, **tables)
    assert torch.equal(twin.k, cache.k) and torch.equal(twin.v, cache.v)
    lse = tessera.cached_attention(turned, twin.k, twin.v, qv=qv, causal=True, seqlen_new=2, return_lse=True, **where)
    assert torch.equal(lse[0], o)
    sequences = [(b, b, 0, int(n) + 2) for b, n in enumerate(before)]
    check_cached(lse, turned, qv, cache, sequences, causal=True)


def test_compiles(device: str) -> None:
    q, qv = (rows(device, 2, 3, 4, d) for d in (D, DV))
    k, v = (rows(device, 2, 21, 1, d) for d in (D, DV))
    seqlens = torch.tensor([5, 21], dtype=torch.int32, device=device)

    def layer(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Any, Any]:
        first = tessera.attention(q, k, v, qv=qv, causal=True, return_lse=True)
        return first, tessera.cached_attention(q, k, v, qv=qv, seqlens=seqlens, causal=True)

    (o, lse), cached = layer(q, k, v, qv)
    (o_2, lse_2), cached_2 = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v, qv)
    assert torch.equal(o, o_2) and torch.equal(lse, lse_2) and torch.equal(cached, cached_2)


def test_operators(device: str) -> None:
    q, qv = (rows(device, 2, 3, 4, d) for d in (D, DV))
    k, v = (rows(device, 2, 21, 1, d) for d in (D, DV))
    tests = ("test_schema", "test_faketensor")
    op = torch.ops.tessera.latent_forward.default
    numbers = (0, 0, None, 0.0, -1, 0, False, False)
    torch.library.opcheck(op, (q, k, v, *(None,) * 5, qv, *numbers), test_utils=tests)
    cached = torch.ops.tessera.cached_forward.default
    more = (None, "full", None, None, 0.0, -1, 0, 0, 0, False, False, 0)
    torch.library.opcheck(cached, (q, k, v, *(None,) * 11, qv, *more), test_utils=tests)


def test_graphs(device: str) -> None:
    """A captured step is replayed with other lengths."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    cache = caches.random_cache(4, 200, 64, 1, (64, 512), torch.bfloat16, device)
    q, qv = (rows(device, 4, 1, 16, d) for d in (64, 512))
    seqlens = caches.random_lengths(4, 200, device)

    def step() -> Any:
        return tessera.cached_attention(q, cache.k, cache.v, qv=qv, seqlens=seqlens, page_table=cache.page_table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    seqlens.copy_(caches.random_lengths(4, 200, device))
    graph.replay()
    assert torch.equal(out, step())


def test_autocast(device: str) -> None:
    q, qv = (rows(device, 2, 3, 4, d, dtype=torch.float32) for d in (D, DV))
    k, v = (rows(device, 2, 21, 1, d, dtype=torch.float32) for d in (D, DV))
    with torch.autocast(device, dtype=torch.bfloat16):
        o = tessera.attention(q, k, v, qv=qv)
    assert torch.equal(o, tessera.attention(*(x.bfloat16() for x in (q, k, v)), qv=qv.bfloat16()))


def test_gradients_are_refused(device: str) -> None:
    q, qv = (rows(device, 2, 3, 4, d) for d in (D, DV))
    k, v = (rows(device, 2, 21, 1, d) for d in (D, DV))
    for name in ("q", "k", "v", "qv"):
        given = {"q": q, "k": k, "v": v, "qv": qv} | {name: locals()[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient: attention with qv has none"):
            tessera.attention(**given)
        cached = {n if n in ("q", "qv") else f"{n}_cache": x for n, x in given.items()}
        named = name if name in ("q", "qv") else f"{name}_cache"
        with pytest.raises(NotImplementedError, match=f"^{named} requires a gradient: cached_attention has none"):
            tessera.cached_attention(**cached)
        with torch.no_grad():
            assert torch.equal(tessera.attention(**given), tessera.attention(q, k, v, qv=qv))
            assert torch.equal(tessera.cached_attention(**cached), tessera.cached_attention(q, k, v, qv=qv))


def test_errors(device: str) -> None:
    q, qv = (rows(device, 2, 3, 4, d) for d in (D, DV))
    k, v = (rows(device, 2, 21, 1, d) for d in (D, DV))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"qv": qv[..., :-1]}, ValueError, rf"qv has shape \(2, 3, 4, {DV - 1}\): must be \(2, 3, 4, {DV}\)"),
        ({"qv": qv[:, 1:]}, ValueError, rf"qv has shape \(2, 2, 4, {DV}\): must be \(2, 3, 4, {DV}\)"),
        ({"qv": qv[0]}, ValueError, rf"qv has shape \(3, 4, {DV}\): must be"),
        ({"qv": qv.half()}, ValueError, "qv.dtype = float16, but q.dtype = bfloat16: they must be the same"),
        ({"qv": 3.0}, TypeError, "qv is of type 'float', but q is a torch tensor"),
    ]
    for more, error, text in refused:
        with pytest.raises(error, match=text):
            tessera.attention(q, k, v, **more)
        with pytest.raises(error, match=text):
            tessera.cached_attention(q, k, v, **more)
        with pytest.raises(error, match=text):
            tessera.explain(q, k, v, **more)
        with pytest.raises(error, match=text):
            tessera.explain_cached(q, k, v, **more)
    with pytest.raises(NotImplementedError, match=r"dropout_p = 0.5 together with qv"):
        tessera.attention(q, k, v, qv=qv, dropout_p=0.5)
    with pytest.raises(ValueError, match="precision = 'e4m3' together with qv"):
        tessera.attention(q, k, v, qv=qv, precision="e4m3")
    with pytest.raises(ValueError, match="qv: forward only"):
        tessera.explain(q, k, v, qv=qv, backward=True)
    low, one = (x.to(torch.float8_e4m3fn) for x in (k, v)), torch.ones((), device=device)
    with pytest.raises(ValueError, match="qv: takes k of the problem's dtype, f32, bf16 or f16; it is e4m3"):
        tessera.cached_attention(q, *low, qv=qv, k_scale=one, v_scale=one)
    with pytest.raises(NotImplementedError, match="qv under a transform of torch.func"):
        torch.vmap(lambda q: tessera.attention(q, k, v, qv=qv))(q[None])
    if device != "cpu":
        with pytest.raises(ValueError, match="qv is on cpu, but q is on cuda:0"):
            tessera.attention(q, k, v, qv=qv.cpu())


def test_explain(device: str) -> None:
    q, qv = (rows(device, 2, 1, 16, d) for d in (64, 512))
    k, v = (rows(device, 2, 21, 1, d) for d in (64, 512))
    assert "d=64/512 qv" in tessera.explain(q, k, v, qv=qv).splitlines()[0]
    assert "d=64/512 cache=full qv" in tessera.explain_cached(q, k, v, qv=qv).splitlines()[0]


def test_arrays() -> None:
    np = pytest.importorskip("numpy")
    q, qv, k, v = (rows("cpu", *shape, dtype=torch.float32) for shape in (
        (2, 3, 4, D), (2, 3, 4, DV), (2, 21, 1, D), (2, 21, 1, DV)
    ))  # fmt: skip
    o, lse = tessera.attention(*(x.numpy() for x in (q, k, v)), qv=qv.numpy(), causal=True, return_lse=True)
    expected = tessera.attention(q, k, v, qv=qv, causal=True, return_lse=True)
    assert np.array_equal(o, expected[0].numpy()) and np.array_equal(lse, expected[1].numpy())
    with pytest.raises(ValueError, match="qv has shape"):
        tessera.attention(*(x.numpy() for x in (q, k, v)), qv=q.numpy())
