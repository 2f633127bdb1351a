"""What tests of engines' backends share: attention of one request in double, and a look-out for reads by the host."""

import contextlib
import importlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FP8 = torch.float8_e4m3fn


def watch(monkeypatch: pytest.MonkeyPatch, backend: Any, option: str) -> list[Any]:
    """What a backend's calls of `cached_attention` say of an option, call by call from now on."""
    given, attention = [], backend.cached_attention

    def watched(*tensors: Any, **options: Any) -> Any:
        given.append(options[option])
        return attention(*tensors, **options)

    monkeypatch.setattr(backend, "cached_attention", watched)
    return given


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    before: int | None = None,
    after: int | None = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """(rows, heads, head_dim) queries that are the last tokens of a request, its keys (keys, heads_k, head_dim) and
    values; one row and head after another, in double.

    before, after: how many keys before and after its own a query sees; None: all.
    """
    rows, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    group = heads // k.shape[1]
    q, k, v = (x.double().cpu() for x in (q, k, v))
    sink = None if sink is None else sink.detach()
    o = torch.zeros(rows, heads, v.shape[2], dtype=torch.double)
    for i in range(rows):
        own = keys - rows + i
        first = 0 if before is None else max(0, own - before)
        end = keys if after is None else min(keys, own + 1 + after)
        for h in range(heads):
            s = k[first:end, h // group] @ q[i, h] * scale
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            if slopes is not None:
                s = s - float(slopes[h]) * (torch.arange(first, end) - own).abs()
            extra = -math.inf if sink is None else float(sink[h])
            most = max(float(s.max()), extra)
            weights = torch.exp(s - most)
            o[i, h] = weights @ v[first:end, h // group] / (weights.sum() + math.exp(extra - most))
    return o


def assert_close(name: str, result: Tensor, exact: Tensor) -> None:
    """Element by element: float32 to rounding of sums, 16 bits to some units of the largest value."""
    eps = torch.finfo(result.dtype).eps
    limit = (32 if result.dtype is torch.float32 else 3) * eps * max(1.0, float(exact.abs().max()))
    worst = (result.double().cpu() - exact).abs()
    assert bool((worst <= limit).all()), f"{name}: {float(worst.max())} off, {limit} is accepted"


def quantised(x: Tensor, scale: Tensor | float) -> Tensor:
    """As float8_e4m3fn, to the nearest of products with 1 / scale, as S14 has it: near a tie a quotient may differ."""
    return (x.float() * (1.0 / scale)).clamp(-448, 448).to(FP8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


_READS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "argwhere", "masked_select", "unique", "equal",
    "allclose", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "__iter__",
}  # fmt: skip


class _NoReads(TorchFunctionMode):
    """Raises where the host would wait for a device to learn what a tensor holds: what no CUDA graph can capture."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READS:
            raise AssertionError(f"the host reads a tensor: {name}")
        if name == "to" and any(str(x) == "cpu" for x in (*args[1:], *kwargs.values())):
            raise AssertionError("a tensor goes to the host")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Tensor) and x.dtype is torch.bool for x in index):
                raise AssertionError("a mask is an index, so its number of elements is read")
        return function(*args, **kwargs)


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    with _NoReads():
        yield


def addresses(metadata: Any) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Where the tensors of a metadata object lie."""
    return {
        name: (x.data_ptr(), tuple(x.shape), x.stride()) for name, x in vars(metadata).items() if isinstance(x, Tensor)
    }


def entry_point(group: str) -> Any:
    """What the package's entry point of this group stands for."""
    tomllib = pytest.importorskip("tomllib")
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, name = tomllib.loads(text)["project"]["entry-points"][group]["tessera"].split(":")
    return getattr(importlib.import_module(module), name)
