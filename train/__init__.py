"""Clips -> checkpoint: recipes, the training engine on Megatron-core, and the data it reads."""
