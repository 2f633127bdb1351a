"""Caches of float8 in FlashAttention-3's flash_attn_with_kvcache: elements times factors, in double; float8 rows are
copied into them, rows of 16 bits are divided by the factors and rounded."""

import random
from typing import Any

import caches
import pytest
import torch
from torch import Tensor

from tessera.compat import flash_attn_interface as fa3

E4M3 = torch.float8_e4m3fn
B, HEADS, HEADS_K, D, CAPACITY = 3, 4, 2, 64, 96


class Case:
    """A cache of float8, queries, new rows, and a factor for each sequence and head."""

    def __init__(self, device: str, q_dtype: torch.dtype, page_size: int | None, seqlen_q: int = 1) -> None:
        cache = caches.random_cache(B, CAPACITY, page_size, HEADS_K, (D, D), torch.float32, device)
        self.cache = cache._replace(k=cache.k.to(E4M3), v=cache.v.to(E4M3))
        self.q = torch.randn(B, seqlen_q, HEADS, D, device=device).to(q_dtype)
        self.k, self.v = (torch.randn(B, seqlen_q, HEADS_K, D, device=device).to(q_dtype) for _ in "kv")
        self.seqlens = caches.random_lengths(B, CAPACITY - seqlen_q, device)
        names = ("q_descale", "k_descale", "v_descale") if q_dtype is E4M3 else ("k_descale", "v_descale")
        self.descales = {name: torch.rand(B, HEADS_K, device=device) + 0.5 for name in names}

    def factor(self, name: str, b: int, heads: int) -> Tensor | float:
        x = self.descales.get(name)
        return 1.0 if x is None else x[b].repeat_interleave(heads // HEADS_K)[:, None].double()

    def check(self, result: Any, lengths: list[int], **options: Any) -> None:
        o, lse = result[:2]
        assert o.dtype is (torch.bfloat16 if self.q.dtype is E4M3 else self.q.dtype)
        for b, length in enumerate(lengths):
            q = self.q[b : b + 1].double() * self.factor("q_descale", b, HEADS)
            values = {
                name: getattr(self.cache, name).double() * self.factor(f"{name}_descale", b, HEADS_K) for name in "kv"
            }
            exact, plain = (
                caches.attend(q.to(dtype), self.cache._replace(**{n: x.to(dtype) for n, x in values.items()}),
                              [(0, b, 0, length)], dtype=dtype, **options)
                for dtype in (torch.double, torch.bfloat16)
            )  # fmt: skip
            caches.check_close((o[b : b + 1], lse[b : b + 1]), exact, plain)


def check_rows(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("page_size", (None, 1, 16))
@pytest.mark.parametrize("q_dtype", (E4M3, torch.bfloat16, torch.float16), ids=str)
def test_attention(q_dtype: torch.dtype, page_size: int | None, device: str) -> None:
    """Also through the operator under the function."""
    case = Case(device, q_dtype, page_size, random.choice((1, 3)))
    place: dict[str, Any] = {"page_table": case.cache.page_table, **case.descales}
    result = fa3.flash_attn_with_kvcache(
        case.q, case.cache.k, case.cache.v, cache_seqlens=case.seqlens, causal=True, return_softmax_lse=True, **place
    )
    case.check(result, case.seqlens.tolist(), causal=True)
    if page_size is not None:
        below = fa3._flash_attn_forward(
            case.q, case.cache.k, case.cache.v, seqused_k=case.seqlens, causal=True, **place
        )
        assert torch.equal(below[0], result[0]) and torch.equal(below[1], result[1])


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("q_dtype", (E4M3, torch.bfloat16), ids=str)
def test_new_rows(q_dtype: torch.dtype, packed: bool, device: str) -> None:
    case = Case(device, q_dtype, 16, 2)
    before = case.cache.clone()
    new = (case.k, case.v)
    more: dict[str, Any] = {}
    if packed:
        cu = torch.arange(0, 2 * B + 1, 2, dtype=torch.int32, device=device)
        new = (case.k.flatten(0, 1), case.v.flatten(0, 1))
        more = {"cu_seqlens_k_new": cu}
    result = fa3.flash_attn_with_kvcache(
        case.q, case.cache.k, case.cache.v, *new, cache_seqlens=case.seqlens, causal=True, return_softmax_lse=True,
        page_table=case.cache.page_table, **case.descales, **more,
    )  # fmt: skip
    for b, length in enumerate(case.seqlens.tolist()):
        at = case.cache.slots(b)[length : length + 2]
        for name, rows in (("k", case.k[b]), ("v", case.v[b])):
            stored, old = (getattr(x, name).view(torch.uint8).flatten(0, 1) for x in (case.cache, before))
            if q_dtype is not E4M3:
                rows = (rows.float() / case.descales[f"{name}_descale"][b][:, None]).clamp(-448, 448)
                far = (stored[at].view(E4M3).float() - rows).abs() > rows.abs() * 2**-4 + 2**-10
                assert not bool(far.any())
            else:
                check_rows(stored[at], rows)
            old[at] = stored[at]  # of both nothing else differs, as is found when all are written
            getattr(before, name).view(torch.uint8).flatten(0, 1)[at] = stored[at]
    for name in "kv":
        check_rows(getattr(case.cache, name), getattr(before, name))
    case.check(result, [n + 2 for n in case.seqlens.tolist()], causal=True)


def test_rotated_rows(device: str) -> None:
    """Queries and new keys of float8 are rotated as the values that they are."""
    case = Case(device, E4M3, None)
    angle = torch.rand(CAPACITY, D // 2, device=device)
    o, lse, *_ = fa3.flash_attn_with_kvcache(
        case.q, case.cache.k, case.cache.v, case.k, case.v, cache_seqlens=case.seqlens, causal=True,
        rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=False, return_softmax_lse=True,
        **case.descales,
    )  # fmt: skip
    turned = []
    for b, length in enumerate(case.seqlens.tolist()):
        position = torch.tensor([length])
        q, k = (caches.rotate(x[b], position, angle.cos(), angle.sin(), False) for x in (case.q, case.k))
        assert bool(((case.cache.k[b, length].double() - k[0]).abs() <= k[0].abs() * 2**-4 + 2**-10).all())
        check_rows(case.cache.v[b, length], case.v[b, 0])
        turned.append(q)
    case.q = torch.stack(turned).bfloat16()
    group = HEADS // HEADS_K
    factor = case.descales.pop("q_descale").repeat_interleave(group, 1)[:, None, :, None]
    case.q = (case.q.double() * factor.double()).float()  # exactly what is multiplied, but for the sum
    for b, length in enumerate(case.seqlens.tolist()):
        values = {n: getattr(case.cache, n).double() * case.factor(f"{n}_descale", b, HEADS_K) for n in "kv"}
        exact, plain = (
            caches.attend(
                case.q[b : b + 1].to(dtype), case.cache._replace(**{n: x.to(dtype) for n, x in values.items()}),
                [(0, b, 0, length + 1)], dtype=dtype,
            )
            for dtype in (torch.double, torch.bfloat16)
        )  # fmt: skip
        caches.check_close((o[b : b + 1], lse[b : b + 1]), exact, plain, rotated=True)


def test_refusals(device: str) -> None:
    case = Case(device, E4M3, None)
    call: Any = fa3.flash_attn_with_kvcache
    good: dict[str, Any] = {"cache_seqlens": case.seqlens, **case.descales}
    expected = r"float32 \(batch, num_heads_k\) = \(3, 2\)"
    wide = (case.q.bfloat16(), case.cache.k, case.cache.v)
    refused: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        *(((case.q, *wide[1:]), {f"{name}_descale": None}, f"^{name}_descale is None: must be {expected}")
          for name in "qkv"),
        ((case.q, *wide[1:]), {"k_descale": torch.ones(B, 1, device=device)}, r"^k_descale is .* \(3, 1\): must be"),
        (wide, {}, "^q_descale is given, but q.dtype = torch.bfloat16"),
        ((case.q, case.cache.k, case.cache.v.bfloat16()), {}, "^v_cache.dtype = torch.bfloat16, but k_cache.dtype"),
        ((wide[0], case.cache.k.bfloat16(), case.cache.v.bfloat16()), {}, "^q_descale is given, but k_cache.dtype"),
        ((case.q, *wide[1:], case.k.bfloat16(), case.v), {}, "^k.dtype = torch.bfloat16, but q.dtype"),
    ]  # fmt: skip
    before = case.cache.clone()
    for tensors, wrong, text in refused:
        with pytest.raises(ValueError, match=text):
            call(*tensors, **(good | wrong))
    check_rows(case.cache.k, before.k)
    with pytest.raises(NotImplementedError, match=r"^q\.dtype = torch\.float8_e5m2"):
        call(case.q.to(torch.float8_e5m2), *wide[1:], **good)
