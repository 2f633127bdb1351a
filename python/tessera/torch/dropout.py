"""The dropout mask as a tensor, for tests and for callers who ask for the matrix of weights (rule S8)."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key0: int, key1: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011) on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # Products wrap modulo 2^64, so both halves are right whatever the sign.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ key0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ key1,
            product0 & _WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _threshold(dropout_p: float) -> int:
    """A weight is kept if its 16 bits are at least this."""
    return min(max(int(dropout_p * 65536 + 0.5), 1), 65535)


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

    Weights that are kept are divided by the probability to keep, which is dropout_p rounded to a multiple of 2^-16.

    Args:
        rng_state: int64 (2,), seed and offset, as `forward` returned it.
    """
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    if dropout_p == 0.0:
        return torch.ones(shape, dtype=torch.bool, device=device)
    seed, offset = rng_state.tolist()
    zero = torch.zeros((), dtype=torch.int64)
    low, high = torch.tensor(offset & _WORD), torch.tensor((offset >> 32) & _WORD)
    mixed = _philox((low, high, zero, zero), seed & _WORD, (seed >> 32) & _WORD)

    def along(axis: int, size: int) -> Tensor:
        return torch.arange(size, device=device).view([-1 if i == axis else 1 for i in range(4)])

    # One call serves eight keys: key j takes half j & 1 of word (j >> 1) & 3 of the call of octet j >> 3.
    counter = (along(3, -(-seqlen_k // 8)), along(2, seqlen_q), along(1, num_heads), along(0, batch))
    words = torch.broadcast_tensors(*_philox(counter, int(mixed[0]), int(mixed[1])))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(-2)[..., :seqlen_k] >= _threshold(dropout_p)
