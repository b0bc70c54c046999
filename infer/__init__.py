"""Sampling of videos from prompts: schedules, samplers, guidance, runtimes, and the `megadit generate` command."""
