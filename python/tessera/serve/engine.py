"""What the backends share: an engine's modules, where they are there, and scales of caches of 8 bits."""

import importlib
import importlib.metadata
import os
from typing import Any

from torch import Tensor


def find(path: str) -> Any:
    """The module of an engine; None where the engine is not installed or has no such module.

    Raises:
        ModuleNotFoundError: the engine is there, but something that it needs is not.
    """
    engine = path.partition(".")[0]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != engine:
            raise
        return None


def base(module: Any, name: str) -> Any:
    """A class of an engine to derive from; `object` where its module was not found."""
    return object if module is None else getattr(module, name)


def require(path: str, versions: str) -> Any:
    """The module of an engine.

    Args:
        path: the module.
        versions: of the engine, that have it.

    Raises:
        ImportError: it is not there. The text says what is.
    """
    module = find(path)
    if module is not None:
        return module
    engine = path.partition(".")[0]
    try:
        found = f"{engine} {importlib.metadata.version(engine)} has no module {path}"
    except importlib.metadata.PackageNotFoundError:
        found = f"{engine} is not installed"
    raise ImportError(f"{found}: tessera.serve.{engine} registers a backend with {engine}, and knows {versions}")


def prefix_levels() -> int:
    """TESSERA_PREFIX_LEVELS of the environment, 0 without it: `prefix_levels` of `tessera.cached_attention`.

    Raises:
        ValueError: it is no number of levels.
    """
    text = os.environ.get("TESSERA_PREFIX_LEVELS", "0")
    if text not in ("0", "1", "2", "3", "4"):
        raise ValueError(f"TESSERA_PREFIX_LEVELS = {text!r}: must be a number from 0 to 4")
    return int(text)


def scale_of(name: str, scale: Tensor, batch: int, num_heads_k: int) -> Tensor:
    """An engine's scale of a cache of 8 bits as `tessera.cached_attention` takes it. A view.

    Args:
        name: what the engine calls it.
        scale: float32, of one number, or of one for each key/value head.
        batch: sequences; 1 for an append by slots.
        num_heads_k: key/value heads.

    Returns: (), or (batch, num_heads_k).

    Raises:
        ValueError: it has another number of elements.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.numel() != num_heads_k:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}: must be one number, or one for each of the {num_heads_k} "
            "key/value heads"
        )
    return scale.reshape(1, num_heads_k).expand(batch, num_heads_k)
