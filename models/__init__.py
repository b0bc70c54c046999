"""The networks: the video DiT, its layers, tokenizers, text encoders and weights."""
