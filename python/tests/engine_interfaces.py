"""The interfaces that tessera.serve is written for, as they are in these releases' wheels on PyPI: what methods are
called, their parameters in order with defaults, and what is read of the engines' objects.

vLLM 0.14.1 is of 2026-01-23, 0.33.0 of 2026-11-01; SGLang 0.5.8 of 2026-01-23, 0.5.23 of 2026-10-30. "cls" and "self"
are left out.
"""

_BACKEND = {
    "get_name": "",
    "get_impl_cls": "",
    "get_builder_cls": "",
    "supports_head_size": "head_size",
    "supports_compute_capability": "capability",
    "supports_attn_type": "attn_type",
    "supports_sink": "",
}
_BUILDER = {
    "__init__": "kv_cache_spec, layer_names, vllm_config, device",
    "build": "common_prefix_len, common_attn_metadata, fast_build=False",
    "update_block_table": "metadata, blk_table, slot_mapping",
}
# As layers call it, with sinks among the arguments that models add.
_IMPL = {
    "__init__": (
        "num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, "
        "kv_cache_dtype='auto', logits_soft_cap=None, attn_type='decoder', kv_sharing_target_layer_name=None, "
        "sinks=None"
    ),
    "forward": (
        "layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None"
    ),
    "process_weights_after_loading": "act_dtype",
}
VLLM = {
    "0.14.1": {
        "AttentionBackend": {
            **_BACKEND,
            "get_kv_cache_shape": "num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str='auto'",
            "get_kv_cache_stride_order": "include_num_layers_dimension=False",
        },
        "AttentionMetadataBuilder": _BUILDER,
        "AttentionImpl": _IMPL,
    },
    "0.33.0": {
        "AttentionBackend": {
            **_BACKEND,
            "supports_sliding_window": "",
            "supports_non_causal": "",
            "supports_per_head_quant_scales": "",
            "supports_batch_invariance": "",
        },
        "AttentionMetadataBuilder": _BUILDER,
        "AttentionImpl": {
            **_IMPL,
            # Called where a backend says that forward does not write; and by speculators.
            "do_kv_cache_update": "layer, key, value, kv_cache, slot_mapping",
        },
    },
}
# validate_configuration calls it by position.
VLLM_SUPPORTS_COMBINATION = {
    "0.14.1": "head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, device_capability",
    "0.33.0": (
        "head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability"
    ),
}
# Fields of CommonAttentionMetadata without a default, and causal, in both.
VLLM_COMMON = (
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
)  # fmt: skip

_LAYER = "q, k, v, layer, forward_batch, save_kv_cache=True"
_SGLANG = {
    "init_forward_metadata": "forward_batch",
    "init_cuda_graph_state": "max_bs, max_num_tokens",
    "get_cuda_graph_seq_len_fill_value": "",
    "forward_decode": _LAYER,
    "forward_extend": _LAYER,
}
SGLANG = {
    "0.5.8": {
        **_SGLANG,
        "init_forward_metadata_capture_cuda_graph": (
            "bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info"
        ),
        "init_forward_metadata_replay_cuda_graph": (
            "bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info, seq_lens_cpu"
        ),
    },
    "0.5.23": {**_SGLANG, "init_forward_metadata_out_graph": "forward_batch, in_capture=False"},
}


def parameters(signature: str) -> list[tuple[str, str | None]]:
    """Names and defaults, as they are written."""
    pairs = (part.partition("=") for part in signature.split(", ") if part)
    return [(name, default if equals else None) for name, equals, default in pairs]
