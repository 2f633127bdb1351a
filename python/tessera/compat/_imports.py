"""How ``import flash_attn`` comes to mean :mod:`tessera.compat.flash_attn`; likewise ``flash_mla`` and ``xformers``.

A finder at the front of ``sys.meta_path`` answers for upstream's module names with the modules of this package: the
same module objects under a second name, so that nothing (an operator, a class) is ever defined twice. The finder also
answers for the distributions ``flash-attn``, ``flash-attn-3``, ``flash-mla`` and ``xformers``, because libraries decide
by ``importlib.metadata.version`` which functions they may call.
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
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType, TracebackType

from tessera.compat._missing import MissingModuleError, is_upstream

# What can be installed: upstream's name of a module -> ours. A name that is not here, but whose first part is, is a
# submodule of the same name.
PACKAGES = {
    "flash_attn": {
        "flash_attn": "tessera.compat.flash_attn",
        "flash_attn_2_cuda": "tessera.compat.flash_attn_2_cuda",
        "flash_attn_3": "tessera.compat.flash_attn_3",
        "flash_attn_3.flash_attn_interface": "tessera.compat.flash_attn_interface",
        "flash_attn_interface": "tessera.compat.flash_attn_interface",
    },
    "flash_mla": {"flash_mla": "tessera.compat.flash_mla"},
    "xformers": {"xformers": "tessera.compat.xformers"},
}

# What is left alone where it is really there and nobody names it: it has much that its stand-in has not.
_LEFT_ALONE = ("flash_mla", "xformers")

# The versions of upstream whose interfaces these modules have. Libraries compare them with a lower and sometimes with
# an upper bound, so they are versions that upstream has released, without a local part.
FLASH_ATTN_2_VERSION = "2.8.3"
FLASH_ATTN_3_VERSION = "3.0.0"
FLASH_MLA_VERSION = "1.0.0"
XFORMERS_VERSION = "0.0.35"


def install(packages: Iterable[str] | None = None, *, force: bool = False) -> Installation:
    """Makes upstream's names importable: ``import flash_attn``, ``flash_mla`` and ``xformers`` then mean Tessera.

    Call it before importing code that uses them: names that such code has already imported from the real package stay
    what they are, and libraries remember whether the package was there when they looked (``transformers`` looks when it
    is imported). What is installed already stays so. Imports neither PyTorch nor the modules themselves.

    Args:
        packages: of "flash_attn" (with ``flash_attn_interface``, ``flash_attn_3`` and ``flash_attn_2_cuda``),
            "flash_mla" and "xformers". None: all, but a real ``flash_mla`` or ``xformers`` is left alone, since it has
            much that its stand-in has not; name it to hide it.
        force: also when the real package is installed or imported. Its modules are put aside until
            :func:`uninstall`. Its operators (``torch.ops.flash_attn``), if it was imported, are replaced for good.

    Returns:
        What can be used in a ``with`` statement, at whose end what this call has installed is uninstalled again.

    Raises:
        RuntimeError: a real package is installed or imported, and ``force`` is not given. Nothing is installed then.
        ValueError: a name that is none of these.
    """
    names = list(PACKAGES) if packages is None else [packages] if isinstance(packages, str) else list(packages)
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"packages holds {name!r}: must be of {', '.join(map(repr, PACKAGES))}")
    new = []
    for name in dict.fromkeys(names):
        if name in _installed:
            continue
        leave_real = packages is None and name in _LEFT_ALONE
        if leave_real or not force:
            real = _real_module(name)
            if real is not None and leave_real:
                continue
            if real is not None:
                how = "imported" if real in sys.modules else "installed"
                raise RuntimeError(f"the real {real} is {how}: uninstall it, or pass force=True to hide it")
        new.append(name)
    for name in new:
        _installed[name] = _take_modules(name)
    if _installed and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return Installation(new)


def uninstall(packages: Iterable[str] | None = None) -> None:
    """Undoes :func:`install`, of all or of some packages; what is not installed is passed over. Functions that were
    imported go on working."""
    names = list(_installed) if packages is None else [packages] if isinstance(packages, str) else list(packages)
    for name in names:
        if name in _installed:
            _take_modules(name)
            sys.modules.update(_installed.pop(name))
    if not _installed and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _real_module(package: str) -> str | None:
    """The first of a package's modules that somebody else provides."""
    for name in PACKAGES[package]:
        if "." not in name and (name in sys.modules or importlib.util.find_spec(name) is not None):
            return name
    return None


def _take_modules(package: str) -> dict[str, ModuleType]:
    """Removes what is imported under a package's names."""
    names = [name for name in sys.modules if _target(name, package) is not None]
    return {name: sys.modules.pop(name) for name in names}


class Installation:
    """What :func:`install` returns: leaving its ``with`` block uninstalls what that call has installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)  # what that call has installed

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        uninstall(self.packages)


def _target(name: str, package: str) -> str | None:
    """Our name of the module that upstream calls `name`; None if that is not of that package at all."""
    modules = PACKAGES[package]
    if name in modules:
        return modules[name]
    top, dot, submodule = name.partition(".")
    return f"{modules[top]}.{submodule}" if dot and top in modules else None


def _installed_target(name: str) -> str | None:
    return next((target for package in _installed if (target := _target(name, package)) is not None), None)


def _upstream_name(name: str) -> str | None:
    """Upstream's name of a module of ours: ``from flash_attn import losses`` asks for it under ours."""
    for package in _installed:
        for theirs, ours in PACKAGES[package].items():
            if name.startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
    return None


def _is_import() -> bool:
    """Whether a finder is asked by an import statement, and not by ``importlib.util.find_spec``, whose answer to a
    question for what is missing must be None. If the import system is not as expected: no."""
    frame = sys._getframe()
    for _ in range(3):  # the finder, importlib's loop over finders, and who called that
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return frame.f_code.co_name == "_find_and_load_unlocked"


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
    "flash_attn": {
        "flash-attn": _Distribution("flash-attn", FLASH_ATTN_2_VERSION, ["flash_attn", "flash_attn_2_cuda"]),
        "flash-attn-3": _Distribution("flash-attn-3", FLASH_ATTN_3_VERSION, ["flash_attn_3", "flash_attn_interface"]),
    },
    "flash_mla": {"flash-mla": _Distribution("flash-mla", FLASH_MLA_VERSION, ["flash_mla"])},
    "xformers": {"xformers": _Distribution("xformers", XFORMERS_VERSION, ["xformers"])},
}


_EVERYTHING = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = _installed_target(fullname)
        if name is None:
            theirs = _upstream_name(fullname)
            if theirs is not None and is_upstream(theirs) and _is_import():
                raise MissingModuleError(theirs)
            return None
        found = importlib.util.find_spec(name)
        if found is None:
            if _is_import():
                raise MissingModuleError(fullname)
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(name), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _EVERYTHING
    ) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        return (d for package in _installed for name, d in _DISTRIBUTIONS[package].items() if wanted in (None, name))


_finder = _Finder()
# What is installed, each with the real modules that were put aside for it.
_installed: dict[str, dict[str, ModuleType]] = {}
