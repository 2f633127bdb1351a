"""Tensors of 8 bits and their scales, made of wider ones: rule S14 of docs/semantics.md."""

from typing import Any, NamedTuple

from . import frameworks
from .arguments import Array, ArrayT, Quantization
from .scaled import explain_scaled, scaled_attention


class Quantized(NamedTuple):
    """What `quantize` makes, under the names of `scaled_attention`; None where there is nothing.

    A tuple, so that torch.compile and JAX see through it.
    """

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    score_shift: Any
    v_shift: Any
    k_block: int
    v_block: int
    head_dim_v: int | None  # iff v lies in tiles
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def attention(self, **options: Any) -> Any:
        """`scaled_attention` of them. options: its keywords, e.g. causal=True; v, if it was not quantised here."""
        return scaled_attention(**self._asdict() | options)

    def explain(self, **options: Any) -> str:
        """`explain_scaled` of them, and of the same options."""
        return explain_scaled(**self._asdict() | options)


def quantize(
    q: ArrayT | None = None,
    k: ArrayT | None = None,
    v: ArrayT | None = None,
    *,
    dtype: Any = None,
    q_scale: Array | str = "token",
    k_scale: Array | str = "block",
    v_scale: Array | str | None = "block",
    k_block: int = 128,
    v_block: int = 512,
    v_tiles: bool = False,
    k_mean: Array | None = None,
    v_shift: Array | None = None,
    hadamard: int = 0,
    signs: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Array | None = None,
    rotary_constant_q: bool = False,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Quantized:
    """Makes q, k and v of 8 bits, and their scales, of 16 or 32, in one pass; outside autograd.

        made = tessera.quantize(q, k, v, hadamard=128, v_tiles=q.is_cuda)
        o = made.attention(causal=True)

    A row of q goes through rotary embedding, signs, Hadamard transform, scale and cast, in float32. A row of k the
    same, but that k_mean is subtracted after its rotation; of v only v_shift is, before it is scaled. Rotary embedding
    is the only step that changes attention by more than rounding.

    Args:
        q, k, v: as `attention` takes them, all of one type. Each may be None: then it is not made. Without k, v says
            how many keys there are; without both queries have positions of their own.
        dtype: of the results: float8_e4m3fn, a type of the framework's or its name, or int8. None: float8_e4m3fn.
        q_scale: "token": a scale for each row, which takes its largest number to the type's largest. "head", "tensor":
            one for a sequence and all query heads of a key head, or for all, computed here in a pass of its own; not
            with rotary embedding or a Hadamard transform. Or float32 scales, () or (batch, num_heads_k).
        k_scale: "block", for `k_block` keys each; "head", "tensor", or scales, as of q.
        v_scale: "block", for `v_block` keys each; "head", "tensor", and "channel" for a column of a sequence and head,
            (batch, num_heads_k, head_dim_v); or scales. None: v, of 16 bits, stays as it is.
        k_block, v_block: keys that share a scale. Kernels of a GPU want multiples of 32 and of their own block of keys:
            512 does for v, but 384 beside a head_dim of 192. Those for long sequences want 96 and 768 at a head_dim
            of 97 to 128, 128 and 768 above 192, or multiples.
        v_tiles: v lies as tensor cores multiply it, (batch, num_heads_k, tiles, 4, rows, 32), packed without batch. It
            spares a GPU a pass over v; a CPU takes it, too. Of float8_e4m3fn and up to 256 columns.
        k_mean: float32 (batch, num_heads_k, head_dim), subtracted from all keys of a sequence and head, such as their
            mean. score_shift is made beside q then, and gives it back.
        v_shift: float32 (batch, num_heads_k, head_dim_v), subtracted from v; `scaled_attention` adds it.
        hadamard: columns of a block of the Hadamard transform of q and k: 0, or a power of two up to 256 that divides
            head_dim. It spreads outliers over a block, and changes no dot product.
        signs: float32 (head_dim,) of 1 and -1: columns of q and k that are negated before the transform.
        rotary_cos, rotary_sin, rotary_interleaved, rotary_constant_q: as `append` takes them, in float32 or q's type.
        rotary_seqlens: int32 (batch,), the position of each sequence's first key; None: 0. Its queries are seqlen_k -
            seqlen_q further on; without k and v they are there themselves.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as `attention` takes them. Without q those of k do.

    Returns:
        A `Quantized`, with everything that `scaled_attention` takes of it. Scales and tiles that belong to no packed
        sequence are not written.

    Raises: as `attention`; NotImplementedError also for torch tensors that require a gradient, outside torch.no_grad(),
        and for what JAX traces.
    """
    given = Quantization(
        dtype, q_scale, k_scale, v_scale, k_block, v_block, v_tiles, k_mean, v_shift, hadamard, signs, rotary_cos,
        rotary_sin, rotary_interleaved, rotary_seqlens, rotary_constant_q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k,
    )  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            made: Quantized = frameworks.quantize_module(x, name).quantize(q, k, v, given)
            return made
    raise ValueError("q, k and v are None: at least one of them is quantised")
