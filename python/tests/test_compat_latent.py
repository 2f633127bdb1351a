"""qv of FlashAttention-3's functions, against plain torch in double."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

import reference
from tessera.compat import flash_attn_interface as fa3

D, DV = 16, 40


def operands(device: str, rows_q: tuple[int, ...], rows_k: tuple[int, ...], heads: int = 6, heads_k: int = 2) -> Any:
    """q, k, v, qv"""
    shapes = ((*rows_q, heads, D), (*rows_k, heads_k, D), (*rows_k, heads_k, DV), (*rows_q, heads, DV))
    return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)


def check(result: Any, q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> None:
    """(o, lse): scores are one product of wide rows, whose default scale is that of both."""
    wide = torch.cat((q, qv), -1), torch.cat((k, v), -1), v
    with reference.recording() as steps:
        o, lse = reference.dense(*(x.double() for x in wide), **options)
    reference.assert_output_close(result[0], o, reference.dense(*wide, **options)[0])
    reference.assert_lse_close(result[1], lse, steps)


@pytest.mark.parametrize("lengths", ((14, 45), (41, 13)), ids=str)
def test_dense(lengths: tuple[int, int], device: str) -> None:
    q, k, v, qv = operands(device, (2, lengths[0]), (2, lengths[1]))
    for given, options in (
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"window_size": (3, 4), "softmax_scale": 0.1}, {"window": (3, 4), "softmax_scale": 0.1}),
    ):
        result = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **given)
        check(result, q, k, v, qv, **options)
    # A row of heads before columns: the last stride is not 1.
    turned = qv.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(fa3.flash_attn_func(q, k, v, qv=turned), fa3.flash_attn_func(q, k, v, qv=qv))


@pytest.mark.parametrize("used", (False, True))
def test_packed(used: bool, device: str) -> None:
    """Of q packed and k dense, too."""
    lengths_q, lengths_k = [1, 19, 2], [13, 40, 7]
    counts_q, counts_k = [0, 11, 2] if used else lengths_q, [9, 40, 3] if used else lengths_k
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths_q, lengths_k))
    q, k, v, qv = operands(device, (22,), (60,))
    more: dict[str, Any] = {}
    if used:
        more = {f"seqused_{n}": torch.tensor(c, dtype=torch.int32, device=device)
                for n, c in (("q", counts_q), ("k", counts_k))}  # fmt: skip
    o, lse = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 19, 40, qv=qv, causal=True, return_attn_probs=True, **more)
    for b in range(3):
        of_q = slice(int(cu_q[b]), int(cu_q[b]) + counts_q[b])
        of_k = slice(int(cu_k[b]), int(cu_k[b]) + counts_k[b])
        check((o[None, of_q], lse[None, :, of_q]), q[None, of_q], k[None, of_k], v[None, of_k], qv[None, of_q],
              causal=True)  # fmt: skip


def test_dense_with_used_lengths(device: str) -> None:
    q, k, v, qv = operands(device, (2, 5), (2, 21))
    used = torch.tensor([21, 8], dtype=torch.int32, device=device)
    o, lse = fa3.flash_attn_varlen_func(
        q, k, v, None, None, None, None, seqused_k=used, qv=qv, causal=True, return_attn_probs=True
    )
    for b, n in enumerate(used.tolist()):
        one = slice(b, b + 1)
        check((o[one], lse[one]), q[one], k[one, :n], v[one, :n], qv[one], causal=True)
    direct, *_ = fa3._flash_attn_forward(q, k, v, qv=qv, seqused_k=used, causal=True)
    assert torch.equal(direct, o)
    chunks = fa3.flash_attn_func(q, k, v, qv=qv, attention_chunk=64, causal=True)
    assert torch.allclose(chunks, fa3.flash_attn_func(q, k, v, qv=qv, causal=True), atol=0.02)


@pytest.mark.parametrize("page_size", (None, 1, 16, 64))
@pytest.mark.parametrize("heads", (16, 128))
def test_cache(page_size: int | None, heads: int, device: str) -> None:
    """Sizes of DeepSeek's, with new rows, and queries and keys that are rotated."""
    batch, seqlen = 3, random.choice((1, 2))
    cache = caches.random_cache(batch, 130, page_size, 1, (64, 512), torch.bfloat16, device)
    before = caches.random_lengths(batch, cache.capacity - seqlen, device)
    q, qv = (torch.randn(batch, seqlen, heads, d, device=device, dtype=torch.bfloat16) for d in (64, 512))
    k, v = (torch.randn(batch, seqlen, 1, d, device=device, dtype=torch.bfloat16) for d in (64, 512))
    angle = torch.rand(cache.capacity, 32, device=device) * 6
    o, lse, *_ = fa3.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, qv, angle.cos(), angle.sin(), cache_seqlens=before, page_table=cache.page_table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    turned = torch.stack([
        caches.rotate(x, n + torch.arange(seqlen, device=device), angle.cos(), angle.sin(), True)
        for x, n in zip(q, before, strict=True)
    ])  # fmt: skip
    wide = torch.cat((turned.bfloat16(), qv), -1)
    joined = cache._replace(k=torch.cat((cache.k, cache.v), -1))
    sequences: Any = [(b, b, 0, int(n) + seqlen) for b, n in enumerate(before)]
    exact = caches.attend(wide, joined, sequences, causal=True)
    plain = caches.attend(wide, joined, sequences, causal=True, dtype=torch.bfloat16)
    caches.check_close((o, lse), exact, plain, rotated=True)


def test_without_new_rows(device: str) -> None:
    cache = caches.random_cache(3, 50, 16, 2, (D, DV), torch.bfloat16, device)
    lengths = caches.random_lengths(3, cache.capacity, device)
    q, _, _, qv = operands(device, (3, 2), (1, 1))
    qv.requires_grad_()  # upstream, too, looks at no gradients here
    o, lse, *_ = fa3.flash_attn_with_kvcache(
        q, cache.k, cache.v, qv=qv, cache_seqlens=lengths, page_table=cache.page_table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert not o.requires_grad
    wide, joined = torch.cat((q, qv.detach()), -1), cache._replace(k=torch.cat((cache.k, cache.v), -1))
    sequences: Any = [(b, b, 0, int(n)) for b, n in enumerate(lengths)]
    exact, plain = (
        caches.attend(wide, joined, sequences, causal=True, dtype=t) for t in (torch.double, torch.bfloat16)
    )
    caches.check_close((o, lse), exact, plain)


def test_refusals(device: str) -> None:
    q, k, v, qv = operands(device, (2, 5), (2, 21))
    for name, x in (("q", q), ("qv", qv)):
        given = {"q": q, "k": k, "v": v, "qv": qv} | {name: x.clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient: attention with qv has none"):
            fa3.flash_attn_func(**given)
    with pytest.raises(ValueError, match="qv has shape"):
        fa3.flash_attn_func(q, k, v, qv=q)
    with pytest.raises(ValueError, match="qv.dtype = float16"):
        fa3.flash_attn_func(q, k, v, qv=qv.half())
    low = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    one = torch.ones(2, 2, device=device)
    factors = {f"{name}_descale": one for name in "qkv"}
    with pytest.raises(NotImplementedError, match="flash_attn_func: qv is given.*dequantise them first"):
        fa3.flash_attn_func(*low, qv=qv, **factors)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: qv is given"):
        fa3.flash_attn_varlen_func(*low, None, None, None, None, qv=qv, **factors)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: qv is given"):
        fa3.flash_attn_with_kvcache(*low, qv=qv, **factors)
