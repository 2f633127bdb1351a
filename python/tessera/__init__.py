"""Tessera: exact attention, one tile at a time, for torch tensors, NumPy arrays, and JAX arrays on the CPU.

`attention` computes, `explain` says how, `combine` merges results over parts of the keys. `quantize` makes tensors of 8
bits and their scales, `scaled_attention` is for these, `explain_scaled` explains it. `cached_attention` reads a cache
of keys and values, which `explain_cached` explains, `append` writes to it; they are for torch tensors. `KVCache` and
`CachedSequences` are such caches as objects, `PagePool` and `PagedSequence` keep account of their pages.
`tessera.torch` has what only PyTorch needs (custom ops, SDPA), `tessera.transformers` makes
`attn_implementation="tessera"` known to Hugging Face, `tessera.compat` stands in for the `flash_attn` and `xformers`
packages. Importing `tessera` imports none of these frameworks.
"""

import os as _os
import sys as _sys
from collections.abc import Sequence as _Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from . import frameworks as _frameworks
from .arguments import Arguments as _Arguments
from .arguments import Array as _Array
from .arguments import ArrayT as _ArrayT
from .pages import OutOfPages, PagedSequence, PagePool
from .quantized import Quantized, quantize
from .scaled import explain_scaled, scaled_attention

if TYPE_CHECKING:
    from typing import Literal, overload

    from typing_extensions import Unpack

    from .arguments import Keywords
    from .torch.kv_cache import CachedSequences as CachedSequences
    from .torch.kv_cache import KVCache as KVCache

__all__ = [
    "OutOfPages",
    "PagePool",
    "PagedSequence",
    "Quantized",
    "__version__",
    "append",
    "attention",
    "cached_attention",
    "combine",
    "explain",
    "explain_cached",
    "explain_scaled",
    "get_num_threads",
    "gpu",
    "quantize",
    "scaled_attention",
    "set_num_threads",
]

__version__: str = _native.version()

for _folder in _sys.path:
    # Wheels of the CUDA toolkit. Not below the current folder, whatever that is.
    if isinstance(_folder, str) and _os.path.isabs(_folder) and _os.path.isdir(_os.path.join(_folder, "nvidia")):
        _native.add_nvrtc_folder(_folder)

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_native.after_fork)

if TYPE_CHECKING:  # typing has Unpack since Python 3.11

    @overload
    def attention(
        q: _ArrayT,
        k: _ArrayT,
        v: _ArrayT,
        *,
        qv: _ArrayT | None = None,
        precision: Literal["e4m3", "int8"] | None = None,
        return_lse: Literal[False] = False,
        **keywords: Unpack[Keywords],
    ) -> _ArrayT: ...

    @overload
    def attention(
        q: _ArrayT,
        k: _ArrayT,
        v: _ArrayT,
        *,
        qv: _ArrayT | None = None,
        precision: Literal["e4m3", "int8"] | None = None,
        return_lse: Literal[True],
        **keywords: Unpack[Keywords],
    ) -> tuple[_ArrayT, _ArrayT]: ...

    @overload
    def attention(
        q: _ArrayT,
        k: _ArrayT,
        v: _ArrayT,
        *,
        qv: _ArrayT | None = None,
        precision: Literal["e4m3", "int8"] | None = None,
        return_lse: bool,
        **keywords: Unpack[Keywords],
    ) -> _ArrayT | tuple[_ArrayT, _ArrayT]: ...


