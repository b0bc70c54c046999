"""The DiT on Megatron-core: split over ranks, and its distributed checkpoints."""
