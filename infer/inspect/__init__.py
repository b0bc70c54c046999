"""Commands that inspect: `megadit info` describes files, `megadit doctor` the machine."""
