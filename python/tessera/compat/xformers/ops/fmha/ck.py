"""Upstream's ``xformers.ops.fmha.ck``: the names of its operators."""

from tessera.compat.xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    """Taken as ``op=`` and without effect."""


class BwOp(AttentionBwOpBase):
    """Taken as ``op=`` and without effect."""
