"""Conditioning on images, clips and masks: the items a user gives, and their latents."""
