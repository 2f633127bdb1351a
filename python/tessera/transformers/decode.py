"""The mask of a step of decoding, one query a sequence: the device knows what it sees, and the host reads nothing.

The keys that a query sees are read where the cache has them, by `tessera.cached_attention`; no others are. A static
cache's capacity costs nothing then, nor does padding. Two forms of the mask do for every case:

    a prefix    the first keys, as many as `seqlens` says, and of them the window's: a static cache without padding
    elements    any others: their slots are listed once per forward pass, and the list is a table of pages of one key

On a CPU to look at the elements waits for nothing: there one run of keys is no list, but left padding and a length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.utils.import_utils import is_tracing

from .. import attention, cached_attention
from ..torch import padding
from ..torch.tensors import additive
from .elements import check_keys, total_bias
from .shape import ShapedMask


class DecodeMask(ShapedMask):
    """A mask of (batch, 1, 1, seqlen_k). Whoever computes with it as with a tensor gets a bias, which it then makes.

    It may be handed to a compiled model.

    Attributes:
        shape: (batch, 1, 1, seqlen_k).
        seqlens: int32 (batch,), how many of the first keys are seen, the query's own being the last; or None.
        window: (left, 0) of them, as `tessera.cached_attention` has it.
        visible: boolean (batch, 1, 1, seqlen_k) in place of `seqlens`, or None.
        dtype: of the bias.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        seqlens: Tensor | None = None,
        window: tuple[int, int] = (-1, -1),
        visible: Tensor | None = None,
    ) -> None:
        super().__init__(shape)
        self.dtype = dtype
        self.seqlens, self.window, self.visible = seqlens, window, visible
        self._where: tuple[int, dict[str, Tensor]] | None = None

    def to(self, device: torch.device | str, **_: Any) -> "DecodeMask":
        seqlens, visible = (None if x is None else x.to(device) for x in (self.seqlens, self.visible))
        return DecodeMask(self._shape, self.dtype, seqlens, self.window, visible)

    def elements(self) -> Tensor:
        """Boolean (batch, 1, 1, seqlen_k): which keys are seen."""
        if self.visible is not None:
            return self.visible
        assert self.seqlens is not None
        ends = self.seqlens[:, None]
        at = torch.arange(self._shape[3], device=ends.device)
        visible: Tensor = at < ends
        if self.window[0] >= 0:
            visible = visible & (at >= ends - 1 - self.window[0])
        return visible[:, None, None]

    def bias(self) -> Tensor:
        """The same to be added to scores, of `dtype`."""
        return additive(self.elements(), self.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return self.bias()[index]

    def __add__(self, other: Any) -> Any:
        return self.bias() + other

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensor(x: Any) -> Any:
            return x.bias() if isinstance(x, DecodeMask) else x

        is_leaf = lambda x: isinstance(x, DecodeMask)  # noqa: E731
        args, kwargs = pytree.tree_map(tensor, (args, kwargs or {}), is_leaf=is_leaf)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.bias(), name)

    def __repr__(self) -> str:
        kind = "elements" if self.seqlens is None else f"a prefix, window={self.window}"
        return f"DecodeMask(shape={self._shape}, {kind})"

    __str__ = __repr__

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, **options: Any) -> Tensor:
        """Attention of (batch, seqlen, heads, head_dim) tensors."""
        check_keys(self._shape, k)
        cached = None if position_bias is not None or self._shape[0] != q.shape[0] else self._cached(q, k, v, options)
        if cached is None:
            o: Tensor = attention(q, k, v, bias=total_bias(self.elements(), position_bias, q), **options)
            return o
        return cached

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor | None:
        """By `tessera.cached_attention`; None if that does not do it."""
        scores = {name: x for name, x in options.items() if name not in ("dropout_p", "deterministic")}
        sink = scores["sink"]
        if options["dropout_p"] > 0 or k.shape[0] != q.shape[0] or q.shape[1] != 1:
            return None
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink)):
            return None
        if self.seqlens is not None:
            o: Tensor = cached_attention(q, k, v, seqlens=self.seqlens, window=self.window, **scores)
            return o
        step = _row_step(k)
        if step is None or _row_step(v) != step:
            return None
        where = self._slots(step)
        if "page_table" in where:
            k, v = (_as_pages(x, step) for x in (k, v))
        o = cached_attention(q, k, v, **where, **scores)
        return o

    def _slots(self, step: int) -> dict[str, Any]:
        """Which slots are seen, as arguments of cached_attention; a row of the cache is `step` keys behind the last."""
        visible = self.elements()[:, 0, 0]
        kept = not is_tracing(visible)  # a graph makes its own, of what the mask holds when it is replayed
        if not kept or self._where is None or self._where[0] != step:
            run = _run(visible) if kept and _on_host(visible) else None
            where = _table(visible, step) if run is None else run
            if not kept:
                return where
            self._where = (step, where)
        return self._where[1]


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _run(visible: Tensor) -> dict[str, Tensor] | None:
    """Slots that are one run in every row of (batch, seqlen_k); None if they are not. Waits for the device."""
    if not bool(padding.has_runs(visible).all()):
        return None
    first, end = padding.runs(visible)
    return {"seqlens": end.to(torch.int32), "leftpad": first.to(torch.int32)}


def _table(visible: Tensor, step: int) -> dict[str, Tensor]:
    """Any slots, as numbers of pages of one key."""
    batch, keys = visible.shape
    first = torch.arange(0, batch * step, step, device=visible.device) if step else visible.new_zeros(batch).long()
    pages = first[:, None] + torch.arange(keys, device=visible.device)
    # Visible keys keep their order. All others go to one more column, which is cut off.
    place = torch.where(visible, visible.cumsum(1) - 1, keys)
    table = torch.zeros(batch, keys + 1, dtype=torch.int64, device=visible.device).scatter(1, place, pages)
    return {"seqlens": visible.sum(1, dtype=torch.int32), "page_table": table[:, :keys].to(torch.int32).contiguous()}


def _row_step(x: Tensor) -> int | None:
    """How many keys of (batch, seqlen_k, heads, head_dim) it is from one row to the next; None if that is no number."""
    batch, keys = x.stride()[:2]
    if keys == 0 or batch % keys != 0:
        return None
    step = batch // keys
    return step if step >= 0 and x.shape[0] * step + x.shape[1] < 2**31 else None


def _as_pages(x: Tensor, step: int) -> Tensor:
    """(batch, seqlen_k, heads, head_dim) as (num_pages, 1, heads, head_dim); they may overlap."""
    num_pages = (x.shape[0] - 1) * step + x.shape[1]
    _, keys, heads, columns = x.stride()
    return x.as_strided((num_pages, 1, *x.shape[2:]), (keys, keys, heads, columns))
