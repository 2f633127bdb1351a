"""The compiled half (python/native/module.cpp): every argument is given by position.

    forward(inputs, qv, options, rng, framework)
    backward(inputs, options, rng, gradients, framework)
    explain(inputs, qv, options, rng, backward: bool, device: str | None)
    scaled_forward(inputs, scales, options, rng, framework)
    explain_scaled(inputs, scales, options, rng, device: str | None)
    quantize(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, k_mean, score_shift, v_shift, signs, cu_seqlens_q,
        cu_seqlens_k, rotary_cos, rotary_sin, rotary_seqlens, q_given: bool, k_given: bool, v_given: bool, max_seqlen_q,
        max_seqlen_k, k_block, v_block, hadamard, v_tiles: bool, rotary_interleaved: bool, rotary_constant_q: bool,
        framework)

inputs: q, k, v, o, lse, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, each anything with DLPack, or None where
it is optional. options: the ten of `tessera.arguments.Options`. scales: q_scale, k_scale, v_scale, score_shift,
v_shift, k_block, v_block, and head_dim_v or None. rng: seed and offset, integers taken modulo 2^64. gradients: dout,
dlse, dq, dk, dv, dbias, dsink. `explain_scaled` looks at o's shape and type, not at its memory. `quantize` writes what
ends on _out, score_shift, and scales unless they are given; of q, k and v each may be None. `framework` is None, or of
tensors that may lie on a GPU a tuple: the class that all of them must be of; `stream_of(q)`, the handle of the CUDA
stream of a run; and `allocate(bytes, q)`, a tensor of that many bytes on the GPU of q. The functions are asked where
the class does not offer the same to C (DLPack's table of functions), and never on a CPU.

    cached_forward(q, k_cache, v_cache, o, lse, alibi_slopes, sink, cu_seqlens_q, seqlens, cu_seqlens_new, page_table,
        cache_index, leftpad, tree_mask, k_scale, v_scale, qv, max_seqlen_q, lengths, seqlen_new, softmax_scale,
        softcap, window_left, window_right, chunk, sink_tokens, batch_invariant, skip_pages, prefix_levels,
        framework)
    cached_step(k_new, v_new, q_out, rotary_cos, rotary_sin, rotary_seqlens, max_seqlen_new, rotary_interleaved,
        rotary_constant_q, and all of cached_forward)
    append(k_new, v_new, k_cache, v_cache, q, q_out, seqlens, cu_seqlens_new, page_table, cache_index, cu_seqlens_q,
        slot_mapping, rotary_cos, rotary_sin, rotary_seqlens, rotary_positions, k_scale, v_scale, lengths, max_seqlen_q,
        max_seqlen_new, rotary_interleaved, rotary_constant_q, framework)
    explain_cached(as cached_forward up to prefix_levels, o and lse None, device: str | None)

They mean what `tessera.cached_attention`, `append` and `explain_cached` say. `cached_step` is an append and the
attention after it, of q_out where that is given. Both return o, a new tensor where o is None; for that their
`framework` has `empty_like` and `empty_o(q, v)`, the second for what the first does not fit. Bounds of what is not
packed are not looked at; max_seqlen_q and seqlen_new may be None.

    is_plain(watch, *tensors) -> bool

Whether a call with these tensors, or None, may go straight to the library: `tessera.torch.ops.WATCH`.

combine merges o_parts (num_splits, batch, seqlen, heads, head_dim) and lse_parts (num_splits, batch, heads, seqlen)
into o (batch, seqlen, heads, head_dim) and lse (batch, heads, seqlen) or None; packed: without batch, and total for
seqlen.

dropout_mask writes 1 for every weight that is kept into keep, contiguous uint8 (batch, num_heads, seqlen_q, seqlen_k)
on the CPU.

Failures raise ValueError (an argument makes no sense), NotImplementedError (no kernel does it) or RuntimeError (the
machine refused), and name the argument.
"""

from typing import Any

def forward(*arguments: Any) -> None: ...
def backward(*arguments: Any) -> None: ...
def explain(*arguments: Any) -> str: ...
def scaled_forward(*arguments: Any) -> None: ...
def explain_scaled(*arguments: Any) -> str: ...
def quantize(*arguments: Any) -> None: ...
def cached_forward(*arguments: Any) -> Any: ...
def cached_step(*arguments: Any) -> Any: ...
def explain_cached(*arguments: Any) -> str: ...
def append(*arguments: Any) -> None: ...
def is_plain(*arguments: Any) -> bool: ...
def combine(o_parts: Any, lse_parts: Any, o: Any, lse: Any, framework: Any, /) -> None: ...
def dropout_mask(keep: Any, dropout_p: float, seed: int, offset: int, /) -> None: ...
def set_num_threads(num_threads: int, /) -> None: ...
def get_num_threads() -> int: ...
def after_fork() -> None: ...
def version() -> str: ...
def gpu(ordinal: int, /) -> str: ...
def add_nvrtc_folder(folder: str, /) -> None: ...
