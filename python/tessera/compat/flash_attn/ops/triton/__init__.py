"""Upstream's ``flash_attn.ops.triton``, of which Tessera has :mod:`.rotary`; in plain PyTorch, in spite of the name."""
