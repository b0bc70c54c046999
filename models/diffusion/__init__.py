"""Diffusion: parameterizations, the denoiser, counter-based noise, and the sampling settings."""
