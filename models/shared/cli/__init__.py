"""Commands: the verbs of `megadit`, options made of dataclasses, rules between them, signals, shell completion."""
