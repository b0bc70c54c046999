"""To and from published checkpoints: key maps, readers, and the `megadit convert` command."""
