"""Code written for ``flash_attn`` (FlashAttention-2 and -3), ``flash_mla`` and ``xformers`` runs on Tessera unchanged.

>>> import tessera.compat
>>> tessera.compat.install()  # before the code that imports one of them
>>> from flash_attn import flash_attn_func  # this is tessera.compat.flash_attn.flash_attn_func
>>> from xformers.ops import memory_efficient_attention  # and this tessera.compat.xformers.ops's

or, for a part of a program only,

>>> with tessera.compat.install():
...     import some_model_that_imports_flash_attn

``install(["flash_attn"])`` installs one of the three. Without names, a real ``flash_mla`` or ``xformers`` is left
alone. The modules can also be imported under their own names, without installing anything:
:mod:`tessera.compat.flash_attn` (FlashAttention-2), :mod:`tessera.compat.flash_attn_interface` (FlashAttention-3),
:mod:`tessera.compat.flash_mla` and :mod:`tessera.compat.xformers`.

What is there: every attention function of both versions on dense, packed and variable-length tensors and on caches of
keys and values, in rows or pages, the private operators that ring attention and Megatron-like code call,
``bert_padding`` and rotary embeddings; of ``flash_mla`` decoding over dense latent rows; of ``xformers``
``memory_efficient_attention`` with its relatives and biases. What is not there raises :class:`NotImplementedError` with
the name of the function or argument, and what gives the same result: ``qv`` with gradients or float8, and
``attention_chunk`` with gradients or packed keys. Modules of upstream that are not about attention (fused layers,
losses, models) do not exist here: importing one raises :class:`MissingModuleError`, a :class:`ModuleNotFoundError` that
says what there is instead.

Differences that a caller can see are listed in :mod:`tessera.compat.flash_attn.flash_attn_interface`,
:mod:`tessera.compat.flash_attn_interface`, :mod:`tessera.compat.flash_mla.flash_mla_interface` and
:mod:`tessera.compat.xformers.ops.fmha`.
"""

from tessera.compat._imports import Installation, install, uninstall
from tessera.compat._missing import MissingModuleError

__all__ = ["Installation", "MissingModuleError", "install", "uninstall"]
