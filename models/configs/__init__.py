"""Configurations of networks: fields and their rules, families, experts, named sizes. No torch module is built here."""
