"""Sequence, context and expert parallelism, and adapters over tensor-parallel ranks."""
