"""Preparation of a data set from a user's videos and images: list, scan, select, encode, finish."""
