"""Serving of a bundle: Triton backend and repository, launch, gateway, client, demo page."""
