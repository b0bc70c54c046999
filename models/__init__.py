"""What a network computes: the video DiT, its layers, tokenizers, text encoders and weights."""
