"""Samples on disk, and how they reach training as packs."""
