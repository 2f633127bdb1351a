"""The package ``flash_mla`` on Tessera; see :mod:`tessera.compat`, and ``flash_mla_interface`` for what differs."""

from tessera.compat._imports import FLASH_MLA_VERSION as __version__
from tessera.compat.flash_mla.flash_mla_interface import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "__version__",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
