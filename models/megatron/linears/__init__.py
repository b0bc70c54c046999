"""Linears over tensor-parallel ranks: Megatron's, TransformerEngine's, and products of eight bits."""
