"""The networks: the video DiT and its layers, ViT, CLIP, and Stable Diffusion's U-Net. Plain torch for one device."""
