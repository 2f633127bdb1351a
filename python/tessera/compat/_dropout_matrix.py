"""The matrix of attention weights with its dropout mask, for the callers of upstream who ask for it. O(seqlen^2)."""

from __future__ import annotations

import torch
from torch import Tensor

import tessera.torch
from tessera.compat._attention import Keywords


def dropout_matrix(q: Tensor, k: Tensor, keywords: Keywords) -> Tensor:
    """Upstream's ``S_dmask``.

    Args:
        q, k: as given to ``tessera.attention``, dense or packed.
        keywords: its other arguments, with ``rng_state``; no softcap, bias or sink.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128, of q's type: exp(score - m)
        with m the largest score that the query sees; negative where the weight was dropped; 0 where the query sees
        nothing. Packed: the lengths are max_seqlen_q and max_seqlen_k.
    """
    with torch.no_grad():
        if "cu_seqlens_q" in keywords:
            q, length_q = _padded(q, keywords["cu_seqlens_q"], keywords["max_seqlen_q"])
            k, length_k = _padded(k, keywords["cu_seqlens_k"], keywords["max_seqlen_k"])
        else:
            length_q, length_k = (x.new_full((x.shape[0],), x.shape[1], dtype=torch.int32) for x in (q, k))
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = k.shape[1]
        matrix = q.new_zeros(batch, heads, -(-seqlen_q // 128) * 128, -(-seqlen_k // 128) * 128)
        if batch * seqlen_q * seqlen_k > 0:
            weights = _weights(q, k, length_q, length_k, keywords)
            keep = tessera.torch.dropout_mask(
                keywords["rng_state"], keywords["dropout_p"], batch, heads, seqlen_q, seqlen_k, q.device
            )
            matrix[:, :, :seqlen_q, :seqlen_k] = torch.where(keep, weights, -weights)
        return matrix


def _weights(q: Tensor, k: Tensor, length_q: Tensor, length_k: Tensor, keywords: Keywords) -> Tensor:
    """exp(score - largest score of the row), float32 (batch, heads, seqlen_q, seqlen_k)."""
    scale = q.shape[-1] ** -0.5 if keywords["softmax_scale"] is None else keywords["softmax_scale"]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float())

    row = torch.arange(q.shape[1], device=q.device)[:, None]
    column = torch.arange(k.shape[1], device=q.device)
    length_q, length_k = length_q[:, None, None, None], length_k[:, None, None, None]
    distance = row + length_k - length_q - column  # how far to the left of its query a key is
    if keywords["alibi_slopes"] is not None:
        scores -= keywords["alibi_slopes"][..., None, None] * distance.abs()

    left, right = keywords["window"]
    visible = (row < length_q) & (column < length_k)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0 or keywords["causal"]:
        visible = visible & (distance >= (0 if keywords["causal"] else -right))
    scores = scores.masked_fill(~visible, float("-inf"))
    # Rows that see nothing have the maximum -inf: any finite number in its place makes their weights 0.
    largest = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights: Tensor = (scores - largest).exp()
    return weights


def _padded(x: Tensor, cu_seqlens: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Packed (total, heads, head_dim) to (batch, seqlen, heads, head_dim), zeros at the ends; and the lengths."""
    lengths = cu_seqlens.diff()
    position = torch.arange(seqlen, device=x.device)
    inside = position < lengths[:, None]
    padded = x.new_zeros(*inside.shape, *x.shape[1:])
    padded[inside] = x[(cu_seqlens[:-1, None] + position)[inside]]
    return padded, lengths
