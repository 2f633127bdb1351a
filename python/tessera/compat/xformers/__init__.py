"""The package ``xformers`` on Tessera: ``xformers.ops.memory_efficient_attention`` and its biases.

See :mod:`tessera.compat`, and :mod:`tessera.compat.xformers.ops.fmha` for what differs from upstream.
"""

from tessera.compat._imports import XFORMERS_VERSION as __version__

__all__ = ["__version__"]
