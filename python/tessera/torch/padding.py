"""Padded batches as packed sequences, on the device: nothing is gathered and the host reads nothing.

A (batch, seqlen, heads, head_dim) tensor is also a packed one of batch * seqlen tokens. Its sequences are cut into
pieces: the tokens that count attend to each other, and padding becomes pieces of its own, in which queries see no key
and keys are seen by no query. So padding costs nothing, gets o = 0, and gives no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention


class Pieces(NamedTuple):
    """Where packed pieces begin, and the total at the end: int32 (pieces + 1,) each."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def runs(keep: Tensor) -> tuple[Tensor, Tensor]:
    """(first, end) of the one run of True in each row of a boolean (batch, seqlen); 0, 0 if there is none."""
    if keep.shape[1] == 0:
        empty = torch.zeros(keep.shape[0], dtype=torch.int64, device=keep.device)
        return empty, empty
    first = keep.to(torch.uint8).argmax(1)
    return first, first + keep.sum(1)


def has_runs(keep: Tensor) -> Tensor:
    """Boolean (batch,): whether what is True in a row of (batch, seqlen) is one run at most."""
    begins = keep[:, 1:] & ~keep[:, :-1]
    return keep[:, :1].sum(1) + begins.sum(1) <= 1


def _cuts(columns: list[Tensor | int], seqlen: int, batch: int, device: torch.device) -> Tensor:
    """cu_seqlens whose pieces end at these places of every sequence: each (batch,), or one number for all."""
    # Numbers are filled in, not copied from the host, which a CUDA graph could not capture.
    tensors = [x if isinstance(x, Tensor) else torch.full((batch,), x, device=device) for x in columns]
    ends = torch.stack(tensors, 1) + torch.arange(batch, device=device)[:, None] * seqlen
    return torch.cat([ends.new_zeros(1), ends.flatten()]).to(torch.int32)


def cut_keys(first: Tensor, end: Tensor, seqlen_q: int, seqlen_k: int) -> Pieces:
    """All queries of a sequence see its keys from `first` to `end`, (batch,) each: three pieces a sequence."""
    batch, device = first.shape[0], first.device
    return Pieces(
        _cuts([0, seqlen_q, seqlen_q], seqlen_q, batch, device),
        _cuts([first, end, seqlen_k], seqlen_k, batch, device),
    )


def cut_both(first_q: Tensor, end_q: Tensor, seqlen_q: int, first_k: Tensor, end_k: Tensor, seqlen_k: int) -> Pieces:
    """Queries from `first_q` to `end_q` see keys from `first_k` to `end_k`, (batch,) each; other queries see nothing.

    Five pieces a sequence: queries before, keys before, what counts, queries after, keys after.
    """
    batch, device = first_k.shape[0], first_k.device
    return Pieces(
        _cuts([first_q, first_q, end_q, seqlen_q, seqlen_q], seqlen_q, batch, device),
        _cuts([0, first_k, end_k, end_k, seqlen_k], seqlen_k, batch, device),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, **options: Any) -> Tensor:
    """`tessera.attention` of (batch, seqlen, heads, head_dim) tensors over pieces of their sequences.

    A tensor whose batch and seqlen strides do not merge (say one that is laid out as (batch, heads, seqlen, head_dim))
    is copied once.

    Args:
        options: keyword arguments of `tessera.attention`; causality and windows hold inside each piece.

    Returns: o, (batch, seqlen_q, num_heads, head_dim_v).
    """
    batch, seqlen_q = q.shape[:2]
    o: Tensor = attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        cu_seqlens_q=pieces.cu_seqlens_q, cu_seqlens_k=pieces.cu_seqlens_k,
        max_seqlen_q=seqlen_q, max_seqlen_k=k.shape[1], **options,
    )  # fmt: skip
    return o.view(batch, seqlen_q, *o.shape[1:])
