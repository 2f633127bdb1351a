"""Tessera for Hugging Face transformers (5.x): attn_implementation="tessera".

Importing this module registers two functions under that name: `attention_forward`, which computes a layer's attention,
and `attention_mask`, which is asked once per forward pass and kind of layer what its mask is.

What the mask becomes. transformers describes a mask by a function of positions. The ones it builds itself from
causality, sliding windows and packed sequences are recognised by what they are made of, and become arguments of the
kernels: a `Mask`, which holds no matrix. A padding mask comes on top of it:

    no padding                      nothing
    one run of tokens a sequence    packed pieces, cut on the device (tessera/torch/padding.py)
    anything else                   a bias of (batch, 1, 1, seqlen_k), exact for any padding

To tell these apart the host looks at the padding mask once per forward pass and kind of layer, as transformers' own
sdpa does. Where it must not look (torch.compile, torch.export, a CUDA graph being captured) it takes the bias.

A single query, a step of decoding, goes another way (`decode.py`): the kernels get the lengths of the caches, or a list
of the slots that are seen, which the device makes from the mask. The host looks at nothing.

Models with latent attention (MLA) cache less than keys. `absorb` has a step read that, instead of keys of every head.

Continuous batching (`generate_batch`) has no masks at all: `continuous.py` reads the pages of transformers' own cache.

Every other mask (chunks, images that see themselves, a user's or_mask_function or and_mask_function, windows and packed
sequences that torch.compile hides) becomes a bias of (batch, 1, seqlen_q, seqlen_k), which transformers' eager and sdpa
masks are as well. It is exact, but it is quadratic, so `QuadraticMaskWarning` says so, once; turn it into an error with
warnings.simplefilter("error", QuadraticMaskWarning).

Outputs at padding tokens mean nothing in any implementation. Here they are zero in causal layers, but for those at the
end of a sequence: without gradients the very last one is what transformers' own attention gives, as generate() goes on
from there.

A model whose attention does not go through transformers' AttentionInterface is refused when it is made, by name
(`models.py`); one that has other layers of attention besides gets an `OwnAttentionWarning` that names them. A mask
that reaches such a layer all the same refuses to be computed with. It is never None, which would hide nothing.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .. import attention
from ..torch.tensors import rows
from . import continuous, latent
from .decode import DecodeMask
from .elements import check_keys, total_bias
from .latent import absorb
from .masks import Mask, QuadraticMaskWarning, attention_mask
from .models import OwnAttentionWarning, guard

__all__ = [
    "DecodeMask", "Mask", "OwnAttentionWarning", "QuadraticMaskWarning", "absorb", "attention_forward",
    "attention_mask", "register",
]  # fmt: skip


# Tensors that transformers hands to every layer, whose attention does not depend on them.
_HARMLESS = frozenset(
    {"cache_position", "labels", "mm_token_type_ids", "num_items_in_batch", "position_ids", "token_type_ids"}
)


def register(name: str = "tessera") -> None:
    """Make `attn_implementation=name` known to transformers. Importing this module has done it for "tessera"."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    continuous.allow(name)
    latent.allow(name)
    for guarded in (name, f"paged|{name}"):
        guard(guarded)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | DecodeMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer.

    Args:
        module: the layer; `is_causal` is read from it if the argument is None.
        query: (batch, num_heads, seqlen_q, head_dim). float32 (CPU only), bfloat16 or float16.
        key, value: (batch, num_heads_k, seqlen_k, head_dim or head_dim_v).
        attention_mask: what `attention_mask` returned, or a tensor of elements: boolean (True attends) or a bias, which
            broadcasts to (batch, num_heads, seqlen_q, seqlen_k). None: everything, or causal as `is_causal` says.
        dropout: of the weights.
        scaling: None is 1 / sqrt(head_dim).
        sliding_window: read with `cu_seq_lens_q` only; else the mask holds the window.
        softcap: None is none.
        s_aux: (num_heads,), one more logit in the denominator of each head.
        position_bias: (batch or 1, num_heads or 1, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, as DataCollatorWithFlattening makes
            them. They take the place of attention_mask; causality is `is_causal` and the window `sliding_window`.
        deterministic: whether the gradient of query is the same bit for bit in every run.
        kwargs: refused if they may change the result: output_attentions, and tensors that are not known to be harmless
            (models hand on indices of the keys to be seen, sinks of each query, ...); all others are ignored.

    Returns: (batch, seqlen_q, num_heads, head_dim_v), and None in place of the weights.

    Raises:
        NotImplementedError: weights are asked for, or changed; or no kernel does it.
        ValueError: as `tessera.attention`.
    """
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions is given: there is no matrix of weights; use attn_implementation='eager'"
        )
    for name, other in kwargs.items():
        if isinstance(other, Tensor) and name not in _HARMLESS:
            raise NotImplementedError(
                f"{name} is given, which may change the result and is not known here: use attn_implementation='eager'"
            )
    is_step = False
    if latent.is_absorbed(module):
        others = dropout > 0 or cu_seq_lens_q is not None or position_bias is not None
        is_step = not others and latent.is_step(module, query, key, attention_mask)
        if not is_step:
            key, value = latent.expand(module, key, value)
    q, k, v = (rows(x).transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.reshape(-1).float(),
        "dropout_p": dropout,
        "deterministic": bool(deterministic),
    }
    if is_step:
        return latent.attend(module, q, k, v, attention_mask, options), None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if cu_seq_lens_q is not None:
        if isinstance(attention_mask, Tensor) and not torch.compiler.is_compiling():
            raise ValueError("cu_seq_lens_q is given together with a 4-D attention_mask: must be one of the two")
        if position_bias is not None:
            raise NotImplementedError("position_bias is given together with cu_seq_lens_q")
        left = -1 if sliding_window is None else sliding_window - 1
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        o = attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            cu_seqlens_q=cu_seq_lens_q.to(torch.int32), cu_seqlens_k=cu_seq_lens_k.to(torch.int32),
            max_seqlen_q=_longest(max_length_q, q), max_seqlen_k=_longest(max_length_k, k),
            window=(left, 0 if causal else left), **options,
        )  # fmt: skip
        return o.unflatten(0, q.shape[:2]), None
    if isinstance(attention_mask, (Mask, DecodeMask)):
        return attention_mask.attend(q, k, v, position_bias, **options), None
    bias = attention_mask
    if bias is not None:
        check_keys(bias.shape, k)
    if bias is None and causal and q.shape[1] > 1:
        # More keys than queries mean an empty static cache, as in transformers' sdpa: those after the queries are void.
        keys = q.shape[1]
        k, v = k[:, :keys], v[:, :keys]
        position_bias = None if position_bias is None else position_bias[..., :keys]
        options["causal"] = True
    return attention(q, k, v, bias=total_bias(bias, position_bias, q), **options), None


def _longest(given: int | None, tokens: Tensor) -> int:
    """A bound of the sequences' lengths."""
    return tokens.shape[0] * tokens.shape[1] if given is None else int(given)


register()
