"""Embeddings: latents to tokens and back; noise level, frame rate and class to vectors; positions.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, S video tokens, P patch dim (pt*ph*pw*C),
D width, E feature width, I image tokens, L text tokens, N heads, K head dim, G modulation rows (of a pack, or the
batch), n frequencies.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.attention import Rotary
from megadit.models.ops.fusion import fused
from megadit.models.ops.reference import Linear
from megadit.models.ops.registry import Op

FPS_WIDTH = 256
"""Width of NeMo's embedding of the frame rate, before padding with zeros."""
CLASS_BASE = 256
"""A class index is stored like text, as one token: two digits in this base, which every floating-point type in use
represents exactly."""


def patchify(x_BCTHW: Tensor, config: DiTConfig) -> Tensor:
    """Cuts latents into tokens: BCTHW -> [S, B, P], tokens in (t, h, w) order, each (pt ph pw c)."""
    return rearrange(
        x_BCTHW,
        "B C (T pt) (H ph) (W pw) -> (T H W) B (pt ph pw C)",
        pt=config.patch_temporal,
        ph=config.patch_spatial,
        pw=config.patch_spatial,
    )


def token_sequence(x_BCTHW: Tensor, config: DiTConfig) -> Tensor:
    """Samples as sequences, [S, B, P]: their patches, after an empty position for a class token where there is one."""
    tokens_SBP = patchify(x_BCTHW, config)
    return tokens_SBP if config.denoises else F.pad(tokens_SBP, (0, 0, 0, 0, 1, 0))


def unpatchify(x_SBP: Tensor, grid: tuple[int, int, int], config: DiTConfig) -> Tensor:
    """The inverse of `patchify`: BCTHW; `grid` counts tokens along time, height and width."""
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


@Op
def sinusoids(
    value_G: Tensor, num_frequencies: int, scale: float, shift: float, cos_first: bool, dtype: torch.dtype
) -> Tensor:
    """Sines, then cosines (`cos_first`: before them), of `scale * value` at frequencies 10000^(-i / (n - shift)), i < n
    (arXiv 1706.03762, 3.5): [G, 2 n], computed in float32."""
    exponent = torch.arange(num_frequencies, device=value_G.device, dtype=torch.float32)
    frequency = torch.exp(-math.log(10000.0) / (num_frequencies - shift) * exponent)
    angle = scale * value_G.float()[:, None] * frequency
    parts = [angle.cos(), angle.sin()] if cos_first else [angle.sin(), angle.cos()]
    return torch.cat(parts, dim=-1).to(dtype)


