"""Rotary position embeddings: upstream's ``flash_attn.layers.rotary`` in plain PyTorch, differentiable in `x`.

Functions that work in place return the tensor that they were given. As upstream, what they return carries the gradient
and what was passed does not: go on with the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.compat.flash_attn.ops.triton.rotary import apply_rotary


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Every pair (a, b) of columns becomes (-b, a). Mirrors ``layers.rotary.rotate_half``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The textbook formula, in the type of its arguments. Mirrors ``layers.rotary.apply_rotary_emb_torch``.

    Args:
        x: (batch, seqlen, heads, head_dim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
        interleaved: as in :func:`apply_rotary_emb`.

    Returns:
        Like `x`.
    """
    rotary_dim = 2 * cos.shape[-1]
    repeat = (lambda t: t.repeat_interleave(2, dim=-1)) if interleaved else (lambda t: torch.cat((t, t), dim=-1))
    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    rotated = rotary * repeat(cos).unsqueeze(-2) + rotate_half(rotary, interleaved) * repeat(sin).unsqueeze(-2)
    return torch.cat((rotated, rest), dim=-1)


class ApplyRotaryEmb(torch.autograd.Function):
    """:func:`apply_rotary_emb`; its gradient is the rotation backwards. Mirrors ``layers.rotary.ApplyRotaryEmb``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        offsets = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
        ctx.save_for_backward(cos, sin, cu_seqlens, offsets)
        ctx.offset = 0 if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        ctx.interleaved = interleaved
        return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin, cu_seqlens, offsets = ctx.saved_tensors
        offsets = ctx.offset if offsets is None else offsets
        dx = apply_rotary(grads[0], cos, sin, offsets, cu_seqlens, None, ctx.interleaved, conjugate=True)
        return dx, None, None, None, None, None, None, None


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim columns of `x`. Mirrors ``layers.rotary.apply_rotary_emb``.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) if `cu_seqlens` is given.
        cos, sin: (positions, rotary_dim / 2); no gradient.
        interleaved: pairs are neighbouring columns (GPT-J); otherwise columns i and i + rotary_dim / 2 (GPT-NeoX).
        inplace: overwrites `x`.
        seqlen_offsets: the position of each sequence's first token: an int, or integers (batch).
        cu_seqlens: int32 (batch + 1).
        max_seqlen: accepted and not needed.

    Returns:
        Like `x`.

    Raises:
        ValueError: shapes that do not fit; see :func:`tessera.compat.flash_attn.ops.triton.rotary.apply_rotary`.
    """
    rotated: Tensor = ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)
    return rotated


apply_rotary_emb_func = apply_rotary_emb


