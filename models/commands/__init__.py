"""Commands on weights: `megadit convert`, `push` and `pull`."""
