"""What a configuration stands for: a network that denoises, or one that judges."""

from megadit.models.config import DiTConfig
from megadit.models.dit import WHOLE_NETWORK, DiT, Part
from megadit.models.vit import ViT

Network = DiT | ViT


def build_network(config: DiTConfig, part: Part = WHOLE_NETWORK) -> Network:
    """The network, or one part of it."""
    return (ViT if config.classifies else DiT)(config, part)
