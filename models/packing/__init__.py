"""Packs: the sample, position and text of each token of a sequence."""
