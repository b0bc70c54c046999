"""`megadit reward`: post-training of a bundle by rewards."""
