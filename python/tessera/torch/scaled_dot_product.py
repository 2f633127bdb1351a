"""In place of torch.nn.functional.scaled_dot_product_attention: `sdpa`, and `sdpa_mode`, which puts it there."""

import warnings
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import attention
from . import padding
from .tensors import additive, rows

MaskIs = Literal["causal", "padding"] | tuple[Literal["window"], int, int] | None


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask_is: MaskIs = None,
) -> Tensor:
    """softmax(scale query key^T + attn_mask) value: torch.nn.functional.scaled_dot_product_attention by Tessera.

    Nothing falls back to the quadratic computation: what no kernel does, raises. Tensors are not copied, with these
    exceptions: one whose last stride is not 1, one whose leading dimensions do not merge into one batch, and, for
    mask_is="padding", one whose batch and seqlen strides do not merge.

    Args:
        query: (..., num_heads, seqlen_q, head_dim), or without heads (seqlen_q, head_dim). float32 (CPU only), bfloat16
            or float16. Under autocast all three get its type. float64 on the CPU is left to torch's own kernel, with a
            warning.
        key: (..., num_heads, seqlen_k, head_dim). Leading dimensions broadcast, and so do the heads.
        value: (..., num_heads, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (..., num_heads, seqlen_q, seqlen_k). Boolean, True where a query attends to a key; or
            of query's type or float32, added to the scores, and differentiable. It is never expanded.
        dropout_p: applied whatever the module's mode, as torch does. The mask is drawn from torch's generator for the
            CPU, so it is another than torch's own.
        is_causal: query i sees keys 0 ... i, also if seqlen_q != seqlen_k. Not together with attn_mask.
        scale: None is 1 / sqrt(head_dim).
        enable_gqa: key and value have fewer heads, of which num_heads is a multiple.
        mask_is: what the caller knows of attn_mask, whose values are then not read:
            "causal": the same as is_causal.
            ("window", left, right): query i sees keys i - left ... i + right, -1 unbounded.
            "padding": attn_mask is boolean, of one row for all heads and queries, (batch, 1, 1, seqlen_k), and what is
            True in it is one run of keys. Other keys are not computed with, instead of being hidden. (The values are
            read on the device: if there is more than one run, the result is that of some other mask.)

    Returns:
        (..., num_heads, seqlen_q, head_dim_v), in memory laid out as torch's own result. A query that sees no key gets
        0, and no gradient.

    Raises:
        ValueError, NotImplementedError: as `tessera.attention`; also ValueError for shapes that do not broadcast and
            NotImplementedError for nested tensors.
        TypeError: what must be a tensor is none.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__!r}: must be a torch tensor")
        if tensor.is_nested:
            raise NotImplementedError(f"{name} is a nested tensor: pack it and pass cu_seqlens_q to tessera.attention")
        if tensor.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be (..., num_heads, seqlen, head_dim)")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key has shape {tuple(key.shape)}: head_dim must be query's, {query.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value has shape {tuple(value.shape)}: seqlen_k must be key's, {key.shape[-2]}")
    if attn_mask is None and mask_is is not None:
        raise ValueError(f"mask_is = {mask_is!r}, but attn_mask is None: mask_is tells what attn_mask holds")
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal = True together with attn_mask: must be one of the two")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is of type {type(attn_mask).__name__!r}: must be a torch tensor")

    if query.dtype is torch.float64 and query.is_cpu and not torch.is_autocast_enabled("cpu"):
        _warn_of_float64()
        causal = is_causal or mask_is == "causal"
        mask = None if causal else attn_mask
        more: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}  # older versions have no such argument
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, causal, scale=scale, **more)
    o = _compute(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mask_is)
    return o.contiguous() if query.is_cpu and not _follows_query(query, key, value, attn_mask, dropout_p) else o


def _follows_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """Whether torch's result on a CPU lies in memory like query. Otherwise it is contiguous."""
    return (
        query.dim() == 4
        and dropout_p == 0.0
        and query.shape[-1] == value.shape[-1]
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and (mask is None or not mask.requires_grad)
    )


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mask_is: MaskIs,
) -> Tensor:
    """`sdpa` of arguments that make sense; o laid out like query."""
    options: dict[str, Any] = {"softmax_scale": scale, "dropout_p": dropout_p}
    if is_causal or mask_is == "causal":
        options |= {"causal": True, "alignment": "top_left"}
    attend: Callable[..., Tensor] = _attend_padded if mask_is == "padding" else _attend
    if _is_plain(query.shape, key.shape, value.shape, enable_gqa):
        q, k, v = rows(query), rows(key), rows(value)
        if attn_mask is None:
            return _attend(q, k, v, None, **options)
        mask, window = _check_mask(attn_mask, (*q.shape[:-1], k.shape[-2]), query, mask_is)
        return attend(q, k, v, mask, **options, **window)

    dims = max(query.dim(), key.dim(), value.dim())
    q, k, v = (rows(_with_dims(x, max(dims, 4))) for x in (query, key, value))
    batch = _broadcast(q, k, v)
    q, k, v = _match_heads(q, k, v, enable_gqa)
    mask = None
    if attn_mask is not None:
        mask, window = _check_mask(attn_mask, (*batch, *q.shape[-3:-1], k.shape[-2]), query, mask_is)
        options |= window
    o = _over_batch(attend, q, k, v, mask, batch, options)
    return o if dims >= 4 else o.view(o.shape[4 - dims :])


