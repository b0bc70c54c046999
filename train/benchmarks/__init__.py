"""What training costs: `megadit benchmark train` and `growth`."""
