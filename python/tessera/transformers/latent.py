"""Latent attention (MLA, DeepSeek-V2, section 2.1) without expanding the cache at every step of decoding.

transformers caches one latent row and one rotated key a token, of all heads, and makes keys and values of each head
from all of them whenever a token comes. `absorb` has a step multiply the query by what would expand keys, read the
cache as it lies, and expand the one row of the result: scores are q k^T + qv v^T, where v are the latent rows.
Everything else, prompts, gradients, packed sequences, continuous batching, goes on as before.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from .. import cached_attention
from .decode import DecodeMask
from .masks import Mask

# What a layer of latent attention has in transformers.
_PARTS = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Implementations whose attention takes what `_hand_on` returns.
_names: set[str] = set()


def allow(name: str) -> None:
    """From now on, layers of attn_implementation=name may leave it to attention to expand the cache."""
    _names.add(name)


def absorb(model: nn.Module) -> int:
    """From now on, steps of decoding of a model's layers with latent attention (MLA) do not expand its cache.

    A step of one token multiplies its query by the weights that expand keys, and attends to the latent rows that
    transformers caches: fewer bytes are read and none are written. The result is the same but for rounding. Nothing is
    copied, weights may be changed and moved afterwards, and other implementations of attention go on as before.

    Args:
        model: of attn_implementation="tessera", now or later: DeepSeek-V2 and -V3, and what transformers makes of
            their attention. To undo it, delete `expand_kv` of its layers.

    Returns:
        How many layers there are.

    Raises:
        ValueError: there are none, or one whose kv_b_proj is no plain torch.nn.Linear without a bias.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if all(hasattr(layer, part) for part in _PARTS)]
    if not layers:
        raise ValueError(f"model is of {type(model).__name__}, which has no layer of latent attention (MLA)")
    for name, layer in layers:
        if not _is_plain(layer):
            raise ValueError(f"model: {name}.kv_b_proj must be a plain torch.nn.Linear without a bias")
    for _, layer in layers:
        layer.expand_kv = types.MethodType(_hand_on, layer)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """Whether its weights alone say what expands."""
    return type(layer.kv_b_proj) is nn.Linear and layer.kv_b_proj.bias is None


def _hand_on(layer: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: key and value are what the cache has, for `attention_forward` to decide."""
    return (k_rot, kv_nope) if layer.config._attn_implementation in _names else expand(layer, k_rot, kv_nope)


def is_absorbed(layer: nn.Module) -> bool:
    return "expand_kv" in vars(layer)


def expand(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads."""
    expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, value, key)
    return expanded


def is_step(layer: Any, query: Tensor, key: Tensor, mask: Any) -> bool:
    """Whether the cache can be attended to as it is: one query a sequence, and nobody wants gradients."""
    if query.shape[2] != 1 or not _is_plain(layer):
        return False
    if not isinstance(mask, DecodeMask) and _seen(mask, key.shape[2]) is None:
        return False
    weight = layer.kv_b_proj.weight
    if weight.dtype is not query.dtype:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, weight)))


def _seen(mask: Any, keys: int) -> tuple[int, tuple[int, int]] | None:
    """How many of the keys there are for one query, and its window; None if the mask says more than that."""
    if mask is None:
        return keys, (-1, -1)
    if not isinstance(mask, Mask) or mask.keep is not None or mask.pieces is not None:
        return None
    if mask.shape[3] != keys:  # of the new key alone, as a model may ask for whose first layer is no attention
        return (keys, (-1, -1)) if mask.shape[2:] == (1, 1) else None
    return (mask.keys, mask.window) if mask.alignment == "bottom_right" else None


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """A step: (batch, 1, num_heads, head_dim_v).

    Args:
        q: (batch, 1, num_heads, qk_nope_head_dim + qk_rope_head_dim).
        k: the rotated keys, (batch, seqlen_k, 1, qk_rope_head_dim).
        v: the latent rows, (batch, seqlen_k, 1, kv_lora_rank).
        mask: one of which `is_step` is true.
    """
    nope = layer.qk_nope_head_dim
    # Of each head: (num_heads, nope or head_dim_v, kv_lora_rank).
    weights = layer.kv_b_proj.weight.view(q.shape[2], -1, layer.kv_lora_rank)
    to_keys, to_values = weights.split((nope, layer.v_head_dim), 1)
    qv = torch.bmm(q[:, 0, :, :nope].transpose(0, 1), to_keys).transpose(0, 1)[:, None]
    q = q[..., nope:]
    if isinstance(mask, DecodeMask):
        o = mask.attend(q, k, v, None, qv=qv, **options)
    else:
        seen = _seen(mask, k.shape[1])
        assert seen is not None
        keys, window = seen
        scores = {name: options[name] for name in ("softmax_scale", "softcap", "sink")}
        o = cached_attention(q, k[:, :keys], v[:, :keys], window=window, qv=qv, **scores)
    return torch.bmm(o[:, 0].transpose(0, 1), to_values.mT).transpose(0, 1)[:, None]
