"""FlashAttention-3's package ``flash_attn_3`` on Tessera.

Its one module, ``flash_attn_3.flash_attn_interface``, is :mod:`tessera.compat.flash_attn_interface` under another
name, as it is upstream; ``tessera.compat.install()`` sees to that.
"""

from tessera.compat._imports import FLASH_ATTN_3_VERSION as __version__

__all__ = ["__version__"]
