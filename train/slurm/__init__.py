"""Batch scripts for Slurm: `megadit slurm`."""
