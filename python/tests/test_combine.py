"""tessera.combine: attention over parts of the keys, merged, is attention over all of them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tessera

INFINITY = float("inf")


def parts_of(device: str, dtype: torch.dtype, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o_parts and lse_parts over the keys between the cuts, and (o, lse) over all; one part has no keys but NaN."""
    q = torch.randn(2, 9, 4, 32, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, cuts[-1], 2, 32, device=device, dtype=dtype)
    results: Any = [
        tessera.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    nothing = torch.full_like(q, torch.nan)
    o_parts = torch.stack([o for o, _ in results] + [nothing])
    lse_parts = torch.stack([lse for _, lse in results] + [torch.full_like(results[0][1], -INFINITY)])
    return o_parts, lse_parts, *tessera.attention(q, k, v, return_lse=True)


def test_parts_become_the_whole(device: str) -> None:
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if device == "cuda" and dtype is torch.float32:
            continue
        o_parts, lse_parts, o, lse = parts_of(device, dtype, (0, 1, 17, 40, 64))
        merged, merged_lse = tessera.combine(o_parts, lse_parts)
        assert merged.dtype is dtype and merged_lse.dtype is torch.float32
        torch.testing.assert_close(merged, o, rtol=0, atol=tolerance[dtype])
        torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-5)
        wide, _ = tessera.combine(o_parts, lse_parts, dtype=torch.float32)
        assert wide.dtype is torch.float32 and torch.equal(wide.to(dtype), merged)
        packed, packed_lse = tessera.combine(o_parts[:, 1], lse_parts[:, 1])
        assert torch.equal(packed, merged[1]) and torch.equal(packed_lse, merged_lse[1])


def test_any_strides(device: str) -> None:
    o_parts, lse_parts, _, _ = parts_of(device, torch.bfloat16, (0, 8, 20))
    expected = tessera.combine(o_parts, lse_parts)
    turned = o_parts.permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    wide = torch.nn.functional.pad(o_parts, (0, 3))[..., :-3]
    last = o_parts.transpose(-1, -2).contiguous().transpose(-1, -2)
    for x in (turned, wide, last):
        o, lse = tessera.combine(x, lse_parts.transpose(0, 2).contiguous().transpose(0, 2))
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_rows_without_keys(device: str) -> None:
    o_parts = torch.full((3, 1, 2, 1, 8), torch.nan, device=device)
    lse_parts = torch.full((3, 1, 1, 2), -INFINITY, device=device)
    o_parts[1, 0, 0], lse_parts[1, 0, 0, 0] = 2.0, 5.0
    o, lse = tessera.combine(o_parts, lse_parts)
    assert o[0, :, 0].tolist() == [[2.0] * 8, [0.0] * 8]
    assert lse[0, 0, 0].item() == pytest.approx(5.0, abs=1e-5) and lse[0, 0, 1].item() == -INFINITY
    lse_parts[2, 0, 0, 0] = torch.nan
    o, lse = tessera.combine(o_parts, lse_parts)
    assert o[0, 0].isnan().all() and lse[0, 0, 0].isnan() and (o[0, 1] == 0.0).all()


def test_compilation(device: str) -> None:
    o_parts, lse_parts, _, _ = parts_of(device, torch.bfloat16, (0, 8, 20))
    torch.library.opcheck(torch.ops.tessera.combine, (o_parts, lse_parts, torch.float32))
    compiled = torch.compile(lambda a, b: tessera.combine(a, b, dtype=torch.float16), fullgraph=True, backend="eager")
    for got, expected in zip(
        compiled(o_parts, lse_parts), tessera.combine(o_parts, lse_parts, dtype=torch.float16), strict=True
    ):
        assert torch.equal(got, expected)


def test_there_are_no_gradients() -> None:
    o_parts, lse_parts = torch.zeros(2, 1, 3, 2, 8), torch.zeros(2, 1, 2, 3)
    for name, tensor in (("o_parts", o_parts), ("lse_parts", lse_parts)):
        tensor.requires_grad_()
        with pytest.raises(NotImplementedError, match=f"{name} requires a gradient: combine has none"):
            tessera.combine(o_parts, lse_parts)
        with torch.no_grad():
            assert not tessera.combine(o_parts, lse_parts)[0].requires_grad
        tensor.requires_grad_(False)


PARTS, LSE = torch.zeros(2, 1, 3, 2, 8), torch.zeros(2, 1, 2, 3)


@pytest.mark.parametrize(
    ("o_parts", "lse_parts", "dtype", "error", "text"),
    [
        (3, LSE, None, TypeError, "o_parts is of type 'int': must be a torch tensor"),
        (PARTS, 3, None, TypeError, "lse_parts is of type 'int', but o_parts is a torch tensor"),
        (PARTS[0, 0], LSE, None, ValueError, "o_parts has shape (3, 2, 8): must be (num_splits, batch, seqlen"),
        (PARTS[0, 0, 0, 0, 0], LSE, None, ValueError, "o_parts has shape ()"),
        (PARTS, LSE.transpose(2, 3), None, ValueError, "lse_parts has shape (2, 1, 3, 2): must be (2, 1, 2, 3)"),
        (PARTS, LSE.double(), None, ValueError, "lse_parts.dtype = float64: must be float32"),
        (PARTS.double(), LSE, None, ValueError, "o_parts.dtype = float64: must be float32, bfloat16 or float16"),
        (PARTS.to(torch.uint16), LSE, None, ValueError, "o_parts.dtype = uint16: must be float32, bfloat16 or float16"),
        (PARTS, LSE, torch.float64, ValueError, "o.dtype = float64: must be float32, bfloat16 or float16"),
        (PARTS[:0], LSE[:0], None, ValueError, "num_splits = 0: must lie in [1, 65536]"),
    ],
)
def test_wrong_arguments(o_parts: Any, lse_parts: Any, dtype: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^" + re.escape(text)):
        tessera.combine(o_parts, lse_parts, dtype=dtype)
