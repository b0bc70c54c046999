"""Command line: the verbs of `megadit`, options from dataclasses, rules between them, signals, shell completion."""
