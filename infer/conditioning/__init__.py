"""Conditioning on images, clips and masks: a user's items, and their latents."""
