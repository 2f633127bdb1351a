"""Between padded batches and packed tokens: upstream's ``flash_attn.bert_padding`` in plain PyTorch.

Everything is differentiable. The functions that look for tokens in a mask return their number in the shape of a tensor
and the longest sequence as an int, so they wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n) of `input` (rows, ...): (n, ...). Mirrors ``bert_padding.index_first_axis``."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` (n, ...) at the distinct rows `indices` (n).

    Mirrors ``bert_padding.index_put_first_axis``.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`index_first_axis`, and `input` itself for a residual connection.

    Mirrors ``bert_padding.index_first_axis_residual``.
    """
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a mask selects. Mirrors ``bert_padding.unpad_input``.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer; nonzero: the token is there.
        unused_mask: like `attention_mask`; nonzero: the token is not there, but gets a place in the packed tensor.

    Returns:
        The tokens (total, ...) that one of the masks selects; their indices (total), int64, among the batch * seqlen
        of the input; cu_seqlens (batch + 1), int32; the length of the longest sequence; and the number of tokens
        (batch), int32, that `attention_mask` alone selects in each sequence.
    """
    allocated = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = allocated.flatten().nonzero().flatten()
    lengths = allocated.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows that each hold several sequences, one after the other, and then padding.

    Mirrors ``bert_padding.unpad_input_for_concatenated_sequences``.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), integer: the lengths of the sequences in each row, then zeros. A row
            ``[2, 3, 0, 0, 0, 0]`` holds a sequence of two tokens, one of three, and one token of padding.

    Returns:
        The tokens (total, ...); their indices (total), int64, among the batch * seqlen of the input; cu_seqlens
        (sequences + 1), int32; and the length of the longest sequence.
    """
    seqlen = attention_mask_in_length.shape[-1]
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    indices = (torch.arange(seqlen, device=filled.device) < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: tokens (total, ...) to (batch, seqlen, ...), zeros elsewhere.

    Mirrors ``bert_padding.pad_input``.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
