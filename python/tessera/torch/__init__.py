"""What only PyTorch needs: the custom ops `torch.ops.tessera.forward` and `.backward`, the same without autograd for
code that has its own, the dropout mask, and the stand-ins for scaled_dot_product_attention: `sdpa`, `sdpa_mode`, and
"TESSERA" for `torch.nn.attention.activate_flash_attention_impl`."""

from . import flash_impl as flash_impl  # makes its name known to torch
from .direct import backward, forward
from .dropout import dropout_mask
from .scaled_dot_product import sdpa, sdpa_mode

__all__ = ["backward", "dropout_mask", "forward", "sdpa", "sdpa_mode"]
