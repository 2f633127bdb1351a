"""xformers' memory-efficient attention on Tessera: upstream's ``xformers.ops.fmha``.

Names, order and defaults of the arguments, shapes and conventions are upstream's.

* Every bias of :mod:`.attn_bias` is there. Blocks are sequences of packed tensors, and no matrix of queries by keys is
  ever made. What is not used of padded keys, and of keys with gaps that are in order, is passed over where it lies;
  sequences of keys that overlap or are out of order are gathered.
* Keys in pages are a cache: pages of any size are read where they lie. So are, without gradients and dropout and with
  few queries, padded keys and keys that overlap or are out of order, which are not gathered then.
* ``op`` is accepted and changes nothing: Tessera's plan picks the kernel. Nothing of it is checked.
* Gradients: of query, key, value and of a bias's tensor. Those of heads that are one head expanded are summed over the
  group in the group's first head, which is right once ``expand`` has summed them.
* lse is packed with blocks, (1, heads, total), as FlashAttention's operator has it upstream; CUTLASS' pads it.

What differs from upstream:

* Tensors on the CPU are accepted, all biases have gradients, groups of heads too, and head dimensions are not limited.
  float32 is for the CPU: a GPU has no kernel for it.
* Keys in pages have no gradients and no dropout. ``make_paged`` refuses a class that means another band than the bias.
* Queries that see no key have o = 0 and lse = -inf.
* Dropout: other random numbers, drawn from torch's CPU generator. ``p = 1`` is refused.
* float64, quantised keys, and an ``output_dtype`` that is not query's are refused.
* ``memory_efficient_attention_partial`` and ``merge_attentions`` are not there:
  :func:`memory_efficient_attention_forward_requires_grad` and ``flash_attn_interface.flash_attn_combine`` compute them.
"""

from tessera.compat.xformers.ops.fmha import (
    attn_bias,
    ck,
    ck_splitk,
    cutlass,
    cutlass_blackwell,
    flash,
    flash3,
    triton_splitk,
)
from tessera.compat.xformers.ops.fmha._functions import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from tessera.compat.xformers.ops.fmha.attn_bias import AttentionBias, BlockDiagonalMask, LowerTriangularMask
from tessera.compat.xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase

MemoryEfficientAttentionCkOp = (ck.FwOp, ck.BwOp)
MemoryEfficientAttentionCutlassBlackwellOp = (cutlass_blackwell.FwOp, cutlass_blackwell.BwOp)
MemoryEfficientAttentionCutlassFwdFlashBwOp = (cutlass.FwOp, flash.BwOp)
MemoryEfficientAttentionCutlassOp = (cutlass.FwOp, cutlass.BwOp)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, flash.BwOp)
MemoryEfficientAttentionSplitKCkOp = (ck_splitk.FwOp, ck.BwOp)

ALL_FW_OPS: list[type[AttentionFwOpBase]] = [
    cutlass.FwOp, cutlass_blackwell.FwOp, flash.FwOp, flash3.FwOp, triton_splitk.FwOp,
]  # fmt: skip
ALL_BW_OPS: list[type[AttentionBwOpBase]] = [cutlass.BwOp, cutlass_blackwell.BwOp, flash.BwOp, flash3.BwOp]

_use_fa3 = True


def _set_use_fa3(use_flash_attention3: bool) -> None:
    """Remembered for :func:`_get_use_fa3`, and without effect."""
    global _use_fa3
    _use_fa3 = use_flash_attention3


def _get_use_fa3() -> bool:
    return _use_fa3


__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "AttentionBias",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassBlackwellOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "attn_bias",
    "ck",
    "ck_splitk",
    "cutlass",
    "cutlass_blackwell",
    "flash",
    "flash3",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "triton_splitk",
]