def attention(
    q: _ArrayT,
    k: _ArrayT,
    v: _ArrayT,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    bias: _Array | None = None,
    sink: _Array | None = None,
    dropout_p: float = 0.0,
    rng_state: _Array | _Sequence[int] | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    qv: _ArrayT | None = None,
    precision: str | None = None,
) -> _ArrayT | tuple[_ArrayT, _ArrayT]:
    """softmax(softmax_scale q k^T + bias) v, without ever holding a seqlen_q x seqlen_k matrix.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or packed (total_q, num_heads, head_dim) if `cu_seqlens_q` is given.
            float32 (CPU only), bfloat16 or float16. Any strides, the last one 1.
        k: (batch, seqlen_k, num_heads_k, head_dim), or (total_k, num_heads_k, head_dim). num_heads must be a multiple
            of num_heads_k: query head h reads key head h // (num_heads // num_heads_k).
        v: like k, with a head_dim_v of its own.
        causal: query i sees the keys up to its own position: the same as a window whose right end is 0.
        window: (left, right) keys beside its own position that a query sees, both ends included; -1 is unbounded.
            Together with `causal` right must be 0 or -1.
        alignment: "bottom_right": query i stands at key position i + seqlen_k - seqlen_q; "top_left": at i.
        softmax_scale: what q k^T is multiplied with; None is 1 / sqrt(head_dim), with `qv` of head_dim + head_dim_v.
        softcap: if positive, scores become softcap * tanh(score / softcap).
        alibi_slopes: float32 (num_heads,) or (batch, num_heads); adds -slope * |i + seqlen_k - seqlen_q - j|.
        bias: (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k or 1), float32 or q's type, added to the scores;
            -inf hides a key. Packed: seqlen_q and seqlen_k are max_seqlen_q and max_seqlen_k.
        sink: float32 (num_heads,), one more logit in the denominator of every softmax.
        dropout_p: probability with which a weight becomes 0; the others are divided by 1 - dropout_p.
        rng_state: (seed, offset) of the dropout mask; torch: an int64 tensor of 2 on the CPU. None: drawn from the
            framework's generator for the CPU. Equal states give equal masks on every device. JAX while it traces:
            must be given, two integers or an integer array of shape (2,), which may be traced.
        cu_seqlens_q: int32 (batch + 1,), where each packed sequence of queries starts, and the total.
        cu_seqlens_k: the same for the keys; None is cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: bounds of the packed sequences' lengths. None: read from cu_seqlens on a CPU; on a
            GPU that would wait for the device, so they must be given, as where JAX traces cu_seqlens. max_seqlen_k:
            None is max_seqlen_q if cu_seqlens_k is None.
        return_lse: also return lse.
        deterministic: dq is the same bit for bit in every run, too; o, lse, dk and dv always are.
        batch_invariant: the bits of a sequence's result do not depend on the rest of the batch.
        qv: a second query of each row, like q with v's head_dim: scores are q k^T + qv v^T, as latent attention with
            absorbed weights has them (MLA: k is the rotated part, v the latent rows). Without gradients and dropout.
        precision: None: as the inputs are. "e4m3": q, k and v are rounded to 8 bits on the way, for the tensor cores of
            Hopper GPUs; o errs by some 5 %. "int8": q and k are, and v, of 16 bits, stays; by some 1 %, on the same.
            docs/python.md has the recipe, and when it is faster. Without dropout; a bias is float32. Gradients are
            those of 16 bits at the rounded tensors.

    Returns:
        o, like q with v's head_dim; with `return_lse` (o, lse): float32, the natural logarithm of each softmax's
        denominator, (batch, num_heads, seqlen_q) or (num_heads, total_q). A query that sees no key gets o = 0 and
        lse = -inf. torch and JAX: differentiable in q, k, v, bias and sink, and through lse.

    Raises:
        ValueError: an argument makes no sense; the text names it, its value, and what would be accepted.
        NotImplementedError: no kernel of this device does it; the text holds the reason of every kernel.
        RuntimeError: the machine refused: no driver, a driver that is too old, no memory.
        TypeError: what must be a tensor, or a number, is none.

    The method is FlashAttention's (Dao et al. 2022, algorithms 1 and 4; Dao 2023, sections 3.1 and 3.2; on Hopper,
    Shah et al. 2024, section 3).
    """
    framework: Any = _frameworks.torch_ops if isinstance(q, _frameworks.Tensor) else _frameworks.framework_of(q)
    # By position: keywords cost most of a microsecond more.
    arguments = _Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, dropout_p, rng_state, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, batch_invariant,
    )  # fmt: skip
    results: _ArrayT | tuple[_ArrayT, _ArrayT]
    if qv is not None:
        if precision is not None:
            raise ValueError(f"precision = {precision!r} together with qv, which is of 16 or 32 bits: must be None")
        results = _frameworks.latent_module(q).attention_with_qv(q, k, v, qv, arguments, return_lse)
        return results
    if precision is not None:
        results = _frameworks.precision_module(q).attention(q, k, v, arguments, precision, return_lse)
        return results
    results = framework.attention(q, k, v, arguments, return_lse)
    return results


