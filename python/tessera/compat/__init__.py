"""Code written for ``flash_attn`` (FlashAttention-2 and -3) runs on Tessera unchanged.

>>> import tessera.compat
>>> tessera.compat.install()  # before the code that imports flash_attn
>>> from flash_attn import flash_attn_func  # this is tessera.compat.flash_attn.flash_attn_func

or, for a part of a program only,

>>> with tessera.compat.install():
...     import some_model_that_imports_flash_attn

The modules can also be imported under their own names, without installing anything:
:mod:`tessera.compat.flash_attn` (FlashAttention-2) and :mod:`tessera.compat.flash_attn_interface` (FlashAttention-3).

What is there: every attention function of both versions on dense, packed and variable-length tensors, the private
operators that ring attention and Megatron-like code call, ``bert_padding`` and rotary embeddings. What is not there
raises :class:`NotImplementedError` with the name of the function or argument: key/value caches, page tables, fp8,
``qv`` and ``attention_chunk``. Modules of ``flash_attn`` that are not about attention (fused layers, losses, models)
do not exist here: importing one raises :class:`ModuleNotFoundError`.

Differences that a caller can see are listed in :mod:`tessera.compat.flash_attn.flash_attn_interface` and
:mod:`tessera.compat.flash_attn_interface`.
"""

from tessera.compat._imports import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
