"""The network class of each configuration: a denoiser, a classifier, or CLIP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.families import Task
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.networks.clip import CLIP
from megadit.models.networks.dit import WHOLE_NETWORK, Chunk, DiT
from megadit.models.networks.unet import UNet
from megadit.models.networks.vit import ViT

Network = DiT | ViT | CLIP
SavedNetwork = Network | UNet
OF_TASK: dict[Task, type[Network]] = {"denoise": DiT, "classify": ViT, "match": CLIP}


def build_network(config: DiTConfig, part: Chunk = WHOLE_NETWORK) -> Network:
    """The network, or one model chunk of it."""
    return OF_TASK[config.task](config, part)


OF_CONFIG: dict[type, Callable[[Any], SavedNetwork]] = {DiTConfig: build_network, UNetConfig: UNet}
"""Configuration class -> function that builds its network."""


def build_without_memory(config: NetworkConfig) -> SavedNetwork:
    """The whole network on the meta device: shapes without memory."""
    with torch.device("meta"):
        return OF_CONFIG[type(config)](config)


def towers(network: nn.Module) -> tuple[nn.Module, ...]:
    """The network's stacks of blocks, each with its own tokens: two of a CLIP, else one."""
    return getattr(network, "towers", (network,))


def in_tower(name: str) -> str:
    """The name of a parameter within its tower, for networks with two; else unchanged."""
    return name.removeprefix("image_tower.").removeprefix("text_tower.")
