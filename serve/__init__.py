"""Bundle -> service, and the `megadit` command."""
