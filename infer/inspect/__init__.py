"""What is there: `megadit info` describes files, `megadit doctor` the machine."""
