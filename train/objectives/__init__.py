"""Training objectives on packs: denoising, classification, contrastive matching; the noise levels trained on."""
