"""The dropout mask as a tensor, for tests and for callers who ask for the matrix of weights (rule S8)."""

import torch
from torch import Tensor

from .. import _native
from .ops import seed_and_offset


def dropout_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which attention weights a run with this state keeps: bool (batch, num_heads, seqlen_q, seqlen_k), O(N^2).

    Made on the CPU, a byte a weight, and copied to `device`. Weights that are kept are divided by the probability to
    keep, which is 1 - dropout_p with dropout_p rounded to a multiple of 2^-16.

    Args:
        rng_state: int64 (2,), seed and offset, as `forward` returned it. Not read if dropout_p is 0.
        dropout_p: 0, or in [2^-16, 1 - 2^-16].
        num_heads: of the queries.
        seqlen_q, seqlen_k: packed: max_seqlen_q and max_seqlen_k; each sequence counts from 0.

    Raises:
        ValueError: dropout_p or a size is out of range, or rng_state is no state.
        NotImplementedError: torch.jit.trace is running, which would not see how the mask is made.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError("dropout_mask under torch.jit.trace: the mask is made outside of torch's operators")
    seed, offset = (0, 0) if dropout_p == 0.0 else seed_and_offset(rng_state)
    keep = torch.empty((batch, num_heads, seqlen_q, seqlen_k), dtype=torch.uint8, device="cpu")
    _native.dropout_mask(keep, dropout_p, seed, offset)
    return keep.view(torch.bool).to(device)
