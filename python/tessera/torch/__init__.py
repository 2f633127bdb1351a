"""What only PyTorch needs: the custom ops `torch.ops.tessera.forward` and `.backward`, the same without autograd for
code that has its own, the dropout mask, and the stand-in for scaled_dot_product_attention."""

from .dropout import dropout_mask
from .ops import attention, backward, forward

__all__ = ["attention", "backward", "dropout_mask", "forward"]
