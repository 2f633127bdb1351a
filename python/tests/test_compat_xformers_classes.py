"""xformers' classes of biases on Tessera, what is refused, and what models call beside attention."""

import pytest
import torch

from tessera.compat.xformers import ops as xops
from tessera.compat.xformers.ops import fmha
from tessera.compat.xformers.ops.fmha import attn_bias as biases

# ---- the classes


def test_lists_of_tensors(device: str) -> None:
    """Lists become one tensor and come back, with the batches that their tensors had."""
    q = [torch.randn(b, n, 2, 8) for b, n in ((1, 3), (2, 4), (3, 1))]
    k = [torch.randn(b, n, 2, 8) for b, n in ((1, 5), (2, 4), (3, 2))]
    mask, whole = biases.BlockDiagonalMask.from_tensor_list(q)
    assert whole.shape == (1, 14, 2, 8) and mask.q_seqinfo is mask.k_seqinfo
    assert mask.q_seqinfo.seqstart_py == [0, 3, 7, 11, 12, 13, 14]
    assert (
        mask.q_seqinfo.seqstart.dtype == torch.int32 and mask.q_seqinfo.seqstart.tolist() == mask.q_seqinfo.seqstart_py
    )
    assert (mask.q_seqinfo.max_seqlen, mask.q_seqinfo.min_seqlen) == (4, 1)
    for split in (mask.split, mask.make_causal().split, mask.to("cpu").split, mask.split_kv):
        assert all(torch.equal(a, b) for a, b in zip(split(whole), q, strict=True))
    mask, all_q, all_k, all_v = biases.BlockDiagonalMask.from_tensor_lists_qkv(q, k, k)
    assert all_v is not None and torch.equal(all_k, all_v) and all_k.shape == (1, 19, 2, 8)
    assert all(torch.equal(a, b) for a, b in zip(mask.split_queries(all_q), q, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mask.split_kv(all_v), k, strict=True))
    assert biases.BlockDiagonalMask.from_tensor_lists_qkv(q, k)[3] is None
    with pytest.raises(ValueError, match="call split_queries or split_kv"):
        mask.split(all_q)
    with pytest.raises(ValueError, match=r"shape \(1, 19, 2, 8\): must be \(1, 14, ...\)"):
        mask.split_queries(all_k)
    with pytest.raises(ValueError, match=r"tensors_v\[0\] has shape \(1, 3, 2, 8\): must begin with \(1, 5\)"):
        biases.BlockDiagonalMask.from_tensor_lists_qkv(q, k, q)


def test_sequence_infos() -> None:
    """What the three kinds keep of their sequences, and what they take in place."""
    plain = biases._SeqLenInfo.from_seqlens([2, 3, 2], device=torch.device("cpu"))
    assert (plain.max_seqlen, plain.min_seqlen, plain.seqstart_py) == (3, 2, [0, 2, 5, 7])
    tensor = plain.seqstart
    plain.from_seqlens_inplace([1, 0, 3])
    assert plain.seqstart is tensor and tensor.tolist() == plain.seqstart_py == [0, 1, 1, 4]
    with pytest.raises(ValueError, match=r"max\(seqlens\) = 4: must be at most 3"):
        plain.from_seqlens_inplace([1, 0, 4])
    with pytest.raises(ValueError, match="must have 3, as before"):
        plain.from_seqlens_inplace([1, 0])

    padded = biases._PaddedSeqLenInfo.from_seqlens_padded([2, 3, 2], 4, device="cpu")
    assert (padded.max_seqlen, padded.min_seqlen, padded.padding) == (3, 2, 4)
    assert padded.seqstart.tolist() == padded.seqstart_py == [0, 4, 8, 12]
    assert padded.seqlen.tolist() == padded.seqlen_py == [2, 3, 2]
    assert list(padded.intervals()) == [(0, 2), (4, 7), (8, 10)]
    padded.from_seqlens_padded_inplace([0, 1, 3])
    assert padded.seqlen.tolist() == padded.seqlen_py == [0, 1, 3]
    with pytest.raises(ValueError, match=r"seqlens\[2\] = 5: must be at most padding = 4"):
        biases._PaddedSeqLenInfo.from_seqlens_padded([2, 3, 5], 4)

    gappy = biases._GappySeqInfo.from_seqlens_gappy([0, 7, 12, 14], [6, 3, 1], False, device="cpu")
    assert gappy.seqstart_py == [0, 7, 12, 14] and gappy.seqlen.tolist() == gappy.seqlen_py == [6, 3, 1]
    assert list(gappy.intervals()) == [(0, 6), (7, 10), (12, 13)]
    with pytest.raises(ValueError, match="seqstarts has 3 numbers: must have 4"):
        biases._GappySeqInfo.from_seqlens_gappy([0, 7, 12], [6, 3, 1], False)
    paged = biases._GappySeqInfo.from_seqlens_gappy([0, 7, 2], [6, 3, 0], True, device="cpu")
    assert paged.seqstart.tolist() == paged.seqstart_py == [0, 7, 2, -1] and (paged.max_seqlen, paged.min_seqlen) == (
        6,
        0,
    )
    assert paged.seqlen.tolist() == paged.seqlen_py == [6, 10, 2]
    with pytest.raises(ValueError, match="seqstarts has 2 numbers: must have 1"):
        biases._GappySeqInfo.from_seqlens_gappy([0, 7], [6], True)
    for info in (padded, gappy):
        with pytest.raises(NotImplementedError, match="split"):
            info.split(torch.zeros(1, 12))


