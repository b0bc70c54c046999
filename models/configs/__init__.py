"""Configurations of networks: fields and their rules, families, experts, named sizes. Builds no torch modules."""
