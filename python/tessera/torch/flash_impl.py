"""Tessera behind PyTorch's own flash attention operators.

    torch.nn.attention.activate_flash_attention_impl("TESSERA")

makes every CUDA call that PyTorch sends to its flash kernels run here: scaled_dot_product_attention where it picks that
backend, torch.nn.attention.varlen, nested tensors, and the prototype of 8 bits in torch.nn.attention.experimental.
PyTorch decides which calls those are (no mask, float16 or bfloat16, ...). Importing this module makes the name known,
where PyTorch has the registry (2.11 and later); it activates nothing.

Each function here has the signature and the results of the operator it replaces.
"""

from typing import Any

import torch
from torch import Tensor

from ..scaled import scaled_attention
from .direct import backward, forward
from .tensors import rows

_NAME = "TESSERA"


def _window(left: int | None, right: int | None, is_causal: bool) -> tuple[int, int]:
    """With `is_causal` the operators take any right end for 0."""
    return (-1 if left is None else left, 0 if is_causal else -1 if right is None else right)


def _rng_results(rng_state: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """rng_state and unused, as the operators return them.

    With dropout the state stays on the CPU, where the next launch reads it without waiting for the device.
    """
    state = rng_state.view(torch.uint64) if rng_state.numel() else torch.zeros(2, dtype=torch.uint64, device=device)
    return state, torch.zeros((), dtype=torch.uint64, device=device)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """aten::_flash_attention_forward: (batch, seqlen, heads, head_dim), or packed if `cum_seq_q` is given.

    Args:
        is_causal: aligned at the bottom right, as in PyTorch's kernel.
        num_splits: a hint, which the planner does not need.
        out: where the output is written, not in the operator's signature.

    Returns: output like query, logsumexp (float32, natural), rng_state, unused, debug_attn_mask (of no elements).

    Raises:
        NotImplementedError: return_debug_mask, seqused_k, block_table, alibi_slopes (whose operator for the gradient
            knows no slopes).
    """
    refused = {
        "return_debug_mask": return_debug_mask or None,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
    }
    for name, argument in refused.items():
        if argument is not None:
            raise NotImplementedError(f"{name} is given: the {_NAME} flash attention implementation takes none")
    query = rows(query)
    out = torch.empty_like(query) if out is None else out
    packed: dict[str, Any] = {}
    if cum_seq_q is not None:
        packed = {
            "cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        }  # fmt: skip
    _, lse, rng_state = forward(
        query, rows(key), rows(value), causal=is_causal, window=_window(window_size_left, window_size_right, is_causal),
        softmax_scale=scale, dropout_p=dropout_p, out=out, **packed,
    )  # fmt: skip
    return out, lse, *_rng_results(rng_state, query.device), query.new_empty(0)


def flash_attention_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: writes `out`, returns logsumexp."""
    return flash_attention_forward(*args, **kwargs, out=out)[1]


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward. Returns gradients with the strides of query, key and value."""
    packed: dict[str, Any] = {}
    if cum_seq_q is not None and cum_seq_q.numel():
        packed = {
            "cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        }  # fmt: skip
    query, key, value = rows(query), rows(key), rows(value)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    return backward(
        grad_out, query, key, value, rows(out), logsumexp, causal=is_causal,
        window=_window(window_size_left, window_size_right, is_causal), softmax_scale=scale, dropout_p=dropout_p,
        rng_state=rng_state.view(torch.int64).cpu() if dropout_p > 0.0 else None,
        deterministic=torch.are_deterministic_algorithms_enabled(), dq=dq, dk=dk, dv=dv, **packed,
    )  # fmt: skip


def sdpa_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention: (batch, heads, seqlen, head_dim).

    Returns: output like query, logsumexp (batch, heads, seqlen_q), cum_seq_q and cum_seq_k (None), max_q, max_k,
        rng_state, unused, debug_attn_mask.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    o, lse, rng_state, unused, debug_mask = flash_attention_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return o.transpose(1, 2), lse, None, None, max_q, max_k, rng_state, unused, debug_mask


def sdpa_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward: (batch, heads, seqlen, head_dim) in and out."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dq, dk, dv = flash_attention_backward(
        do, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
        scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def sdpa_flash_attention_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention.quantized: (batch, heads, seqlen, head_dim) of float8_e4m3fn, outside
    autograd. Results of bfloat16, as sdpa_flash_attention's.

    Args:
        q_descale, k_descale, v_descale: float32 (batch, heads of key), what elements are multiplied by; None: 1.

    Raises: NotImplementedError: dropout_p, return_debug_mask, or another type.
    """
    if query.dtype is not torch.float8_e4m3fn:
        raise NotImplementedError(
            f"query.dtype = {query.dtype}: the {_NAME} flash attention implementation takes "
            "descales beside torch.float8_e4m3fn only"
        )
    for name, given in (("dropout_p", dropout_p > 0.0), ("return_debug_mask", return_debug_mask)):
        if given:
            raise NotImplementedError(
                f"{name} is given: the {_NAME} flash attention implementation takes none of 8 bits"
            )
    q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
    one = torch.ones((), device=query.device)
    q_scale, k_scale, v_scale = (one if x is None else x for x in (q_descale, k_descale, v_descale))
    o, lse = scaled_attention(
        rows(q), rows(k), rows(v), q_scale, k_scale, v_scale, causal=is_causal, softmax_scale=scale, return_lse=True
    )
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    state, unused = _rng_results(nothing, query.device)
    return o.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], state, unused, o.new_empty(0)


_OPERATORS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_flash_attention,
    "_scaled_dot_product_flash_attention_backward": sdpa_flash_attention_backward,
    "_scaled_dot_product_flash_attention.quantized": sdpa_flash_attention_quantized,
}


class _Handle:
    """Keeps the operators replaced until `remove`."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        for name, function in _OPERATORS.items():
            packet, _, overload = name.partition(".")
            if hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
                self._library.impl(name, function, "CUDA")

    def remove(self) -> None:
        self._library = None


def register() -> None:
    """Make "TESSERA" known to torch.nn.attention.activate_flash_attention_impl, if this PyTorch has it."""
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is not None:
        register_impl(_NAME, register_fn=_Handle)


register()
