"""Packs: which sample, position and text each token of a sequence has."""
