"""Checkpoints of a run: written atomically, mirrored, initial weights, and conversion to a bundle."""
