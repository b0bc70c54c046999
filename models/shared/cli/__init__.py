"""Command line: the verbs of `megadit`, options from dataclasses, how a command starts and ends, shell completion."""
