"""Upstream's ``xformers.version``."""

from tessera.compat._imports import XFORMERS_VERSION as __version__

__all__ = ["__version__"]
