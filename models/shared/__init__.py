"""Shared basics: errors, files, progress, commands. Imports nothing else of this package."""
