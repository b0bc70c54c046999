"""Bundles with other weights of the same networks: with adapters merged in, or the mean of several."""
