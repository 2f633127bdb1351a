"""Upstream's classes of operators, which callers pass as ``op=``. They change nothing: Tessera's plan picks kernels."""

from __future__ import annotations

from typing import Any

import torch


class AttentionOpBase:
    """What callers read of an operator before they pass it on."""

    NAME: str = "tessera"
    OPERATOR_CATEGORY = "memory_efficient_attention"
    SUPPORTED_DEVICES = {"cpu", "cuda"}
    SUPPORTED_DTYPES = {torch.float16, torch.bfloat16}  # on every device; a CPU takes float32, too
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    IS_DETERMINISTIC = True  # where torch.use_deterministic_algorithms asks for it
    VARLEN_LSE_PACKED = True

    @classmethod
    def is_available(cls) -> bool:
        return True


class AttentionFwOpBase(AttentionOpBase):
    """A forward pass."""

    NAME = "tesseraF"


class AttentionBwOpBase(AttentionOpBase):
    """A backward pass."""

    NAME = "tesseraB"
    SUPPORTS_ATTN_BIAS_GRAD = True


# (forward, backward), each a class or None. As upstream, a name for callers' annotations.
AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]

# What `op` may be; it is not looked at.
AnyOp = Any
