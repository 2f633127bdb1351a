"""What is not done, in sentences: what an argument is, and what gives the same result, where something does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LEFT_PADDING = (
    "how many keys at the start of each sequence are hidden. The same result: pack k and v without them, with the "
    "cu_seqlens_k that follow"
)
_CACHE = "a part of appends to a cache, which this operator cannot write: call flash_attn_with_kvcache"
_PIECES = "{}. The same result: pack k and v without the keys that are not used, and leave seqused_k out"

# Every sentence goes on after "<function>: <argument> is given: ".
_REASONS = {
    "qv": (
        "queries of a second product, with the values, that is added to the scores: q, k and v have 16 bits then, "
        "upstream, too. The same result: dequantise them first"
    ),
    "attention_chunk": (
        "queries see only the keys in their own chunk of that many, which takes dense k and v that are not float8, no "
        "gradient and no seqused_q. The same result where seqlen_q = seqlen_k: pack the chunks as sequences of their "
        "own, with cu_seqlens at every chunk's start"
    ),
    "leftpad_k": _LEFT_PADDING,
    "k_new": _CACHE,
    "v_new": _CACHE,
    "cu_seqlens_k_new": _CACHE,
    "rotary_cos": _CACHE,
    "rotary_sin": _CACHE,
    "seqlens_rotary": _CACHE,
    "cu_seqlens_k": "where the sequences of packed keys begin, which a cache has not",
    "seqused_q": (
        "how many queries of each sequence are used. The same result: pack q, with the cu_seqlens_q that follow"
    ),
    "out_": "a tensor for the result. The same result: copy what is returned into it",
    "dropout_p": _PIECES.format("with seqused_k it would need the mask of whole sequences"),
    "alibi_slopes": _PIECES.format("with seqused_k it would need slopes for the pieces of sequences"),
}

FLOAT8 = {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}


def refuse(function: str, **arguments: Any) -> None:
    """Raises NotImplementedError for the first of the arguments that is given: neither None nor zero."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{function}: {name} is given, which Tessera cannot do yet: {_REASONS[name]}")


def refuse_gradients(function: str, **tensors: Tensor) -> None:
    """Raises NotImplementedError for the first of the tensors whose gradient autograd would ask for."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"{function}: {name} requires a gradient: call it under torch.no_grad()")


def refuse_float8(**tensors: Tensor | None) -> None:
    """Raises NotImplementedError for the first of the tensors that is of 8 bits."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype in FLOAT8:
            raise NotImplementedError(
                f"{name}.dtype = {tensor.dtype}: float8 is for flash_attn_interface, and there q, k and v must all be "
                f"torch.float8_e4m3fn, or a cache alone; dequantise first: {name}.to(torch.bfloat16), multiplied by "
                "its factor if it has one"
            )
