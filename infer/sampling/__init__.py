"""Sampling without a network: noise levels, solvers, guidance."""
