"""Linears over tensor-parallel ranks: Megatron's, TransformerEngine's, and 8-bit ones."""
