"""Modules of upstream that have no stand-in, and what Tessera has instead of each.

Importing one raises :class:`MissingModuleError`, which ``except ImportError`` catches as it does any missing module.
"""

from __future__ import annotations

_BLOCK = (
    "torch.nn.Linear around {}, with flash_attn.layers.rotary for the positions, is what its classes compute; torch.nn."
    "functional.scaled_dot_product_attention under tessera.torch.sdpa_mode() serves existing modules"
)
_CROSS_ENTROPY = "torch.nn.functional.cross_entropy has the same loss"
_NORM = "torch.nn.functional.layer_norm and rms_norm compute the same"
_NOT_ATTENTION = "it is not about attention, and torch has what it does"
_OLD = "call flash_attn_func or flash_attn_varlen_func instead, which have its results"

# The longest of these names that a module's name begins with says what there is instead.
_INSTEAD = {
    "flash_attn.cute": "flash_attn and flash_attn_interface are the stand-ins for FlashAttention-2 and -3",
    "flash_attn.flash_attn_triton": _OLD,
    "flash_attn.flash_attn_triton_amd": _OLD,
    "flash_attn.flash_attn_triton_og": _OLD,
    "flash_attn.flash_blocksparse_attention": "no mask of blocks is there: flash_attn_func has windows, "
    "tessera.attention a bias",
    "flash_attn.flash_blocksparse_attn_interface": "no mask of blocks is there: flash_attn_func has windows, "
    "tessera.attention a bias",
    "flash_attn.fused_softmax": "attention computes its softmax itself; torch.softmax is the one alone",
    "flash_attn.layers.patch_embed": "torch.nn.Conv2d with kernel_size equal to stride computes the same",
    "flash_attn.losses": _CROSS_ENTROPY,
    "flash_attn.models": "transformers has these models: import tessera.transformers and ask for "
    'attn_implementation="tessera"',
    "flash_attn.modules": _NOT_ATTENTION + "; flash_attn_func and flash_attn_varlen_func are what its attention calls",
    "flash_attn.modules.mha": "its classes (MHA, ParallelMHA, SelfAttention, CrossAttention, FlashSelfAttention, "
    "FlashCrossAttention) are not there. " + _BLOCK.format("flash_attn_func or flash_attn_varlen_func"),
    "flash_attn.ops.activations": "torch.nn.functional.gelu and silu compute the same",
    "flash_attn.ops.fused_dense": "torch.nn.Linear computes the same",
    "flash_attn.ops.layer_norm": _NORM,
    "flash_attn.ops.rms_norm": _NORM,
    "flash_attn.ops.triton.cross_entropy": _CROSS_ENTROPY,
    "flash_attn.ops.triton.k_activations": "torch.nn.functional.gelu and silu compute the same",
    "flash_attn.ops.triton.layer_norm": _NORM,
    "flash_attn.ops.triton.linear": "torch.nn.Linear computes the same",
    "flash_attn.ops.triton.mlp": "torch.nn.Linear and an activation compute the same",
    "flash_attn.utils": _NOT_ATTENTION,
    "flash_mla.cuda": "flash_mla_with_kvcache is there, which calls it",
    "flash_mla.fused_norm_rope_attn_rope_cast": "flash_mla_with_kvcache is there, without what is fused around it",
    "xformers.benchmarks": "bench/ of the repository measures Tessera",
    "xformers.checkpoint": "torch.utils.checkpoint has the same",
    "xformers.components": "xformers.ops.memory_efficient_attention is there, which they call",
    "xformers.factory": "xformers.ops.memory_efficient_attention is there, which its blocks call",
    "xformers.flash_attn_3": "flash_attn_interface is the stand-in for FlashAttention-3",
    "xformers.info": "tessera.gpu() and tessera.explain say what Tessera can do here",
    "xformers.profiler": _NOT_ATTENTION,
    "xformers.sparse": _NOT_ATTENTION,
    "xformers.triton": _NOT_ATTENTION,
}


class MissingModuleError(ModuleNotFoundError):
    """A module of upstream that has no stand-in; the text says what there is instead."""

    def __init__(self, name: str) -> None:
        text = f"Tessera stands in for {name.partition('.')[0]} and has no {name}"
        instead = _instead_of(name)
        super().__init__(text if instead is None else f"{text}: {instead}", name=name)


def is_upstream(name: str) -> bool:
    """Whether upstream has a module of that name, as far as is written here."""
    return _instead_of(name) is not None


def _instead_of(name: str) -> str | None:
    while name:
        if name in _INSTEAD:
            return _INSTEAD[name]
        name = name.rpartition(".")[0]
    return None
