"""How ``import flash_attn`` comes to mean :mod:`tessera.compat.flash_attn`.

A finder at the front of ``sys.meta_path`` answers for upstream's module names with the modules of this package: the
same module objects under a second name, so that nothing (an operator, a class) is ever defined twice. The finder also
answers for the distributions ``flash-attn`` and ``flash-attn-3``, because libraries decide by
``importlib.metadata.version`` which functions they may call.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType

# Upstream's name -> ours. A name that is not here, but whose first part is, is a submodule of the same name.
MODULES = {
    "flash_attn": "tessera.compat.flash_attn",
    "flash_attn_2_cuda": "tessera.compat.flash_attn_2_cuda",
    "flash_attn_3": "tessera.compat.flash_attn_3",
    "flash_attn_3.flash_attn_interface": "tessera.compat.flash_attn_interface",
    "flash_attn_interface": "tessera.compat.flash_attn_interface",
}

# The versions of upstream whose interfaces these modules have. Libraries compare them with a lower and sometimes with
# an upper bound, so they are versions that upstream has released, without a local part.
FLASH_ATTN_2_VERSION = "2.8.3"
FLASH_ATTN_3_VERSION = "3.0.0"


def install(*, force: bool = False) -> Installation:
    """Makes ``flash_attn``, ``flash_attn_interface``, ``flash_attn_3`` and ``flash_attn_2_cuda`` importable.

    Call it before importing code that uses ``flash_attn``: names that such code has already imported from the real
    package stay what they are, and libraries remember whether the package was there when they looked
    (``transformers`` looks when it is imported). Does nothing if installed already. Imports neither PyTorch nor the
    modules themselves.

    Args:
        force: also when the real package is installed or imported. Its modules are put aside until
            :func:`uninstall`. Its operators (``torch.ops.flash_attn``), if it was imported, are replaced for good.

    Returns:
        What can be used in a ``with`` statement, at whose end the modules are uninstalled again; unless they had been
        installed before.

    Raises:
        RuntimeError: a real ``flash_attn`` is installed or imported, and ``force`` is not given.
    """
    if _finder in sys.meta_path:
        return Installation(owner=False)
    if not force:
        for name in MODULES:
            if "." not in name and (name in sys.modules or importlib.util.find_spec(name) is not None):
                how = "imported" if name in sys.modules else "installed"
                raise RuntimeError(f"the real {name} is {how}: uninstall it, or pass force=True to hide it")
    _set_aside.update({name: sys.modules.pop(name) for name in list(sys.modules) if _target(name) is not None})
    sys.meta_path.insert(0, _finder)
    return Installation(owner=True)


def uninstall() -> None:
    """Undoes :func:`install`; does nothing if not installed. Functions that were imported go on working."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in list(sys.modules):
        if _target(name) is not None:
            del sys.modules[name]
    sys.modules.update(_set_aside)
    _set_aside.clear()


class Installation:
    """What :func:`install` returns: leaving its ``with`` block uninstalls what that call has installed."""

    def __init__(self, *, owner: bool) -> None:
        self._owner = owner

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owner:
            uninstall()


def _target(name: str) -> str | None:
    """Our name of the module that upstream calls `name`; None if that is not upstream's at all."""
    if name in MODULES:
        return MODULES[name]
    package, dot, submodule = name.partition(".")
    return f"{MODULES[package]}.{submodule}" if dot and package in MODULES else None


class _Loader(importlib.abc.Loader):
    """Loads a module by importing ours. The module keeps its own name and spec."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The body ran when our module was imported. Between the two calls the import system has put the spec of the
        # second name into the module, which would confuse importlib.reload and relative imports.
        module.__spec__ = self._spec


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a distribution of upstream, made up."""

    def __init__(self, name: str, version: str, modules: Sequence[str]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Tessera under its name\n",
            "top_level.txt": "\n".join(modules),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> pathlib.Path:
        return pathlib.Path(__file__).parent / path


_DISTRIBUTIONS = {
    "flash-attn": _Distribution("flash-attn", FLASH_ATTN_2_VERSION, ["flash_attn", "flash_attn_2_cuda"]),
    "flash-attn-3": _Distribution("flash-attn-3", FLASH_ATTN_3_VERSION, ["flash_attn_3", "flash_attn_interface"]),
}


_EVERYTHING = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = _target(fullname)
        found = importlib.util.find_spec(name) if name is not None else None
        if name is None or found is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(name), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _EVERYTHING
    ) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        return (d for name, d in _DISTRIBUTIONS.items() if wanted in (None, name))


_finder = _Finder()
_set_aside: dict[str, ModuleType] = {}
