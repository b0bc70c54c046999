"""Ops: the computations of a network, with references and fast variants. Importing this package registers all."""

from megadit.models.ops import attention, gated_residual, linear, modulated_norm, qk_norm_rope  # noqa: F401
