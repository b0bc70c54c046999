"""Optimizers and their state, learning-rate schedules, and EMA weights."""
