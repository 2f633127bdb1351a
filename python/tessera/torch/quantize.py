"""Quantising torch tensors, and back; outside autograd.

As in `ops`, the custom op `tessera::quantize` is called where somebody watches (torch.compile, torch.export, dispatch
modes), otherwise the library itself.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _native, eight_bits
from ..arguments import Quantization
from ..quantized import Quantized
from . import ops
from .scaled import readable
from .tensors import refuse_gradients

# q, k, v, q_scale, k_scale, v_scale, k_mean, v_shift, signs, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin,
# rotary_seqlens. Scales that are None are made.
Inputs = tuple[Tensor | None, ...]
# q, k, v, their scales, score_shift; None for what there is not, or was given.
Results = tuple[Tensor | None, ...]

_library = torch.library.Library("tessera", "FRAGMENT")
_library.define(
    "quantize(Tensor? q, Tensor? k, Tensor? v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? k_mean, "
    "Tensor? v_shift, Tensor? signs, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt k_block, "
    "SymInt v_block, SymInt hadamard, bool v_tiles, bool rotary_interleaved, bool rotary_constant_q, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)

TYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


def _type_name(dtype: Any) -> str:
    name = "float8_e4m3fn" if dtype is None else dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in TYPES:
        raise ValueError(f"dtype = {dtype}: must be torch.float8_e4m3fn or torch.int8")
    return name


def results(inputs: Inputs, k_block: int, v_block: int, v_tiles: bool, dtype: torch.dtype) -> Results:
    """Uninitialised."""
    q, k, v, q_scale, k_scale, v_scale, k_mean, _, _, _, cu_seqlens_k, *_ = inputs
    batch = 0 if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1

    def like(x: Tensor | None, shape: Any = None) -> Tensor | None:
        return None if x is None else x.new_empty(x.shape if shape is None else shape, dtype=dtype)

    def scales(x: Tensor | None, given: Tensor | None, block: int = 0) -> Tensor | None:
        if x is None or given is not None:
            return None
        shape = eight_bits.block_shape(x.shape, block, batch) if block else eight_bits.token_shape(x.shape)
        return x.new_empty(shape, dtype=torch.float32)

    values = like(v, eight_bits.tile_shape(v.shape, batch) if v is not None and v_tiles else None)
    return (
        like(q), like(k), values, scales(q, q_scale), scales(k, k_scale, k_block), scales(v, v_scale, v_block),
        None if k_mean is None else scales(q, None),
    )  # fmt: skip


def make(inputs: Inputs, *numbers: Any) -> Results:
    """Runs the library. numbers: from max_seqlen_q to dtype, as the op takes them."""
    max_seqlen_q, max_seqlen_k, k_block, v_block, hadamard, v_tiles, interleaved, constant_q, dtype = numbers
    made = results(inputs, k_block, v_block, v_tiles, dtype)
    *out, score_shift = made
    given = inputs[3:6]
    scales = [mine if theirs is None else theirs for mine, theirs in zip(out[3:], given, strict=True)]
    _native.quantize(
        *map(readable, (*inputs[:3], *out[:3], *scales, inputs[6], score_shift, *inputs[7:])),
        *(x is not None for x in given), max_seqlen_q, max_seqlen_k, k_block, v_block, hadamard, v_tiles, interleaved,
        constant_q, ops.FRAMEWORK,
    )  # fmt: skip
    return made


def _whole(inputs: Inputs, made: Results) -> tuple[Tensor, ...]:
    """Ops return tensors only: of no elements for None."""
    first = next(x for x in inputs if x is not None)
    return tuple(first.new_empty(0, dtype=torch.float32) if x is None else x for x in made)


@torch.library.impl(_library, "quantize", "CompositeExplicitAutograd")
def _quantize_op(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, numbers = arguments[:14], arguments[14:]
    return _whole(inputs, make(inputs, *numbers))


@torch.library.register_fake("tessera::quantize", lib=_library)
def _quantize_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, (_, _, k_block, v_block, _, v_tiles, _, _, dtype) = arguments[:14], arguments[14:]
    return _whole(inputs, results(inputs, k_block, v_block, v_tiles, dtype))


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """To which packed sequence each row belongs."""
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_(max=max(cu_seqlens.shape[0] - 2, 0))


def _reduced(x: Tensor, by: str, heads_k: int, limit: float, off: Any, cu_seqlens: Tensor | None) -> Tensor:
    """Scales that take the largest number to `limit`. off: (batch, heads, columns), subtracted before."""
    if cu_seqlens is not None:
        of_row = sequence_of_rows(cu_seqlens, x.shape[0])
        values = x if off is None else x.float() - off[of_row]
        found = values.abs().unflatten(1, (heads_k, -1)).amax(2 if by == "channel" else (2, 3)).float()
        shape = (cu_seqlens.shape[0] - 1, *found.shape[1:])
        to = of_row.view(-1, *[1] * (found.dim() - 1)).expand_as(found)
        found = found.new_zeros(shape).scatter_reduce_(0, to, found, "amax")
    elif x.shape[1] == 0:
        found = x.new_zeros((x.shape[0], heads_k, *x.shape[3:][: by == "channel"]), dtype=torch.float32)
    else:
        values = x if off is None else x.float() - off[:, None]
        by_head = values.abs().unflatten(2, (heads_k, -1))
        found = by_head.amax((1, 3) if by == "channel" else (1, 3, 4)).float()
    if by == "tensor":
        found = found.amax().reshape(1) if found.numel() else found.new_zeros(1)
    return torch.where(found == 0, 1.0, found.clamp(min=eight_bits.LEAST) / limit)


def _scale(
    name: str, x: Tensor | None, given: Quantization, heads_k: int, limit: float, off: Any, at: Any
) -> tuple[Any, int]:
    """Scales that are given or computed here, None where the library makes them; and how many keys share one."""
    if x is None:
        return None, 0
    scale = getattr(given, name)
    way = eight_bits.way_of(name, scale)
    if way is None:
        ops.require_tensors(**{name: scale})
        return scale, 0
    if way == "token":
        return None, 0
    if way == "block":
        return None, given.k_block if name == "k_scale" else given.v_block
    if name != "v_scale":
        eight_bits.require_reducible(name, way, given)
    return _reduced(x.detach(), way, heads_k, limit, off, at), 0


def _check_rows(**given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None and x.dim() not in (3, 4):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: must be (batch, seqlen, heads, head_dim); with cu_seqlens_q "
                "(total, heads, head_dim)"
            )


def quantize(q: Tensor | None, k: Tensor | None, v: Tensor | None, given: Quantization) -> Quantized:
    """`tessera.quantize` for torch tensors."""
    g = given
    ops.require_tensors(
        q=q, k=k, v=v, k_mean=g.k_mean, v_shift=g.v_shift, signs=g.signs, rotary_cos=g.rotary_cos,
        rotary_sin=g.rotary_sin, rotary_seqlens=g.rotary_seqlens, cu_seqlens_q=g.cu_seqlens_q,
        cu_seqlens_k=g.cu_seqlens_k,
    )  # fmt: skip
    type_name = _type_name(g.dtype)
    eight_bits.require_sizes(g, type_name)
    _check_rows(q=q, k=k, v=v)
    refuse_gradients(
        "quantize", ", or tessera.attention with a precision", q=q, k=k, v=v, k_mean=g.k_mean, v_shift=g.v_shift
    )
    bounds = eight_bits.boundaries_of(g, q is not None, k is not None or v is not None)
    kept = None
    if g.v_scale is None and v is not None:
        kept, v = v, None
        if kept.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"v_scale is None, but v.dtype = {kept.dtype}: what stays as it is has 16 bits")
    first = next((x for x in (q, k, v) if x is not None), None)
    if first is None:
        raise ValueError("v_scale is None, but q and k are, too: then nothing is quantised")
    ops.require_strided(first)
    rows_k = k if k is not None else v if v is not None else first
    heads_k, limit = rows_k.shape[-2], eight_bits.LIMITS[type_name]
    q_scale, _ = _scale("q_scale", q, g, heads_k, limit, None, bounds.cu_seqlens_q)
    k_scale, k_block = _scale("k_scale", k, g, heads_k, limit, g.k_mean, bounds.cu_seqlens_k)
    v_scale, v_block = _scale("v_scale", v, g, heads_k, limit, g.v_shift, bounds.cu_seqlens_k)
    longest_q, longest_k = (
        0 if x is None else ops.longest_of(name, x, n)
        for name, x, n in (("q", bounds.cu_seqlens_q, bounds.max_seqlen_q), ("k", bounds.cu_seqlens_k,
                                                                              bounds.max_seqlen_k))
    )  # fmt: skip
    inputs = (
        q, k, v, q_scale, k_scale, v_scale, g.k_mean, g.v_shift, g.signs, bounds.cu_seqlens_q, bounds.cu_seqlens_k,
        g.rotary_cos, g.rotary_sin, g.rotary_seqlens,
    )  # fmt: skip
    numbers = (
        longest_q, longest_k, g.k_block, g.v_block, g.hadamard, g.v_tiles, g.rotary_interleaved, g.rotary_constant_q,
        TYPES[type_name],
    )  # fmt: skip
    made: Results
    if ops.is_watched(first) or ops.is_transformed():
        whole = torch.ops.tessera.quantize(*inputs, *numbers)
        there = (q, k, v, *(x if s is None else None for x, s in zip((q, k, v), inputs[3:6], strict=True)),
                 None if g.k_mean is None else q)  # fmt: skip
        made = tuple(x if y is not None else None for x, y in zip(whole, there, strict=True))
    else:
        made = make(inputs, *numbers)
    q8, k8, v8, *scales, score_shift = made
    q_scale, k_scale, v_scale = (y if x is None else x for x, y in zip(inputs[3:6], scales, strict=True))
    return Quantized(
        q8, k8, kept if v is None else v8, q_scale, k_scale, v_scale, score_shift, None if v is None else g.v_shift,
        k_block, v_block, v.shape[-1] if v is not None and g.v_tiles else None, *bounds,
    )  # fmt: skip


# ---- back


def values_in_rows(tiles: Tensor, head_dim_v: int, rows: int, cu_seqlens: Tensor | None) -> Tensor:
    """(batch, rows, heads, columns), packed (rows, heads, columns): v that lies in tiles (src/core/value_tiles.h).

    In a panel's row of 32 keys the halves of 16 change places in every other group of four columns, and of 16 keys
    number b3 b2 b1 b0 stands at b2 b1 b3 b0.
    """
    x = tiles.view(torch.uint8)
    if cu_seqlens is not None:
        x = x[None]
    batch, heads, count, panels, columns, _ = x.shape
    x = x.view(batch, heads, count, panels, columns // 8, 2, 4, 2, 16)
    even, odd = x.unbind(5)
    x = torch.stack((even, odd.flip(6)), 5).view(batch, heads, count, panels, columns, 2, 2, 2, 2, 2)
    x = x[:, :, :, :, :head_dim_v].permute(0, 2, 3, 5, 8, 6, 7, 9, 1, 4)
    x = x.reshape(batch, 128 * count, heads, head_dim_v).view(tiles.dtype)
    if cu_seqlens is None:
        return x[:, :rows]
    of_row = sequence_of_rows(cu_seqlens, rows)
    first = cu_seqlens[of_row]
    at = torch.arange(rows, device=x.device) - first + 128 * (first // 128 + of_row)
    return x[0].view(torch.uint8)[at].view(tiles.dtype)


def of_tokens(scale: Tensor, packed: bool) -> Tensor:
    """Scales by token, as they are multiplied with q."""
    return (scale[0] if packed else scale).transpose(-1, -2)[..., None]


def of_blocks(scale: Tensor, block: int, rows: int, cu_seqlens: Tensor | None) -> Tensor:
    """Scales by block, as they are multiplied with k or v."""
    at = torch.arange(rows, device=scale.device)
    if cu_seqlens is None:
        return scale[..., at // block].transpose(-1, -2)[..., None]
    of_row = sequence_of_rows(cu_seqlens, rows)
    first = cu_seqlens[of_row]
    return scale[..., first // block + of_row + (at - first) // block].transpose(-1, -2)[..., None]
