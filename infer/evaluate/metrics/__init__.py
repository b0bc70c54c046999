"""Metrics of an evaluation: a table of functions of features, distances, and their confidence intervals."""
