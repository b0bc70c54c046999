"""Packing of training samples: checks, conditioning, bin packing, and layout as rows of fixed size."""
