"""Packs of training samples: checked, conditioned, assigned to packs and laid out as rows of one size."""