@sinusoids.variant("one_pass", suits=lambda value, *settings: not value.requires_grad)
def _one_pass(value_G: Tensor, *settings) -> Tensor:
    return fused(sinusoids.reference.compute, value_G, *settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinusoids:
    """Settings of the op `sinusoids`; `scale` sets the finest difference that they resolve."""

    num_frequencies: int = 128
    scale: float = 1.0
    shift: float = 0.0
    cos_first: bool = False

    @property
    def width(self) -> int:
        return 2 * self.num_frequencies

    def __call__(self, value_G: Tensor, dtype: torch.dtype) -> Tensor:
        """[G] float32 -> [G, width], computed in float32."""
        return sinusoids(value_G, self.num_frequencies, self.scale, self.shift, self.cos_first, dtype)


class ScalarEmbedder(nn.Module):
    """A number as a vector: its sinusoids, then a two-layer MLP with `width` and `out_width` outputs."""

    def __init__(
        self,
        sinusoids: Sinusoids,
        width: int,
        *,
        out_width: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.sinusoids = sinusoids
        self.linear_1 = Linear(sinusoids.width, width, bias=bias)
        self.linear_2 = Linear(width, out_width or width, bias=bias)

    def forward(self, value_G: Tensor, dtype: torch.dtype) -> Tensor:
        """[G] float32 -> [G, out_width]."""
        return self.linear_2(F.silu(self.linear_1(self.sinusoids(value_G, dtype))))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    eps = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_GD: Tensor) -> Tensor:
        """Normed vectors, [G, D]."""
        normed = x_GD.float() * torch.rsqrt(x_GD.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x_GD.dtype) * self.weight


class TextMLP(nn.Module):
    """Text features in the network's width: two linears around GELU in its tanh form."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.linear_1 = Linear(config.crossattn_emb_size, config.hidden_size)
        self.linear_2 = Linear(config.hidden_size, config.hidden_size)

    def forward(self, text_LBE: Tensor) -> Tensor:
        """[L, B, E] -> [L, B, D]."""
        return self.linear_2(F.gelu(self.linear_1(text_LBE), approximate="tanh"))


class ImageMLP(nn.Module):
    """Image features in the network's width: two linears around GELU, normalised before and after (Wan 2.1)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.image_size)
        self.linear_1 = Linear(config.image_size, config.image_size)
        self.linear_2 = Linear(config.image_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size)
        self.positions = None
        if config.image_positions is not None:
            self.positions = nn.Parameter(torch.zeros(config.image_positions, config.image_size))

    def forward(self, image_IBE: Tensor) -> Tensor:
        """[I, B, E] -> [I, B, D]."""
        if self.positions is not None:
            image_IBE = image_IBE + self.positions[:, None]
        return self.layernorm(self.linear_2(F.gelu(self.linear_1(self.input_layernorm(image_IBE)))))


class NormalizedSinusoids(nn.Module):
    """The sinusoids themselves, normalised."""

    def __init__(self, sinusoids: Sinusoids) -> None:
        super().__init__()
        self.sinusoids = sinusoids
        self.layernorm = RMSNorm(sinusoids.width)

    def forward(self, value_G: Tensor, dtype: torch.dtype) -> Tensor:
        """[G] -> [G, D]."""
        return self.layernorm(self.sinusoids(value_G, dtype))


class ClassEmbedder(nn.Module):
    """One learned vector for each class, and one for none (arXiv 2212.09748, section 3.2)."""

    def __init__(self, num_classes: int, hidden_size: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weight = nn.Parameter(torch.zeros(num_classes + 1, hidden_size))

    def forward(self, digits_G2: Tensor, is_null_G: Tensor) -> Tensor:
        """Embeddings [G, D] of class labels, each stored as two digits."""
        index_G = class_index(digits_G2, self.num_classes)
        return F.embedding(index_G.masked_fill(is_null_G, self.num_classes), self.weight)


def class_digits(index: int) -> tuple[float, float]:
    """A class index as the two digits that `ClassEmbedder` reads."""
    return float(index // CLASS_BASE), float(index % CLASS_BASE)


def class_index(digits_G2: Tensor, num_classes: int) -> Tensor:
    """The inverse of `class_digits` for labels [G, 2]: int64 [G], clamped to existing classes."""
    high, low = digits_G2.float().round().long().unbind(-1)
    return (CLASS_BASE * high + low).clamp(0, num_classes - 1)


def sigma_sinusoids(config: DiTConfig) -> Sinusoids:
    return Sinusoids(
        num_frequencies=config.structure.sigma_frequencies or config.hidden_size // 2,
        scale=config.structure.sigma_scale,
        shift=config.frequency_shift,
        cos_first=config.structure.cos_first,
    )


def sigma_embedder(config: DiTConfig) -> nn.Module:
    if config.structure.shared_modulation:
        return NormalizedSinusoids(sigma_sinusoids(config))
    return ScalarEmbedder(sigma_sinusoids(config), config.hidden_size)


def shared_embedder(config: DiTConfig) -> nn.Module | None:
    """Build the embedder of the noise level whose output every modulation adds; None in families without one."""
    if not config.structure.shared_modulation:
        return None
    width = config.hidden_size
    return ScalarEmbedder(sigma_sinusoids(config), width, out_width=3 * width, bias=False)


def fps_embedder(config: DiTConfig) -> nn.Module | None:
    match config.structure.fps:
        case "embedded":
            return ScalarEmbedder(Sinusoids(), config.hidden_size)
        case "padded":
            return ScalarEmbedder(Sinusoids(shift=1.0), FPS_WIDTH)
        case _:
            return None


def guidance_embedder(config: DiTConfig) -> nn.Module | None:
    """Build the embedder of the guidance scale; None unless the network is guidance-distilled."""
    return None if config.guidance_embedding_range is None else ScalarEmbedder(Sinusoids(), config.hidden_size)


class LearnedPositions(nn.Module):
    """One vector for each position along each axis; a token's embedding is their sum (MovieGen), scaled to unit mean
    square where `is_normalized` (Cosmos)."""

    eps = 1e-6

    def __init__(self, max_grid: tuple[int, int, int], hidden_size: int, is_normalized: bool) -> None:
        super().__init__()
        self.is_normalized = is_normalized
        self.time, self.height, self.width = (nn.Parameter(torch.zeros(size, hidden_size)) for size in max_grid)

    def forward(self, position_S3: Tensor) -> Tensor:
        """[S, 3] -> [S, 1, D]."""
        t, h, w = position_S3.unbind(-1)
        sum_SD = F.embedding(t, self.time) + F.embedding(h, self.height) + F.embedding(w, self.width)
        if not self.is_normalized:
            return sum_SD[:, None]
        rms_S1 = sum_SD.float().square().mean(-1, keepdim=True).sqrt()
        return (sum_SD / (rms_S1 + self.eps)).to(sum_SD.dtype)[:, None]


def rotary_table(
    position_S3: Tensor, config: DiTConfig, dtype: torch.dtype, time_scale: Tensor | None = None
) -> Rotary:
    """3D rotary position embedding (arXiv 2104.09864), with some channels of the head for each axis.

    Height and width take floor(K/6) pairs of channels each, time the rest. Angles are computed in float32 from the
    positions themselves, so that a grid may have any size and fractional times are exact. `time_scale` ([S or 1, B])
    multiplies the positions in time.
    """
    num_frequencies = config.dim_per_head // 2
    num_spatial = config.dim_per_head // 6
    t_SB, h_SB, w_SB = position_S3.float()[:, None].unbind(-1)
    positions = (t_SB if time_scale is None else t_SB * time_scale, h_SB, w_SB)
    shares = (num_frequencies - 2 * num_spatial, num_spatial, num_spatial)
    angles = []
    stretches = zip(config.rope_scale, config.rope_interpolation, strict=True)
    for position_SB, pairs, (scale, interpolation) in zip(positions, shares, stretches, strict=True):
        exponent = torch.arange(pairs, device=position_S3.device, dtype=torch.float32) / pairs
        # NTK-aware: the slowest frequency is divided by `scale`, the fastest is kept
        theta = config.rope_theta * scale ** (pairs / (pairs - 1)) if scale != 1 else config.rope_theta
        angle = position_SB[..., None] * torch.exp(-math.log(theta) * exponent)
        angles.append(angle / interpolation if interpolation != 1 else angle)
    width = max(angle.shape[1] for angle in angles)
    angle = torch.cat([angle.expand(-1, width, -1) for angle in angles], dim=-1)[:, :, None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return Rotary(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def sincos_table(position_S3: Tensor, config: DiTConfig, dtype: torch.dtype) -> Tensor:
    """Fixed sines and cosines of each token's (t, h, w), [S, 1, D]; the family decides the channels of each axis.

    MegaDiT and NeMo: a quarter of D for time, the rest for space. Channels that do not divide evenly stay zero.
    """
    axes = config.structure.sincos_axes
    total = sum(share for _, share in axes)
    parts = []
    for axis, share in axes:
        pairs = share * config.hidden_size // (2 * total)
        exponent = torch.arange(pairs, device=position_S3.device, dtype=torch.float32) / max(pairs, 1)
        angle = position_S3[:, axis, None].float() * torch.exp(-math.log(10000.0) * exponent)
        parts += [angle.sin(), angle.cos()]
    table_SD = torch.cat(parts, dim=-1)
    return F.pad(table_SD, (0, config.hidden_size - table_SD.shape[-1]))[:, None].to(dtype)