class _RotateParts(torch.autograd.Function):
    """Rotates some heads of a tensor that also holds others, in place; the gradient is rotated back in one buffer."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, parts: Any, interleaved: bool, offsets: int | Tensor, *tables: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tables, *([offsets] if isinstance(offsets, Tensor) else []))
        ctx.parts, ctx.interleaved = parts, interleaved
        ctx.offset = None if isinstance(offsets, Tensor) else offsets
        _rotate_parts(packed, parts, tables, interleaved, offsets, conjugate=False)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tables, offsets = ctx.saved_tensors, ctx.offset
        if offsets is None:
            *tables, offsets = tables
        dpacked = grads[0].clone()
        _rotate_parts(dpacked, ctx.parts, tables, ctx.interleaved, offsets, conjugate=True)
        return dpacked, *(None for _ in range(3 + len(tables)))


def _rotate_parts(
    packed: Tensor, parts: Any, tables: Any, interleaved: bool, offsets: int | Tensor, conjugate: bool
) -> None:
    for part, cos, sin in zip(parts, tables[0::2], tables[1::2], strict=True):
        apply_rotary(packed[part], cos, sin, offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates the queries and keys of a packed tensor in place. Mirrors ``layers.rotary.apply_rotary_emb_qkv_``.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim).
        cos, sin: (positions, rotary_dim / 2).
        cos_k, sin_k: others for the keys.
        interleaved, seqlen_offsets: as in :func:`apply_rotary_emb`.
        num_heads_q: required by the second form of `qkv`.

    Returns:
        `qkv`.

    Raises:
        ValueError: shapes that do not fit, or `num_heads_q` missing.
    """
    if qkv.dim() == 5:
        parts: tuple[Any, ...] = ((..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None)))
    elif num_heads_q is None:
        raise ValueError("num_heads_q is None: a qkv of 4 dimensions needs it")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_k < 0 or num_heads_q + 2 * num_heads_k != qkv.shape[2]:
            raise ValueError(f"num_heads_q is {num_heads_q}: of {qkv.shape[2]} heads, the rest must be even in number")
        end = num_heads_q + num_heads_k
        parts = ((..., slice(num_heads_q), slice(None)), (..., slice(num_heads_q, end), slice(None)))
    tables = cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    rotated: Tensor = _RotateParts.apply(qkv, parts, interleaved, seqlen_offsets, *tables)
    return rotated


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates the keys of `kv` (batch, seqlen, 2, heads, head_dim) in place, and returns `kv`.

    Mirrors ``layers.rotary.apply_rotary_emb_kv_``; arguments and errors as in :func:`apply_rotary_emb`.
    """
    keys = ((..., 0, slice(None), slice(None)),)
    rotated: Tensor = _RotateParts.apply(kv, keys, interleaved, seqlen_offsets, cos, sin)
    return rotated


class RotaryEmbedding(torch.nn.Module):
    """Rotary embeddings with a table of angles that grows as needed. Mirrors ``layers.rotary.RotaryEmbedding``.

    Args:
        dim: rotary_dim, even.
        base: the wavelengths go from 2 pi to 2 pi * base.
        interleaved: as in :func:`apply_rotary_emb`.
        scale_base: XPos (https://arxiv.org/abs/2212.10554): queries grow and keys shrink with their position, relative
            to the middle of the table, by a factor that changes over `scale_base` tokens. None: no scaling.
        device: of the frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.inv_freq: Tensor
        self.scale: Tensor | None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scales(device), persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as in :func:`apply_rotary_emb_qkv_`; the queries alone, (batch, seqlen, heads, head_dim), if `kv` is
                given.
            kv: (batch, seqlen, 2, heads, head_dim).
            seqlen_offset: as in :func:`apply_rotary_emb`.
            max_seqlen: the number of positions that the table must have at least. Needed if `seqlen_offset` is a
                tensor, which is not read here.
            num_heads_q: as in :func:`apply_rotary_emb_qkv_`.

        Returns:
            `qkv`, or `qkv` and `kv`.
        """
        if max_seqlen is not None:
            self._extend_tables(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._extend_tables(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        if not self._tables:
            raise ValueError("max_seqlen is None: a tensor as seqlen_offset needs it")
        cos, sin, cos_k, sin_k = self._tables
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / self.base**exponents

    def _scales(self, device: torch.device | str | None) -> Tensor:
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)

    def _extend_tables(self, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        """cos and sin for queries and for keys, in float32 until they are stored: bf16 cannot count to 257."""
        if self._tables:
            cos = self._tables[0]
            # Tables made in inference mode cannot be saved for a backward pass.
            usable = not (self.training and cos.is_inference())
            if usable and cos.shape[0] >= positions and cos.device == device and cos.dtype == dtype:
                return
        # Buffers that a module-wide .half() has rounded are computed anew.
        rounded = self.inv_freq.dtype != torch.float32
        frequencies = self._frequencies(device) if rounded else self.inv_freq.to(device)
        position = torch.arange(positions, device=device, dtype=torch.float32)
        angles = torch.outer(position, frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            cos, sin = cos.to(dtype), sin.to(dtype)
            self._tables = cos, sin, cos, sin
            return
        power = (position - positions // 2) / self.scale_base
        growth = self._scales(device) ** power[:, None]
        self._tables = tuple(t.to(dtype) for t in (cos * growth, sin * growth, cos / growth, sin / growth))
