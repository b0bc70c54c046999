"""Demos: data sets that need no download, chains of commands on them, and scores."""
