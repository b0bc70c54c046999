"""Triton model repositories, built from a bundle: model.py, config.pbtxt, features, plain networks."""
