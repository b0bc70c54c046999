"""Benchmarks of training: `megadit benchmark train` and `growth`."""
