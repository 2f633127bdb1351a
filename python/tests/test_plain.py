"""What lets a call on a cache go straight to the library, and the memory that the library takes for its result."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tessera
import tessera.compat.flash_attn as flash_attn_2
from tessera import _native
from tessera.torch.ops import WATCH

CAPACITY, HEADS, HEADS_K, D = 20, 4, 2, 64


def is_plain(*tensors: Tensor | None) -> bool:
    return _native.is_plain(WATCH, *tensors)


class Derived(Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_tensors(device: str) -> None:
    """Every one counts, wherever it stands."""
    x = torch.randn(3, device=device)
    assert is_plain(x) and is_plain(x, None, x.bfloat16(), x.int())
    for other in (
        torch.nn.Parameter(x),
        x.as_subclass(Derived),
        x.clone().requires_grad_(),
        torch._neg_view(x),
        torch.complex(x, x).conj().imag,
    ):
        assert not is_plain(other) and not is_plain(x, None, other) and not is_plain(other, x)
    assert not is_plain(torch.empty(3, device="meta"))
    assert not is_plain(x, "no tensor")  # type: ignore[arg-type]


def test_modes(device: str) -> None:
    x = torch.randn(3, device=device)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert is_plain(leaf, leaf * 2)
    with torch.inference_mode():
        assert is_plain(x * 2)
    with Watching():
        assert not is_plain(x)
    seen = []

    def look(y: Tensor) -> Tensor:
        seen.append(is_plain(x))
        return y.sum()

    torch.func.grad(look)(x)
    torch.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [False] * 3
    assert is_plain(x)


def test_wrong_use() -> None:
    with pytest.raises(TypeError, match="is_plain takes one argument or more"):
        _native.is_plain()


def cache_of(dim_v: int, device: str) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(2, CAPACITY, HEADS_K, d, device=device, dtype=torch.bfloat16) for d in (D, dim_v))
    return k, v


@pytest.mark.parametrize("dim_v", (D, 32))
@pytest.mark.parametrize("new", (False, True))
def test_results(new: bool, dim_v: int, device: str) -> None:
    """o lies in memory in the order of q's dimensions, its columns one after the other, whatever q's strides are."""
    k_cache, v_cache = cache_of(dim_v, device)
    rows: dict[str, Any] = {}
    if new:
        rows = {"lengths": "before", "k_new": k_cache[:, :3].clone(), "v_new": v_cache[:, :3].clone()}
    seqlens = torch.tensor([5, 9], dtype=torch.int32, device=device)
    q = torch.randn(2, 3, HEADS, D, device=device, dtype=torch.bfloat16)
    out = torch.empty(2, 3, HEADS, dim_v, device=device, dtype=torch.bfloat16)
    expected = tessera.cached_attention(q, k_cache, v_cache, seqlens=seqlens, causal=True, out=out, **rows)
    assert expected is out
    layouts = {
        (0, 1, 2): q,
        (0, 2, 1): q.transpose(1, 2).contiguous().transpose(1, 2),
        (1, 0, 2): q.transpose(0, 1).contiguous().transpose(0, 1),
    }
    wide = torch.randn(2, 3, HEADS + 3, D, device=device, dtype=torch.bfloat16)
    wide[:, :, :HEADS] = q
    apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    for order, x in [*layouts.items(), ((0, 1, 2), wide[:, :, :HEADS]), (None, apart)]:
        o = tessera.cached_attention(x, k_cache, v_cache, seqlens=seqlens, causal=True, **rows)
        assert torch.equal(o, expected) and o.stride(-1) == 1 and o.data_ptr() != out.data_ptr()
        if order is not None:
            assert o.permute(*order, 3).is_contiguous()


def test_stand_ins_detach(device: str) -> None:
    """What needs a gradient is taken for what it holds, and its cache is written all the same."""
    k_cache, v_cache = cache_of(D, device)
    q = torch.randn(2, 1, HEADS, D, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1, HEADS_K, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    seqlens = torch.tensor([5, 9], dtype=torch.int32, device=device)
    caches = [(k_cache.clone(), v_cache.clone()) for _ in range(2)]
    expected = flash_attn_2.flash_attn_with_kvcache(q, *caches[0], k, v, cache_seqlens=seqlens)
    leaves = (x.clone().requires_grad_() for x in (q, k, v))
    mine, k_leaf, v_leaf = leaves
    result = flash_attn_2.flash_attn_with_kvcache(mine, *caches[1], k_leaf, v_leaf, cache_seqlens=seqlens)
    assert torch.equal(result, expected) and not result.requires_grad
    assert all(map(torch.equal, caches[1], caches[0])) and not torch.equal(caches[0][0], k_cache)
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        tessera.cached_attention(mine, *caches[1], seqlens=seqlens)
