"""Training: recipes, the training engine on Megatron-core, and data preparation."""
