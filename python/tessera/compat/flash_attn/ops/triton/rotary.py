"""The rotation itself: upstream's ``flash_attn.ops.triton.rotary.apply_rotary``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates pairs of the first rotary_dim columns by the angles of each token's position, in float32.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) if `cu_seqlens` is given.
        cos, sin: (positions, rotary_dim / 2), of any floating type. Tokens at positions without a row stay as they are.
        seqlen_offsets: the position of each sequence's first token: an int, or integers (batch) on the device.
        cu_seqlens: int32 (batch + 1).
        max_seqlen: accepted and not needed.
        interleaved: pairs are neighbouring columns (0, 1), (2, 3), ...; otherwise (i, i + rotary_dim / 2).
        inplace: overwrites `x`.
        conjugate: rotates backwards, which is the gradient.

    Returns:
        Like `x`; `x` itself if `inplace`.

    Raises:
        ValueError: cos and sin differ in shape, have more columns than x has pairs, or too few rows for an int offset.
    """
    pairs = cos.shape[-1]
    if sin.shape != cos.shape:
        raise ValueError(f"sin has the shape {tuple(sin.shape)}: it must be that of cos, {tuple(cos.shape)}")
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"cos has {pairs} columns: at most head_dim / 2 = {x.shape[-1] // 2} are possible")
    cos, sin = _at_positions(x, cos, sin, seqlen_offsets, cu_seqlens)
    if conjugate:
        sin = -sin

    rotated = x if inplace else x.clone()
    if interleaved:
        first, second = rotated[..., 0 : 2 * pairs : 2], rotated[..., 1 : 2 * pairs : 2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs : 2 * pairs]
    a, b = first.float(), second.float()
    turned = a * cos - b * sin, a * sin + b * cos  # both before the first copy: a may be a view of `rotated`
    first.copy_(turned[0])
    second.copy_(turned[1])
    return rotated


def _at_positions(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin for every token, in float32, shaped to be multiplied with half of `x`."""
    if cu_seqlens is None and isinstance(offsets, int):
        end = offsets + x.shape[1]
        if end > cos.shape[0]:
            raise ValueError(f"cos has {cos.shape[0]} rows: seqlen_offsets + seqlen = {end} are needed")
        return cos[offsets:end, None, :].float(), sin[offsets:end, None, :].float()

    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        first = offsets[:, None] if isinstance(offsets, Tensor) else offsets
    else:
        token = torch.arange(x.shape[0], device=x.device)
        sequence = torch.bucketize(token, cu_seqlens[1:-1], right=True)
        positions = token - cu_seqlens[sequence]
        first = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    positions = positions + first
    inside = (positions < cos.shape[0])[..., None, None]
    row = positions.clamp(max=cos.shape[0] - 1)
    return (
        torch.where(inside, cos[row][..., None, :].float(), 1.0),
        torch.where(inside, sin[row][..., None, :].float(), 0.0),
    )