def explain(
    q: _ArrayT,
    k: _ArrayT,
    v: _ArrayT,
    *,
    backward: bool = False,
    device: str | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _Array | None = None,
    bias: _Array | None = None,
    sink: _Array | None = None,
    dropout_p: float = 0.0,
    rng_state: _Array | _Sequence[int] | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    qv: _ArrayT | None = None,
) -> str:
    """The plan for the same arguments: the problem in one line, and every kernel with its cost or its refusal.

    Args:
        backward: plan the gradients.
        device: plan for another processor, e.g. "h200", "gpu:1", "avx2"; None is where the tensors are. Tensors on the
            CPU plan for a GPU without one.
        q, k, v and the others: as `attention` takes them.

    Raises: as `attention`.
    """
    framework = _frameworks.framework_of(q)
    arguments = _Arguments(
        causal, window, alignment, softmax_scale, softcap, alibi_slopes, bias, sink, dropout_p, rng_state, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, batch_invariant,
    )  # fmt: skip
    tensors, options = framework.prepare(q, k, v, arguments)
    second = None if qv is None else _frameworks.latent_module(q).prepare_qv(qv, tensors[0])
    return _native.explain(*tensors[:3], None, None, *tensors[3:], second, *options, 0, 0, backward, device)


def combine(o_parts: _ArrayT, lse_parts: _ArrayT, *, dtype: Any = None) -> tuple[_ArrayT, _ArrayT]:
    """Merges attention over parts of the keys into attention over all of them; outside autograd.

    Every part is what `attention(..., return_lse=True)` gives for some of the keys, for the same queries.

    Args:
        o_parts: (num_splits, batch, seqlen, heads, head_dim) or packed (num_splits, total, heads, head_dim): the o of
            all parts, stacked. float32, bfloat16 or float16, on a CPU or a GPU. Any strides, the last one 1.
        lse_parts: float32 (num_splits, batch, heads, seqlen) or (num_splits, heads, total): their lse, stacked. Any
            strides. -inf: the part saw no key; its o is not looked at and may hold anything.
        dtype: of o, a type of the framework's; None is o_parts' own.

    Returns:
        (o, lse): o (batch, seqlen, heads, head_dim) or (total, heads, head_dim), lse float32 (batch, heads, seqlen) or
        (heads, total). Where no part saw a key o = 0 and lse = -inf. A row's parts are added in their order: the same
        call gives the same bits.

    Raises: as `attention`; NotImplementedError also for torch tensors that require a gradient, outside torch.no_grad():
        there is none.
    """
    results: tuple[_ArrayT, _ArrayT] = _frameworks.framework_of(o_parts, "o_parts").combine(o_parts, lse_parts, dtype)
    return results