@torch.compiler.assume_constant_result
def _warn_of_float64() -> None:
    """Also while compiling."""
    warnings.warn(
        "query.dtype = float64: computed by torch's own scaled_dot_product_attention, Tessera has no kernel for it",
        UserWarning,
        stacklevel=3,
    )


def _is_plain(q: torch.Size, k: torch.Size, v: torch.Size, enable_gqa: bool) -> bool:
    """Whether shapes are 4-D ones with nothing to broadcast: those of nearly all calls."""
    if not len(q) == len(k) == len(v) == 4 or not q[0] == k[0] == v[0] or k[1] != v[1]:
        return False
    return q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0)


def _with_dims(x: Tensor, dims: int) -> Tensor:
    return x[(None,) * (dims - x.dim())]


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The leading dimensions of the result."""
    shapes = [tuple(x.shape[:-3]) for x in (q, k, v)]
    batch = tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*shapes, strict=True))
    if any(n not in (1, size) for shape in shapes for n, size in zip(shape, batch, strict=True)):
        raise ValueError(f"leading dimensions of query, key and value are {shapes}: must broadcast")
    return batch


def _match_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast heads as torch does; one head of keys for all queries is what the kernels do anyway."""
    heads, heads_k, heads_v = (x.shape[-3] for x in (q, k, v))
    text = f"num_heads of query, key and value are {heads}, {heads_k} and {heads_v}"
    if enable_gqa:
        if heads_k != heads_v or heads % max(heads_k, 1):
            raise ValueError(f"{text}: with enable_gqa the first must be a multiple of the others, which are equal")
        return q, k, v
    most = max(heads, heads_k, heads_v) if min(heads, heads_k, heads_v) else 0
    if any(n not in (1, most) for n in (heads, heads_k, heads_v)):
        raise ValueError(f"{text}: must be equal, or 1, or enable_gqa must be True")
    q = q.expand(*q.shape[:-3], most, -1, -1)
    if heads_k != heads_v:
        k, v = (x.expand(*x.shape[:-3], most, -1, -1) for x in (k, v))
    return q, k, v


def _check_mask(
    mask: Tensor, scores: tuple[int, ...], query: Tensor, mask_is: MaskIs
) -> tuple[Tensor | None, dict[str, Any]]:
    """The mask, if its values are read at all, and what the caller knows of it as options of the kernels.

    It gets as many dimensions as scores, each as large as there or 1, and a type that is a bias, or boolean.
    """
    autocast = torch.is_autocast_enabled(query.device.type)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not (autocast and mask.is_floating_point()):
        kinds = " or ".join(map(str, dict.fromkeys((torch.bool, torch.float32, query.dtype))))
        raise ValueError(f"attn_mask.dtype = {mask.dtype}: must be {kinds}")
    if mask.dim() > len(scores) or any(
        n not in (1, size) for n, size in zip(reversed(mask.shape), reversed(scores), strict=False)
    ):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}: must broadcast to {scores}")
    if autocast and mask.dtype not in (torch.bool, torch.float32):
        mask = mask.to(_kernel_dtype(query))
    mask = _with_dims(mask, len(scores))
    if mask_is is not None:
        return _known(mask_is, mask)
    if mask.requires_grad:
        return mask, {}
    # A mask that was expanded is cut back to what it holds.
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask, {}


