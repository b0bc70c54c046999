"""Data: preparation of samples, and loading them as packs."""