def cached_attention(
    q: _ArrayT,
    k_cache: _ArrayT,
    v_cache: _ArrayT,
    *,
    seqlens: _ArrayT | None = None,
    lengths: str = "after",
    seqlen_new: int | None = None,
    cu_seqlens_new: _ArrayT | None = None,
    page_table: _ArrayT | None = None,
    skip_pages: bool = False,
    prefix_levels: int = 0,
    cache_index: _ArrayT | None = None,
    leftpad: _ArrayT | None = None,
    k_scale: _ArrayT | None = None,
    v_scale: _ArrayT | None = None,
    qv: _ArrayT | None = None,
    cu_seqlens_q: _ArrayT | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    sink_tokens: int = 0,
    tree_mask: _ArrayT | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _ArrayT | None = None,
    sink: _ArrayT | None = None,
    batch_invariant: bool = False,
    k_new: _ArrayT | None = None,
    v_new: _ArrayT | None = None,
    max_seqlen_new: int | None = None,
    rotary_cos: _ArrayT | None = None,
    rotary_sin: _ArrayT | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: _ArrayT | None = None,
    rotary_constant_q: bool = False,
    out: _ArrayT | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention over keys and values that lie in a cache, with lengths that the device reads; outside autograd.

    For torch tensors. Nothing waits for a GPU, so a CUDA graph may be replayed with other lengths and pages. With
    `k_new` and `v_new` it is a step of decoding in one call: `append`, then attention, which sees the new keys.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or packed (total_q, num_heads, head_dim) if `cu_seqlens_q` is given.
            Causal masks and windows are aligned to the last key: query i stands at i + keys - seqlen_q.
        k_cache: (batch, capacity, num_heads_k, head_dim), or (num_pages, page_size, num_heads_k, head_dim) if
            `page_table` is given. Any strides, the last one 1; pages of any size. Of q's type, or of 8 bits with
            scales: float8_e4m3fn (or its bits as uint8) or int8, which are widened exactly.
        v_cache: like k_cache, with a head_dim_v and strides of its own.
        seqlens: int32 (batch,), the filled slots of each sequence. A negative one, or no keys: o = 0, lse = -inf.
            None: all slots are filled.
        lengths: "after": `seqlens` counts the new keys, which are in the cache. "before": it does not; `seqlen_new`
            more are seen. "full": there are no lengths.
        seqlen_new: how many new keys each sequence has; with `cu_seqlens_new` any bound, None is the capacity. Not
            with `k_new`, which says it.
        cu_seqlens_new: int32 (batch + 1,), where each sequence's new keys begin in a packed row of them. With "before"
            and packed queries only, and then it must be given; with packed `k_new`, too.
        page_table: int32 or int64 (batch, pages): slot s of a sequence is slot s % page_size of page
            page_table[b, s // page_size]. What is beyond the length is not read and may be anything.
        skip_pages: a number below 0 in `page_table` is no page: nobody sees its keys. With pages of one key a row of
            the table is a list of the keys that a query sees (top-k). Keys have no positions then, so nothing that asks
            for these goes with it: causal, window, chunk, sink_tokens, tree_mask, leftpad, alibi_slopes.
        prefix_levels: 1 to 4: neighbouring sequences of the batch may have the same pages first in their rows of
            `page_table`, and some of these further ones in common, so many levels at most. A GPU finds out on the
            device, and reads what is shared once where that pays. It changes the result by rounding only.
        cache_index: int32 (batch,): sequence b has row cache_index[b] of the cache, or of `page_table`; None: row b.
        leftpad: int32 (batch,): the keys of a sequence begin at that slot. Lengths count slots, positions count keys.
        k_scale, v_scale: of caches of 8 bits, float32, what their elements are multiplied by: one number; (batch,
            num_heads_k); or one for every slot and head, shaped as the cache without head_dim, any strides, so it
            may lie within the pages.
            v_cache alone may be of 8 bits; then only it has a scale. v_scale may also have one for each of some equal
            groups of columns: v_cache's shape with so many in place of head_dim.
        qv: a second query of each row, like q with v_cache's head_dim: scores are q k^T + qv v^T. k_cache and v_cache
            may be columns of one row, as of latent attention (MLA). Never rotated. Not of a k_cache of 8 bits.
        cu_seqlens_q, max_seqlen_q, causal, window, softmax_scale, softcap, alibi_slopes, sink, batch_invariant: as
            `attention` takes them.
        chunk: queries see only keys of their own chunk of so many positions; 0: all.
        sink_tokens: so many first keys are seen, whatever the left end of the window or of the chunk is.
        tree_mask: int64 or uint64 (batch, seqlen_q), packed (total_q,): bit j of a query's number says that it sees
            the j-th of the last seqlen_q keys, which may be at most 64. The window counts as well.
        k_new, v_new, max_seqlen_new: new rows, which are appended first, as `append` takes them; `lengths` says where
            they go. None: they have been appended, or there are none.
        rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, rotary_constant_q: with new rows, by which these
            and q are rotated, as `append` takes them; None: nothing is.
        out: where o is written; None: a new tensor.
        return_lse: also return lse.

    Returns:
        o, like q with v_cache's head_dim; with `return_lse` (o, lse), as `attention`.

    Raises: as `attention`; NotImplementedError also for tensors that require a gradient, outside torch.no_grad(). On a
        CPU lengths and pages that do not exist are a ValueError. On a GPU nobody reads them before: a length beyond
        the capacity counts as the capacity, and a page that does not exist holds zeros.
    """
    module = _frameworks.torch_cache if isinstance(q, _frameworks.Tensor) else _frameworks.cache_module(q, "q")
    return module.cached_attention(
        q, k_cache, v_cache, seqlens, lengths, seqlen_new, cu_seqlens_new, page_table, cache_index, leftpad,
        cu_seqlens_q, max_seqlen_q, causal, window, chunk, sink_tokens, tree_mask, softmax_scale, softcap, alibi_slopes,
        sink, batch_invariant, k_new, v_new, max_seqlen_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
        rotary_constant_q, out, return_lse, False, k_scale, v_scale, qv, skip_pages, prefix_levels,
    )  # fmt: skip


def explain_cached(
    q: _ArrayT,
    k_cache: _ArrayT,
    v_cache: _ArrayT,
    *,
    device: str | None = None,
    seqlens: _ArrayT | None = None,
    lengths: str = "after",
    seqlen_new: int | None = None,
    cu_seqlens_new: _ArrayT | None = None,
    page_table: _ArrayT | None = None,
    skip_pages: bool = False,
    prefix_levels: int = 0,
    cache_index: _ArrayT | None = None,
    leftpad: _ArrayT | None = None,
    k_scale: _ArrayT | None = None,
    v_scale: _ArrayT | None = None,
    qv: _ArrayT | None = None,
    cu_seqlens_q: _ArrayT | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    sink_tokens: int = 0,
    tree_mask: _ArrayT | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _ArrayT | None = None,
    sink: _ArrayT | None = None,
    batch_invariant: bool = False,
) -> str:
    """The plan of `cached_attention` for the same arguments: the problem in one line, every kernel with its cost or its
    refusal, how keys are divided, and the bytes that are read and needed. Lengths are not looked at: where a device
    reads them, a plan counts with the capacity. An `append` has no plan: it is one kernel, without a workspace.

    Args:
        device: as `explain` takes it.
        q, k_cache, v_cache and the others: as `cached_attention` takes them.

    Raises: as `cached_attention`.
    """
    text: str = _frameworks.cache_module(q, "q").explain_cached(
        q, k_cache, v_cache, device,
        {
            "seqlens": seqlens, "cu_seqlens_new": cu_seqlens_new, "page_table": page_table, "cache_index": cache_index,
            "leftpad": leftpad, "cu_seqlens_q": cu_seqlens_q, "tree_mask": tree_mask, "alibi_slopes": alibi_slopes,
            "sink": sink, "k_scale": k_scale, "v_scale": v_scale, "qv": qv,
        },
        {
            "lengths": lengths, "seqlen_new": seqlen_new, "max_seqlen_q": max_seqlen_q, "causal": causal,
            "window": window, "chunk": chunk, "sink_tokens": sink_tokens, "softmax_scale": softmax_scale,
            "softcap": softcap, "batch_invariant": batch_invariant, "skip_pages": skip_pages,
            "prefix_levels": prefix_levels,
        },
    )  # fmt: skip
    return text


def append(
    k_new: _ArrayT,
    v_new: _ArrayT,
    k_cache: _ArrayT,
    v_cache: _ArrayT,
    *,
    seqlens: _ArrayT | None = None,
    lengths: str = "before",
    cu_seqlens_new: _ArrayT | None = None,
    max_seqlen_new: int | None = None,
    page_table: _ArrayT | None = None,
    cache_index: _ArrayT | None = None,
    slot_mapping: _ArrayT | None = None,
    q: _ArrayT | None = None,
    cu_seqlens_q: _ArrayT | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: _ArrayT | None = None,
    rotary_sin: _ArrayT | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: _ArrayT | None = None,
    rotary_positions: _ArrayT | None = None,
    rotary_constant_q: bool = False,
    k_scale: _ArrayT | None = None,
    v_scale: _ArrayT | None = None,
) -> _ArrayT | None:
    """Writes new keys and values into a cache, in place, and rotates keys and queries by their positions.

    For torch tensors, outside autograd. Every new row is written once, also of sequences without queries. On a GPU it
    is one kernel, and nothing waits for it.

    Args:
        k_new: (batch, seqlen_new, num_heads_k, head_dim), or packed (total_new, num_heads_k, head_dim) with
            `cu_seqlens_new` or `slot_mapping`. Of the cache's type; float32, bfloat16 or float16 if that has 8 bits.
        v_new: the same with head_dim_v. Values are copied bit for bit, or quantised.
        k_cache, v_cache, page_table, cache_index: the cache, as `cached_attention` takes it.
        seqlens: int32 (batch,), the filled slots of each sequence; a negative one leaves the sequence alone.
        lengths: "before": new rows go behind what `seqlens` counts. "after": they are the last of what it counts.
        cu_seqlens_new: int32 (batch + 1,), where each sequence's new rows begin.
        max_seqlen_new: any bound of their numbers; None is total_new.
        slot_mapping: int64 (total_new,), instead of `seqlens`: the slot of each new row, page * page_size + slot, or
            row * capacity + slot; -1: the row is not written.
        q: queries to rotate, (batch, seqlen_q, num_heads, head_dim), or packed if `cu_seqlens_q` or `slot_mapping` is
            given.
        cu_seqlens_q, max_seqlen_q: as `attention` takes them.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or the cache's type. The first rotary_dim columns
            are rotated; None: nothing is.
        rotary_interleaved: pairs are the columns 2j and 2j + 1; otherwise j and j + rotary_dim / 2.
        rotary_seqlens: int32 (batch,), the position of each sequence's first new row and first query; None: the slot
            to which the first new row goes, left padding counted.
        rotary_positions: int32 or int64, with `slot_mapping`: the position of row i of q and of row i of k_new.
        rotary_constant_q: all queries of a sequence have the position of its first one.
        k_scale, v_scale: float32, iff the cache is of 8 bits: new rows, rotated before, are divided by their scale and
            rounded to the nearest element, those beyond the type's range to its end. () or (batch, num_heads_k), with
            `slot_mapping` (1, num_heads_k): they are read. k_cache's shape without head_dim: they are written, each the
            largest number of its row over the type's largest, 448 or 127.

    Returns:
        The rotated q, or None without q.

    Raises: as `cached_attention`. On a GPU a row without a slot is not written, and one without a position in the
        tables is copied; on a CPU both are a ValueError.
    """
    module = (
        _frameworks.torch_cache
        if isinstance(k_cache, _frameworks.Tensor)
        else _frameworks.cache_module(k_cache, "k_cache")
    )
    result: _ArrayT | None = module.append(
        k_new, v_new, k_cache, v_cache, seqlens, lengths, cu_seqlens_new, max_seqlen_new, page_table, cache_index,
        slot_mapping, q, cu_seqlens_q, max_seqlen_q, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
        rotary_positions, rotary_constant_q, k_scale, v_scale,
    )  # fmt: skip
    return result


def __getattr__(name: str) -> Any:
    """`KVCache` and `CachedSequences`, which need torch: imported with their first use."""
    if name not in ("CachedSequences", "KVCache"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .torch import kv_cache

    return getattr(kv_cache, name)


def set_num_threads(num_threads: int) -> None:
    """Use that many threads on the CPU from now on; results do not depend on it. Default: all the process may use."""
    _native.set_num_threads(num_threads)


def get_num_threads() -> int:
    """How many threads runs on the CPU use."""
    return _native.get_num_threads()


def gpu(ordinal: int = 0, *, required: bool = False) -> str | None:
    """The name of a GPU of this machine that Tessera has kernels for, e.g. "NVIDIA H200"; None if there is none.

    Args:
        ordinal: the number of the GPU, from 0.
        required: raise the reason instead of returning None. A tensor on that GPU is told the same.

    Raises:
        RuntimeError: with `required`; no driver, no such GPU, or no kernels for it.
        ValueError: ordinal is negative.
    """
    try:
        return _native.gpu(ordinal)
    except RuntimeError:
        if required:
            raise
        return None


# Now if possible: what torch.compile has seen of this module must not change afterwards.
if "torch" in _sys.modules:
    _frameworks.bind_torch()
