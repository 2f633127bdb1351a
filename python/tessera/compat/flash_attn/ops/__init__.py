"""Upstream's ``flash_attn.ops``, of which Tessera has :mod:`.triton.rotary`."""
