"""torch.vmap over attention: the mapped dimension becomes a part of the batch."""

from typing import Any

from torch import Tensor


def _to_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(size, ...): the mapped dimension first, or what all indices share."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


class Fold:
    """One call in place of `size` mapped ones, of dense tensors.

    inputs: q, k, v, bias, alibi_slopes, sink and two None, with a batch of size * batch.
    rng_state: the state of the dropout.
    """

    def __init__(
        self,
        info: Any,
        dims: tuple[int | None, ...],
        inputs: tuple[Tensor | None, ...],
        rng_dim: int | None,
        rng_state: Tensor | None,
        needs_dbias: bool = False,
        needs_dsink: bool = False,
    ) -> None:
        q, k, v, bias, alibi_slopes, sink, *cu_seqlens = inputs
        if any(x is not None for x in cu_seqlens):
            raise NotImplementedError(
                "cu_seqlens_q is given under torch.vmap: pack the sequences of all mapped indices into one call instead"
            )
        if sink is not None and (dims[5] is not None or needs_dsink):
            raise NotImplementedError(
                "sink under torch.vmap must not be mapped and gets no gradient: one call has one sink for each head"
            )
        if rng_state is not None and info.randomness != "different":
            raise NotImplementedError(
                f"dropout_p > 0 under torch.vmap with randomness={info.randomness!r}: must be 'different', since the "
                "mask of each mapped index is drawn by its place in the batch"
            )
        assert q is not None
        shape = q.shape if dims[0] is None else q.movedim(dims[0], 0).shape[1:]
        if len(shape) != 4:
            raise ValueError(
                f"q has shape {tuple(shape)} under torch.vmap: must be (batch, seqlen, heads, head_dim) at each index"
            )
        self.size: int = info.batch_size
        self.batch = shape[0]
        self._needs_dbias = needs_dbias
        self.inputs = (
            *(self.rows(x, dim) for x, dim in zip((q, k, v), dims, strict=False)),
            self._fold_bias(bias, dims[3], needs_dbias),
            self._fold_slopes(alibi_slopes, dims[4]),
            sink,
            None,
            None,
        )
        self.rng_state = rng_state if rng_state is None or rng_dim is None else rng_state.movedim(rng_dim, 0)[0]

    def rows(self, x: Tensor | None, dim: int | None) -> Tensor | None:
        """What has a batch of its own: q, k, v, o, lse and their gradients."""
        return None if x is None else _to_front(x, dim, self.size).flatten(0, 1)

    def _fold_bias(self, bias: Tensor | None, dim: int | None, needs_gradient: bool) -> Tensor | None:
        """(size * batch, ...), or as it is where all share it and none asks for its gradient."""
        if bias is None:
            return None
        mapped = dim is not None
        bias = bias if dim is None else bias.movedim(dim, 0)
        self._bias_shape = bias.shape[mapped:]
        each = (1,) * (4 - len(self._bias_shape)) + tuple(self._bias_shape)
        self._bias_batch = each[0]
        bias = bias.reshape(*bias.shape[:mapped], *each)
        if not mapped and each[0] == 1 and not needs_gradient:
            return bias
        return bias.expand(self.size, self.batch, *each[1:]).flatten(0, 1)

    def _fold_slopes(self, slopes: Tensor | None, dim: int | None) -> Tensor | None:
        """(num_heads,) as they are, (size * batch, num_heads) where they differ."""
        if slopes is None or (dim is None and slopes.dim() == 1):
            return slopes
        slopes = _to_front(slopes, dim, self.size)
        if slopes.dim() == 2:  # mapped, (num_heads,) each
            slopes = slopes[:, None].expand(-1, self.batch, -1)
        return slopes.reshape(self.size * self.batch, slopes.shape[-1])

    def _unfold(self, x: Tensor) -> Tensor:
        unfolded: Tensor = x.unflatten(0, (self.size, self.batch))
        return unfolded

    def results(self, o: Tensor, lse: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """o and lse of each index, and where the mapped dimension is."""
        return (self._unfold(o), self._unfold(lse)), (0, 0)

    def gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None, dsink: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Of each index."""
        at = None
        if dbias is not None and self._needs_dbias:
            at, dbias = 0, self._unfold(dbias)
            if self._bias_batch == 1:
                dbias = dbias.sum(1, keepdim=True)
            dbias = dbias.reshape(self.size, *self._bias_shape)
        return (self._unfold(dq), self._unfold(dk), self._unfold(dv), dbias, dsink), (0, 0, 0, at, None)
