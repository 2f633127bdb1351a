"""Upstream's ``flash_attn.layers``, of which Tessera has the rotary embeddings."""
