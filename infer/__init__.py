"""From a prompt to a video: schedules, samplers, guidance, runtimes, and the `megadit generate` command."""
