"""The factors of FlashAttention-3's float8 tensors, as the scales of :func:`tessera.scaled_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.compat._refusals import refuse_float8

E4M3 = torch.float8_e4m3fn

# Of q, k and v, each float32 (batch, num_heads_k).
Factors = tuple[Tensor, Tensor, Tensor]


def factors_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    batch: int,
) -> Factors | None:
    """The factors of float8 tensors, of any strides; None: the tensors are not float8.

    Where upstream takes a factor that is missing for 1, and ignores one of tensors that are not float8, both are a
    ValueError.
    """
    given = (("q", q_descale), ("k", k_descale), ("v", v_descale))
    if q.dtype is not E4M3:
        if q_descale is k_descale is v_descale is None:
            return None
        name = next(name for name, factor in given if factor is not None)
        raise ValueError(
            f"{name}_descale is given, but q.dtype = {q.dtype}: only {E4M3} tensors have factors; leave it out"
        )
    refuse_float8(**{name: x for name, x in (("k", k), ("v", v)) if x.dtype is not E4M3})
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not E4M3:
            raise ValueError(f"{name}.dtype = {x.dtype}, but q.dtype = {E4M3}: they must be the same")
    shape = (batch, k.shape[-2] if k.dim() > 2 else 0)
    of_q, of_k, of_v = (_checked(name, factor, shape) for name, factor in given)
    return of_q, of_k, of_v


def _checked(name: str, factor: Tensor | None, shape: tuple[int, int]) -> Tensor:
    expected = f"float32 (batch, num_heads_k) = {shape}"
    if factor is None:
        raise ValueError(
            f"{name}_descale is None: must be {expected}, since values of {E4M3} are elements times a factor; a "
            "missing one is not taken for 1, so where it is 1 pass ones"
        )
    if not isinstance(factor, Tensor):
        raise TypeError(f"{name}_descale is of type {type(factor).__name__!r}: must be a tensor, {expected}")
    if factor.shape != shape or factor.dtype is not torch.float32:
        raise ValueError(
            f"{name}_descale is {factor.dtype} of shape {tuple(factor.shape)}: must be {expected}"
            + (", of key/value heads, too" if name == "q" else "")
        )
    return factor


# What a cache of float8 is multiplied by: k, with the factor of q where q is float8, and v.
CacheFactors = tuple[Tensor, Tensor]


def factors_of_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    batch: int,
) -> CacheFactors | None:
    """The factors of a cache; None: it is not float8. Beside one, queries are float8, too, or of more bits, which have
    no factor: upstream takes only the first. Errors as of :func:`factors_of`.
    """
    given = (("q", q_descale), ("k", k_descale), ("v", v_descale))
    if k_cache.dtype is not E4M3:
        for name, factor in given:
            if factor is not None:
                raise ValueError(
                    f"{name}_descale is given, but k_cache.dtype = {k_cache.dtype}: only caches of {E4M3} have factors"
                )
        refuse_float8(q=q)
        return None
    refuse_float8(**({} if q.dtype is E4M3 else {"q": q}))
    if v_cache.dtype is not E4M3:
        raise ValueError(f"v_cache.dtype = {v_cache.dtype}, but k_cache.dtype = {E4M3}: they must be the same")
    shape = (batch, k_cache.shape[-2] if k_cache.dim() > 2 else 0)
    of_k, of_v = _checked("k", k_descale, shape), _checked("v", v_descale, shape)
    if q.dtype is E4M3:
        return _checked("q", q_descale, shape) * of_k, of_v
    if q_descale is not None:
        raise ValueError(f"q_descale is given, but q.dtype = {q.dtype}: only {E4M3} tensors have factors; leave it out")
    return of_k, of_v


def of_pieces(factors: Factors | None, batch: int, lengths: dict[str, Any]) -> Factors | None:
    """The factors of so many sequences as of their pieces.

    lengths: as :func:`packed_keywords` makes them, which cuts each sequence into as many pieces; empty: dense.
    """
    if factors is None or not lengths or batch == 0:
        return factors
    pieces = (lengths["cu_seqlens_q"].shape[0] - 1) // batch
    q, k, v = factors if pieces == 1 else (x.repeat_interleave(pieces, 0) for x in factors)
    return q, k, v
