"""From latents to tokens and back, and what tells a token where and when it is.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, S video tokens, P patch dim (pt*ph*pw*C),
D width, N heads, K head dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from megadit.models.config import DiTConfig


def patchify(x_BCTHW: Tensor, config: DiTConfig) -> Tensor:
    """Cuts latents into tokens: BCTHW -> [S, B, P], tokens in (t, h, w) order, each (pt ph pw c)."""
    return rearrange(
        x_BCTHW,
        "B C (T pt) (H ph) (W pw) -> (T H W) B (pt ph pw C)",
        pt=config.patch_temporal,
        ph=config.patch_spatial,
        pw=config.patch_spatial,
    )


def unpatchify(x_SBP: Tensor, grid: tuple[int, int, int], config: DiTConfig) -> Tensor:
    """The inverse of `patchify`; `grid` counts tokens along time, height and width."""
    frames, height, width = grid
    return rearrange(
        x_SBP,
        "(T H W) B (pt ph pw C) -> B C (T pt) (H ph) (W pw)",
        T=frames,
        H=height,
        W=width,
        pt=config.patch_temporal,
        ph=config.patch_spatial,
        pw=config.patch_spatial,
    )


class ScalarEmbedder(nn.Module):
    """A number as a vector: sinusoids of `scale * value` (arXiv 1706.03762, section 3.5), then a two-layer MLP.

    `scale` sets the finest change that the sinusoids tell apart.
    """

    def __init__(
        self, hidden_size: int, linear: Callable[[int, int], nn.Module], *, scale: float, num_frequencies: int = 128
    ) -> None:
        super().__init__()
        self.scale = scale
        self.num_frequencies = num_frequencies
        self.linear_1 = linear(2 * num_frequencies, hidden_size)
        self.linear_2 = linear(hidden_size, hidden_size)

    def forward(self, value_B: Tensor, dtype: torch.dtype) -> Tensor:
        """[B] float32 -> [B, D]."""
        exponent = torch.arange(self.num_frequencies, device=value_B.device, dtype=torch.float32)
        frequency = torch.exp(-math.log(10000.0) / self.num_frequencies * exponent)
        angle = self.scale * value_B.float()[:, None] * frequency
        sinusoids = torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)
        return self.linear_2(torch.nn.functional.silu(self.linear_1(sinusoids)))


class Rotary(NamedTuple):
    """Cosines and sines of each token's rotation angles, [S, 1, 1, K/2] each."""

    cos: Tensor
    sin: Tensor


def rotary_table(position_S3: Tensor, config: DiTConfig, dtype: torch.dtype) -> Rotary:
    """3D rotary position embedding (arXiv 2104.09864, one share of the head per axis).

    Height and width take floor(K/6) pairs of channels each, time the rest. Angles are computed in float32 from the
    positions themselves, so that no grid is too large and no two positions share an entry.
    """
    num_pairs = config.dim_per_head // 2
    num_spatial = config.dim_per_head // 6
    angles = []
    for axis, pairs in enumerate((num_pairs - 2 * num_spatial, num_spatial, num_spatial)):
        exponent = torch.arange(pairs, device=position_S3.device, dtype=torch.float32) / pairs
        frequency = torch.exp(-math.log(config.rope_theta) * exponent)
        angles.append(position_S3[:, axis, None].float() * frequency)
    angle = torch.cat(angles, dim=-1)[:, None, None]
    return Rotary(angle.cos().to(dtype), angle.sin().to(dtype))


def sincos_table(position_S3: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Fixed sines and cosines of each token's (t, h, w), [S, 1, D]: a quarter of D for time, the rest for space.

    Channels that do not divide evenly stay zero.
    """
    per_axis = (width // 8, 3 * width // 16, 3 * width // 16)
    parts = []
    for axis, pairs in enumerate(per_axis):
        exponent = torch.arange(pairs, device=position_S3.device, dtype=torch.float32) / max(pairs, 1)
        angle = position_S3[:, axis, None].float() * torch.exp(-math.log(10000.0) * exponent)
        parts += [angle.sin(), angle.cos()]
    table_SD = torch.cat(parts, dim=-1)
    return nn.functional.pad(table_SD, (0, width - table_SD.shape[-1]))[:, None].to(dtype)
