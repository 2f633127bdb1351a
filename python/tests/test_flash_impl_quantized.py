"""The stand-in for torch's prototype of scaled_dot_product_attention on 8 bits."""

import inspect

import pytest
import torch

import tessera
from tessera.torch import flash_impl


@pytest.mark.parametrize("is_causal", (False, True))
def test_quantized_flash_operator(is_causal: bool, device: str) -> None:
    """Elements of 8 bits with a scale a sequence and key head each, or without."""
    shapes = ((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    q, k, v = (torch.randn(shape, device=device).to(torch.float8_e4m3fn).transpose(1, 2) for shape in shapes)
    scales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    for factors in (scales, [None, None, scales[2]]):
        out, lse, cu_q, cu_k, max_q, max_k, *_ = flash_impl.sdpa_flash_attention_quantized(
            q, k, v, *factors, is_causal=is_causal
        )
        wide = [x.float() if s is None else x.float() * s.repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
                for x, s in zip((q, k, v), factors, strict=True)]  # fmt: skip
        dense = [x.transpose(1, 2).bfloat16() for x in wide]
        expected, expected_lse = tessera.attention(*dense, causal=is_causal, return_lse=True)
        assert out.shape == q.shape and out.dtype is torch.bfloat16
        assert (cu_q, cu_k, max_q, max_k) == (None, None, 9, 30)
        atol = 0.02 if device == "cpu" else 0.1  # a GPU rounds weights to 8 bits
        torch.testing.assert_close(out, expected.transpose(1, 2), atol=atol, rtol=atol)
        torch.testing.assert_close(lse, expected_lse, atol=atol, rtol=atol)
    with pytest.raises(NotImplementedError, match="dropout_p is given: the TESSERA flash"):
        flash_impl.sdpa_flash_attention_quantized(q, k, v, *scales, 0.5)
    with pytest.raises(NotImplementedError, match="query.dtype = torch.float16: the TESSERA flash"):
        flash_impl.sdpa_flash_attention_quantized(q.half(), k, v, *scales)


def test_quantized_flash_operator_is_known() -> None:
    """Its signature is that of torch's, where there is one."""
    operator = getattr(torch.ops.aten._scaled_dot_product_flash_attention, "quantized", None)
    if operator is None:
        pytest.skip("this version of torch has none")
    names = [argument.name for argument in operator._schema.arguments]
    assert names == list(inspect.signature(flash_impl.sdpa_flash_attention_quantized).parameters)
