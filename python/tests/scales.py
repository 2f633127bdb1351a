"""Random tensors of 8 bits with scales of every kind (S14), and in double the values that they stand for."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
KINDS = (E4M3, torch.int8)
OF_Q, OF_K, OF_V = ("tensor", "head", "token"), ("tensor", "head", "block"), ("tensor", "head", "block", "channel")


def elements(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype is torch.int8:
        return (40 * torch.randn(shape)).round().clamp(-128, 127).to(dtype)
    return torch.randn(shape).to(dtype)


def factors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scales that make values of some size 1 of such elements, from a half to twice as large."""
    return 2 ** (2 * torch.rand(shape) - 1) / (40 if dtype is torch.int8 else 1)


@dataclass
class Scaled:
    """Dense tensors, or packed ones with `starts` of queries and of keys, and how each is scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    by: tuple[str, str, str]
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor | None
    k_block: int
    v_block: int
    starts: tuple[list[int], list[int]] | None = None

    def arguments(self) -> dict[str, Any]:
        """Of `tessera.scaled_attention`."""
        more: dict[str, Any] = {}
        if self.starts is not None:
            at_q, at_k = (torch.tensor(x, dtype=torch.int32) for x in self.starts)
            more = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
        names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "k_block", "v_block")
        return {name: getattr(self, name) for name in names} | more

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in double."""
        if self.starts is None:
            return self._dense(self.q, self.k, self.v, self.q_scale, self.k_scale, self.v_scale)
        parts = []
        for b in range(len(self.starts[0]) - 1):
            rows, keys = (slice(x[b], x[b + 1]) for x in self.starts)
            parts.append(
                self._dense(
                    self.q[None, rows], self.k[None, keys], self.v[None, keys],
                    self.q_scale[None, :, rows] if self.by[0] == "token" else self._of(b, self.q_scale),
                    self._blocks(b, self.k_scale, self.k_block), self._blocks(b, self.v_scale, self.v_block),
                )
            )  # fmt: skip
        q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
        return q, k, v

    def _of(self, b: int, scale: Any) -> Any:
        return scale if scale is None or scale.dim() < 2 else scale[b : b + 1]

    def _blocks(self, b: int, scale: Any, block: int) -> Any:
        """The scales of a packed sequence, which begin at a number of its own."""
        if block == 0:
            return self._of(b, scale)
        assert self.starts is not None
        return scale[None, :, self.starts[1][b] // block + b :]

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        of_q, of_k, of_v = self.by
        q_scale, k_scale = q_scale.double(), k_scale.double()
        if of_q == "head":
            q_scale = q_scale.repeat_interleave(group, 1)[:, None, :, None]
        elif of_q == "token":
            q_scale = q_scale.transpose(1, 2)[..., None]

        def along_keys(scale: Tensor, by: str, block: int) -> Tensor:
            if by == "head":
                return scale[:, None, :, None]
            if by == "block":
                return scale.repeat_interleave(block, 2)[:, :, : k.shape[1]].transpose(1, 2)[..., None]
            return scale[:, None] if by == "channel" else scale

        k_scale = along_keys(k_scale, of_k, self.k_block)
        wide = v.double() if v_scale is None else v.double() * along_keys(v_scale.double(), of_v, self.v_block)
        return q.double() * q_scale, k.double() * k_scale, wide


def scaled(
    dtype: torch.dtype = E4M3,
    by: tuple[str, str, str] = ("token", "block", "channel"),
    batch: int = 2,
    rows: int = 19,
    keys: int = 45,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (24, 40),
    starts: tuple[list[int], list[int]] | None = None,
) -> Scaled:
    """by: of q, k and v; that of v may be the name of a type of 16 bits."""
    (of_q, of_k, of_v), (h, hk), (d, dv) = by, heads, dims
    block_k, block_v = (random.randint(1, 50) if x == "block" else 0 for x in (of_k, of_v))
    wide = getattr(torch, of_v, None) if of_v not in OF_V else None
    if starts is None:
        rows_of_q, rows_of_k, tokens = (batch, rows), (batch, keys), (batch, h, rows)
    else:
        batch, rows_of_q, rows_of_k = len(starts[0]) - 1, (starts[0][-1],), (starts[1][-1],)
        tokens = (h, starts[0][-1])

    def scale(kind: str, block: int) -> Tensor:
        blocks: tuple[int, ...] = ()
        if block > 0:
            blocks = (batch, hk, -(-keys // block)) if starts is None else (hk, starts[1][-1] // block + batch)
        shapes = {
            "tensor": random.choice([(), (1,)]), "head": (batch, hk), "token": tokens, "block": blocks,
            "channel": (batch, hk, dv),
        }  # fmt: skip
        return factors(shapes[kind], dtype)

    return Scaled(
        elements((*rows_of_q, h, d), dtype), elements((*rows_of_k, hk, d), dtype),
        elements((*rows_of_k, hk, dv), dtype) if wide is None else torch.randn(*rows_of_k, hk, dv).to(wide),
        by, scale(of_q, 0), scale(of_k, block_k), None if wide else scale(of_v, block_v), block_k, block_v, starts,
    )  # fmt: skip
