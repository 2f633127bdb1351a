"""Upstream's ``xformers.ops.fmha.ck_splitk``: the names of its operators."""

from tessera.compat.xformers.ops.fmha.common import AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    """Taken as ``op=`` and without effect."""
