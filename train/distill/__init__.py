"""Distillation of a teacher to a student that samples in few steps."""