def test_lengths_in_place(device: str) -> None:
    """A bias whose lengths are changed in place means the new ones."""
    bias = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 2], 6, [6, 6], device=device)
    q = torch.randn(1, 4, 2, 8, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 12, 2, 8, device=device, dtype=torch.bfloat16)
    bias.k_seqinfo.from_seqlens_padded_inplace([3, 5])
    fresh = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 2], 6, [3, 5], device=device)
    out = fmha.memory_efficient_attention(q, k, v, bias)
    assert torch.equal(out, fmha.memory_efficient_attention(q, k, v, fresh))


# ---- what is refused


def test_wrong_shapes(device: str) -> None:
    q = torch.randn(2, 6, 4, 8, device=device, dtype=torch.bfloat16)
    attention = fmha.memory_efficient_attention
    with pytest.raises(ValueError, match=r"query has shape \(6, 8\)"):
        attention(q[0, :, 0], q, q)
    with pytest.raises(ValueError, match=r"key has shape \(2, 6, 1, 8\): must be \(2, 'seqlen_k', 4, 8\); expand"):
        attention(q, q[:, :, :1], q)
    with pytest.raises(ValueError, match=r"key has shape \(2, 6, 4, 4\)"):
        attention(q, q[..., :4], q)
    with pytest.raises(ValueError, match=r"value has shape \(2, 5, 4, 8\): must be \(2, 6, 4, 'head_dim_v'\)"):
        attention(q, q, q[:, :5])
    for shape in ((2, 1, 6, 6), (1, 4, 6, 6), (2, 4, 6, 5), (6, 6), (2, 4, 6)):
        with pytest.raises(ValueError, match=r"attn_bias has shape .*: must be \(2, 4, 6, 6\)"):
            attention(q, q, q, torch.zeros(shape, device=device))
    bias = biases.LowerTriangularMask().add_bias(torch.zeros(2, 4, 5, 6, device=device))
    with pytest.raises(ValueError, match=r"attn_bias has shape \(2, 4, 5, 6\)"):
        attention(q, q, q, bias)
    with pytest.raises(
        ValueError, match=r"attn_bias.dtype = torch.bool: must be float32 or torch.bfloat16.*masked_fill"
    ):
        attention(q, q, q, torch.ones(2, 4, 6, 6, device=device, dtype=torch.bool))
    with pytest.raises(ValueError, match="query has a batch of 2: must be 1"):
        attention(q, q, q, biases.BlockDiagonalMask.from_seqlens([6, 6], device=device))
    with pytest.raises(ValueError, match="query has 6 tokens: must have 7"):
        attention(q[:1], q[:1], q[:1], biases.BlockDiagonalMask.from_seqlens([3, 4], [3, 3], device=device))
    with pytest.raises(ValueError, match="key has 6 tokens: must have 5"):
        attention(q[:1], q[:1], q[:1], biases.BlockDiagonalMask.from_seqlens([3, 3], [3, 2], device=device))
    with pytest.raises(ValueError, match="key has 6 tokens: must have 8"):
        bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens([3, 3], 4, [3, 2], device=device)
        attention(q[:1], q[:1], q[:1], bias)
    with pytest.raises(ValueError, match="4...7 of block 1: must lie within 6"):
        bias = biases.BlockDiagonalGappyKeysMask.from_seqlens([3, 3], [0, 4, 6], [3, 4], device=device)
        attention(q[:1], q[:1], q[:1], bias)
    with pytest.raises(ValueError, match="BlockDiagonalMask, with a query of 3 dimensions"):
        attention(q[:1, :, 0], q[:1, :, 0], q[:1, :, 0], biases.BlockDiagonalMask.from_seqlens([6], device=device))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, q, q)
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4, 3\): must be \(2, 4, 6\)"):
        fmha.memory_efficient_attention_backward(out, out, lse[..., :3], q, q, q)
    with pytest.raises(ValueError, match=r"grad has shape \(2, 3, 4, 8\): must be \(2, 6, 4, 8\)"):
        fmha.memory_efficient_attention_backward(out[:, :3], out, lse, q, q, q)


