"""Conversion from and to published checkpoints: key maps, readers, and the `megadit convert` command."""