def _kernel_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _known(mask_is: MaskIs, mask: Tensor) -> tuple[Tensor | None, dict[str, Any]]:
    """The mask, if its values are read at all, and what the caller knows as options of the kernels."""
    if mask.requires_grad:
        raise ValueError(f"mask_is = {mask_is!r}, but attn_mask requires a gradient: must not, its values are not read")
    match mask_is:
        case "causal":
            return None, {}
        case ("window", int(left), int(right)):
            return None, {"window": (left, right), "alignment": "top_left"}
        case "padding" if mask.dtype is torch.bool and mask.shape[-3:-1] == (1, 1):
            return mask, {}
        case "padding":
            raise ValueError(
                f"mask_is = 'padding', but attn_mask is {mask.dtype} of shape {tuple(mask.shape)}: "
                "must be torch.bool, (batch, 1, 1, seqlen_k)"
            )
    raise ValueError(f"mask_is = {mask_is!r}: must be None, 'causal', ('window', left, right) or 'padding'")


def _over_batch(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    batch: tuple[int, ...],
    options: dict[str, Any],
) -> Tensor:
    """(*batch, num_heads, seqlen_q, head_dim_v), in as many calls as it takes to leave the mask unexpanded."""
    if mask is not None and mask.shape[:-3] != batch and mask.shape[:-3].numel() != 1:
        parts = [x.expand(batch[0], *x.shape[1:]) for x in (q, k, v, mask)]
        calls = ([x[i] for x in parts] for i in range(batch[0]))
        return torch.stack([_over_batch(attend, q, k, v, mask, batch[1:], options) for q, k, v, mask in calls])
    q, k, v = (x.expand(*batch, *x.shape[-3:]).flatten(0, -4) for x in (q, k, v))
    o = attend(q, k, v, None if mask is None else mask.flatten(0, -4), **options)
    return o.view(*batch, *o.shape[1:])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """One call for 4-D tensors as torch lays them out."""
    if mask is not None:
        bias = additive(mask, _kernel_dtype(query)) if mask.dtype is torch.bool else mask
        options["bias"] = rows(bias)
    o: Tensor = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
    return o.transpose(1, 2)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The same if the boolean mask, (batch or 1, 1, 1, seqlen_k), is one run of True for each sequence."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    first, end = padding.runs(mask[:, 0, 0].expand(k.shape[:2]))
    return padding.attend(q, k, v, padding.cut_keys(first, end, q.shape[1], k.shape[1]), **options).transpose(1, 2)


def _no_check(*args: Any) -> None:
    pass


def _with_sdpa(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.nn.functional whose code finds `sdpa` under the name scaled_dot_product_attention.

    A TorchFunctionMode is off while it handles a call, so it would not see what the function calls in turn.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "scaled_dot_product_attention": sdpa}
    # torch.compile looks into the copy, but would look names up in the module that __name__ names, and cannot trace how
    # this check makes its text. A wrong shape is noticed all the same, when the mask is viewed.
    del names["__name__"]
    names["_check_key_padding_mask"] = _no_check
    same = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


class sdpa_mode(TorchFunctionMode):
    """Inside, torch.nn.functional.scaled_dot_product_attention is `sdpa`, also for modules that were built outside.

    Holds for the thread that enters it, and for what torch.compile traces inside. torch.nn.MultiheadAttention and the
    transformer layers leave their fused inference path, which has an attention of its own. Calls from C++ and to
    torch.ops.aten are not seen.
    """

    _routes: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        functional.scaled_dot_product_attention: sdpa,
        functional.multi_head_attention_forward: _with_sdpa(functional.multi_head_attention_forward),
    }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._routes.get(func, func)(*args, **(kwargs or {}))
