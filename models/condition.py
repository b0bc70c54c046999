"""From noise level, frame rate and class to the vector that modulates every block.

Shapes: G rows of conditioning (segments of a pack, or the batch), D width, M width of the shared modulation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.config import DiTConfig
from megadit.models.embeddings import ScalarEmbedder, Sinusoids
from megadit.models.layers import LayerKit

FPS_WIDTH = 256
"""Width of NeMo's embedding of the frame rate, before zeros are added."""
CLASS_BASE = 256
"""A class travels where text does, as one token: the two digits of its index in this base, which every
floating-point type in use holds exactly."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    eps = 1e-6

    def __init__(self, width: int, layers: LayerKit) -> None:
        super().__init__()
        self.weight = layers.replicated_parameter(torch.ones(width))

    def forward(self, x_GD: Tensor) -> Tensor:
        normed = x_GD.float() * torch.rsqrt(x_GD.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x_GD.dtype) * self.weight


class NormalizedSinusoids(nn.Module):
    """The sinusoids themselves, normalised."""

    def __init__(self, sinusoids: Sinusoids, layers: LayerKit) -> None:
        super().__init__()
        self.sinusoids = sinusoids
        self.layernorm = RMSNorm(sinusoids.width, layers)

    def forward(self, value_G: Tensor, dtype: torch.dtype) -> Tensor:
        return self.layernorm(self.sinusoids(value_G, dtype))


class ClassEmbedder(nn.Module):
    """One learned vector for each class, and one for none (arXiv 2212.09748, section 3.2)."""

    def __init__(self, num_classes: int, hidden_size: int, layers: LayerKit) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weight = layers.replicated_parameter(torch.zeros(num_classes + 1, hidden_size))

    def forward(self, digits_G2: Tensor, is_null_G: Tensor) -> Tensor:
        high, low = digits_G2.float().round().long().unbind(-1)
        index_G = (CLASS_BASE * high + low).clamp(0, self.num_classes - 1)
        return F.embedding(index_G.masked_fill(is_null_G, self.num_classes), self.weight)


def class_digits(index: int) -> tuple[float, float]:
    """A class index as `ClassEmbedder` reads it."""
    return float(index // CLASS_BASE), float(index % CLASS_BASE)


def sigma_sinusoids(config: DiTConfig) -> Sinusoids:
    return Sinusoids(
        num_frequencies=config.structure.sigma_frequencies or config.hidden_size // 2,
        scale=config.structure.sigma_scale,
        shift=config.frequency_shift,
        cos_first=config.structure.cos_first,
    )


def sigma_embedder(config: DiTConfig, layers: LayerKit) -> nn.Module:
    if config.structure.shared_modulation:
        return NormalizedSinusoids(sigma_sinusoids(config), layers)
    return ScalarEmbedder(sigma_sinusoids(config), config.hidden_size, layers)


def shared_embedder(config: DiTConfig, layers: LayerKit) -> nn.Module | None:
    if not config.structure.shared_modulation:
        return None
    width = config.hidden_size
    return ScalarEmbedder(sigma_sinusoids(config), width, layers, out_width=3 * width, bias=False)


def fps_embedder(config: DiTConfig, layers: LayerKit) -> nn.Module | None:
    match config.structure.fps:
        case "embedded":
            return ScalarEmbedder(Sinusoids(), config.hidden_size, layers)
        case "padded":
            return ScalarEmbedder(Sinusoids(shift=1.0), FPS_WIDTH, layers)
        case _:
            return None
