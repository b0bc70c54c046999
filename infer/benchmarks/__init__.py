"""Benchmarks of sampling: `megadit benchmark generate`."""