def test_wrong_numbers(device: str) -> None:
    q = torch.randn(2, 6, 4, 8, device=device, dtype=torch.bfloat16)
    attention = fmha.memory_efficient_attention
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=rf"p = {p}: must lie in \[0, 1\)"):
            attention(q, q, q, p=p)
    with pytest.raises(ValueError, match="key.dtype = torch.float16: must be torch.bfloat16"):
        attention(q, q.half(), q)
    with pytest.raises(TypeError, match="value is of type 'list'"):
        attention(q, q, [q])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="attn_bias is of type 'str'"):
        attention(q, q, q, "causal")  # type: ignore[arg-type]
    for number in (0, -2):
        with pytest.raises(ValueError, match=f"window_size = {number}: must be at least 1"):
            biases.LowerTriangularFromBottomRightMask().make_local_attention(number)
        with pytest.raises(ValueError, match=f"window_size = {number}: must be at least 1"):
            biases.BlockDiagonalMask.from_seqlens([3], device=device).make_local_attention(number)
    with pytest.raises(ValueError, match="window_right = -1: must be at least 0"):
        biases.LocalAttentionFromBottomRightMask(1, -1)
    with pytest.raises(ValueError, match="block 1 has 4 queries and 3 keys"):
        biases.BlockDiagonalMask.from_seqlens([3, 4], [4, 3]).make_causal_from_bottomright()
    with pytest.raises(RuntimeError, match="block 0 has 9 queries and 3 keys: with window_size = 6"):
        biases.BlockDiagonalMask.from_seqlens([9], [3]).make_local_attention(6)
    with pytest.raises(ValueError, match="kv_seqlen has 1 numbers: must have 2"):
        biases.BlockDiagonalMask.from_seqlens([3, 4], [4])
    with pytest.raises(ValueError, match=r"seqlens\[1\] = -4"):
        biases.BlockDiagonalMask.from_seqlens([3, -4])
    with pytest.raises(TypeError, match="seqlens is a tensor"):
        biases.BlockDiagonalMask.from_seqlens(torch.tensor([3, 4]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must end with \(7, 7\)"):
        biases.BlockDiagonalMask.from_seqlens([3, 4]).materialize((7, 8))


def test_what_cannot_be_done(device: str) -> None:
    """Each is refused by its name, before anything is computed."""
    q = torch.randn(2, 6, 4, 8, device=device, dtype=torch.bfloat16)
    attention = fmha.memory_efficient_attention

    class Mine(biases.LowerTriangularMask):
        pass

    with pytest.raises(NotImplementedError, match="attn_bias is a Mine, which Tessera does not know"):
        attention(q, q, q, Mine())
    with pytest.raises(NotImplementedError, match="output_dtype = torch.float32: must be None or torch.bfloat16"):
        attention(q, q, q, output_dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="query.dtype = torch.float64"):
        attention(q.double(), q.double(), q.double())
    with pytest.raises(NotImplementedError, match="key.dtype = torch.int32"):
        attention(q, q.int(), q.int())
    with pytest.raises(NotImplementedError, match="query.dtype = torch.float8_e4m3fn"):
        attention(q.to(torch.float8_e4m3fn), q, q)
    with pytest.raises(NotImplementedError, match="p = 0.5, must be 0"):
        fmha.memory_efficient_attention_forward_requires_grad(q, q, q, p=0.5)
    with pytest.raises(NotImplementedError, match="p = 0.5, must be 0"):
        fmha.memory_efficient_attention_backward(q, q, q, q, q, q, p=0.5)


# ---- beside attention


def test_beside_attention() -> None:
    """What models call beside attention, and what a name that is not there says."""
    x = torch.randn(5, 3, 4, requires_grad=True)
    assert all(torch.equal(a, b) for a, b in zip(xops.unbind(x, 1), x.unbind(1), strict=True))
    index, source, scaling = torch.tensor([3, 0]), torch.randn(2, 3, 4, requires_grad=True), torch.randn(4)
    out = xops.scaled_index_add(own := x.clone(), index, source, scaling, alpha=0.5)
    assert out is own
    expected = x.detach().clone()
    expected[3] += 0.5 * scaling * source[0].detach()
    expected[0] += 0.5 * scaling * source[1].detach()
    torch.testing.assert_close(out, expected)
    (gradient,) = torch.autograd.grad(out.sum(), source)
    torch.testing.assert_close(gradient, (0.5 * scaling).expand(2, 3, 4))
    plain = xops.scaled_index_add(x.detach().clone(), index, source.detach())
    torch.testing.assert_close(plain[3], x[3] + source[0])
    a, b = torch.randn(4, 3), torch.randn(6, 2)
    picked = xops.index_select_cat([a, b], [torch.tensor([2, 0]), torch.tensor([5])])
    assert torch.equal(picked, torch.cat((a[2], a[0], b[5])))
    with pytest.raises(AttributeError, match="has no SwiGLU: torch.nn.Linear"):
        xops.SwiGLU  # noqa: B018
    with pytest.raises(ImportError):
        from tessera.compat.xformers.ops import SwiGLU  # noqa: F401
    assert not hasattr(xops, "anything_else")
