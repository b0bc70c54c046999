"""What sampling costs: `megadit benchmark generate`."""
