"""Attention of tensors of 8 bits and their scales: rule S14 of docs/semantics.md."""

from typing import Any

from . import frameworks
from .arguments import Arguments, Array, ArrayT, Scales


def scaled_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    q_scale: Array,
    k_scale: Array,
    v_scale: Array | None = None,
    *,
    k_block: int = 0,
    v_block: int = 0,
    head_dim_v: int | None = None,
    score_shift: Array | None = None,
    v_shift: Array | None = None,
    dtype: Any = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """`attention` of q, k and v of 8 bits, whose values are elements times scales; outside autograd.

    A GPU takes float8_e4m3fn, with head dims that are multiples of 16; v in rows is laid out as tiles first. `quantize`
    makes all of it. The shape of a scale says which elements share one; () may also be (1,). Scales are float32, with
    any strides of batch and head, 0 too; a last dimension of rows, blocks or columns is contiguous. A missing scale is
    never taken for 1.

    Args:
        q, k: float8_e4m3fn or int8, both the same; shapes as `attention` takes them. NumPy: of ml_dtypes.
        v: of their type, or bfloat16 or float16. Or, of float8_e4m3fn, in tiles, as `quantize` makes them: (batch,
            num_heads_k, tiles, 4, rows, 32), packed without batch.
        q_scale: () for all of q; (batch, num_heads_k) for a sequence and all query heads of a key head; (batch,
            num_heads, seqlen_q) for a row. Packed, a row's are (1, num_heads, total_q), or (num_heads, total_q) unless
            that is (batch, num_heads_k) as well: two dimensions that may mean both are a sequence's and a head's.
        k_scale: () for all of k; (batch, num_heads_k) for a sequence and head; with `k_block` that many keys share
            one, (batch, num_heads_k, ceil(seqlen_k / k_block)). Blocks are counted from a sequence's first key. Packed,
            they are (num_heads_k, total_k // k_block + batch), and sequence b's first is number cu_seqlens_k[b] //
            k_block + b.
        v_scale: the same with `v_block`; or, without, (batch, num_heads_k, head_dim_v) for a column of a sequence and
            head. None where v is of 16 bits, and only there.
        k_block, v_block: keys that share a scale; 0: scales are not by block.
        head_dim_v: the columns of v, iff it lies in tiles, whose shape does not say it.
        score_shift: float32, shaped as a row's q_scale: added to q k^T of the row, before softmax_scale. Where a vector
            c was taken off all keys before they were rounded, it is q c.
        v_shift: float32 (batch, num_heads_k, head_dim_v), added to every value of a column, after its scale.
        dtype: of o: bfloat16, float16 or float32; with v of 16 bits v's or float32. None: v's type of 16 bits, else
            bfloat16.
        bias: as `attention` takes it, of float32.
        causal and the others: as `attention` takes them.

    Returns:
        o, like q with v's columns, of `dtype`; with `return_lse` (o, lse), as `attention`.

    Raises: as `attention`; NotImplementedError also for torch tensors that require a gradient, outside torch.no_grad(),
        and for what JAX traces.
    """
    scales = Scales(q_scale, k_scale, v_scale, score_shift, v_shift, k_block, v_block, head_dim_v)
    arguments = Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, 0.0, None, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, False, batch_invariant,
    )  # fmt: skip
    return frameworks.scaled_module(q).scaled_attention(q, k, v, scales, arguments, dtype, return_lse)


def explain_scaled(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    q_scale: Array,
    k_scale: Array,
    v_scale: Array | None = None,
    *,
    device: str | None = None,
    k_block: int = 0,
    v_block: int = 0,
    head_dim_v: int | None = None,
    score_shift: Array | None = None,
    v_shift: Array | None = None,
    dtype: Any = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
) -> str:
    """The plan of `scaled_attention` for the same arguments: the problem in one line, and every kernel with its cost or
    its refusal.

    Args:
        device: as `explain` takes it.
        q, k, v and the others: as `scaled_attention` takes them.

    Raises: as `scaled_attention`.
    """
    scales = Scales(q_scale, k_scale, v_scale, score_shift, v_shift, k_block, v_block, head_dim_v)
    arguments = Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, 0.0, None, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, False, batch_invariant,
    )  # fmt: skip
    text: str = frameworks.scaled_module(q).explain_scaled(q, k, v, scales, arguments, dtype, device)
    return text
