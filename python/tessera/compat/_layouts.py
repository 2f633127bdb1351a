"""Dense and packed operands side by side: FlashAttention-3's queries and keys have a layout each, and either may be
used only in part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tessera.compat._attention import Keywords, packed_keywords


class Layouts(NamedTuple):
    """How queries and keys become packed: (batch, seqlen) of what is dense and must be; None: it stays as it is."""

    q: tuple[int, int] | None
    k: tuple[int, int] | None

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.k is not None:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        return self.pack_rows(q), k, v

    def pack_rows(self, x: Tensor) -> Tensor:
        """What has a row for every query: q, o and their gradients."""
        return x if self.q is None else x.flatten(0, 1)

    def pack_keywords(self, keywords: Keywords) -> Keywords:
        """Arguments, of which qv has rows."""
        return keywords if "qv" not in keywords else keywords | {"qv": self.pack_rows(keywords["qv"])}

    def pack_lse(self, lse: Tensor) -> Tensor:
        """(batch, heads, seqlen_q) to (heads, batch * seqlen_q)."""
        return lse if self.q is None else lse.transpose(0, 1).flatten(1)

    def unpack_rows(self, out: Tensor) -> Tensor:
        return out if self.q is None else out.unflatten(0, self.q)

    def unpack_lse(self, lse: Tensor) -> Tensor:
        return lse if self.q is None else lse.unflatten(1, self.q).transpose(0, 1).contiguous()


def keywords_of_layouts(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Keywords, Layouts]:
    """The arguments of packed tensors, and how to pack; none of either where everything is dense and used in full.

    Args:
        q, k: (total, heads, head_dim) with cu_seqlens, (batch, seqlen, heads, head_dim) where they are None.
        max_seqlen_q, max_seqlen_k: as for :func:`packed_keywords`; not looked at for what is dense.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None and seqused_q is None and seqused_k is None:
        return {}, Layouts(None, None)
    dense_q = dense_k = None
    if cu_seqlens_q is None:
        dense_q = _dense("q", q)
        cu_seqlens_q, max_seqlen_q = _starts(q), dense_q[1]
    if cu_seqlens_k is None:
        dense_k = _dense("k", k)
        cu_seqlens_k, max_seqlen_k = _starts(k), dense_k[1]
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        batches = [x.shape[0] - 1 for x in (cu_seqlens_q, cu_seqlens_k)]
        raise ValueError(f"q holds {batches[0]} sequences and k {batches[1]}: must be equally many")
    layouts = Layouts(dense_q, dense_k)
    q, k, _ = layouts.pack(q, k, k)
    return (
        packed_keywords(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k),
        layouts,
    )


def _dense(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 4:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: must be (batch, seqlen, heads, head_dim), since cu_seqlens_{name} is "
            "None"
        )
    return x.shape[0], x.shape[1]


def _starts(x: Tensor) -> Tensor:
    """cu_seqlens of a dense tensor."""
    return x.shape[1] * torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)
