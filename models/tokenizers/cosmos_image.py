"""The network of the Cosmos image tokenizers CI8x8 and CI16x16 (arXiv 2501.03575, section 4), which diffusers lacks.

Modules have the names of the released tensors. Shapes: B batch, C channels, H/W height, width.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

_NORM_GROUPS = 32
_NORM_EPSILON = 1e-6


class CosmosImageNetwork(nn.Module):
    """Haar wavelets of patches, then a convolutional autoencoder; its bottleneck is plain, without a variance."""

    def __init__(
        self,
        *,
        widths: list[int],
        first_width: int,
        num_layers: int,
        num_halvings: int,
        patch_size: int,
        z_channels: int,
        latent_channels: int,
    ) -> None:
        """`widths` are those of the levels, from the finest; the first `num_halvings` of them halve the sides, each
        after `num_layers` blocks."""
        super().__init__()
        patch_dim = 3 * patch_size**2
        self.num_wavelets = patch_size.bit_length() - 1
        self.encoder = _Encoder([first_width, *widths], patch_dim, num_layers, num_halvings, z_channels)
        self.decoder = _Decoder(widths, patch_dim, num_layers, num_halvings, z_channels)
        self.quant_conv = nn.Conv2d(z_channels, latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, z_channels, 1)

    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Latents, BCHW."""
        for _ in range(self.num_wavelets):
            x_BCHW = to_wavelets(x_BCHW)
        return self.quant_conv(self.encoder(x_BCHW))

    def decode(self, z_BCHW: Tensor) -> Tensor:
        """Images, BCHW."""
        x_BCHW = self.decoder(self.post_quant_conv(z_BCHW))
        for _ in range(self.num_wavelets):
            x_BCHW = from_wavelets(x_BCHW)
        return x_BCHW


def to_wavelets(x_BCHW: Tensor) -> Tensor:
    """Mean, vertical, horizontal and diagonal difference of each 2x2 pixels: BCHW -> [B, 4 C, H / 2, W / 2].

    a b     (a + b + c + d) / 4    (a + b - c - d) / 4
    c d     (a - b + c - d) / 4    (a - b - c + d) / 4
    """
    a, b, c, d = rearrange(x_BCHW, "B C (H i) (W j) -> (i j) B C H W", i=2, j=2).unbind()
    return torch.cat([a + b + c + d, a + b - c - d, a - b + c - d, a - b - c + d], dim=1) / 4


def from_wavelets(x_BCHW: Tensor) -> Tensor:
    """The inverse of `to_wavelets`: [B, 4 C, H, W] -> [B, C, 2 H, 2 W]."""
    mean, vertical, horizontal, diagonal = x_BCHW.chunk(4, dim=1)
    a, b = mean + vertical + horizontal + diagonal, mean + vertical - horizontal - diagonal
    c, d = mean - vertical + horizontal - diagonal, mean - vertical - horizontal + diagonal
    return rearrange(torch.stack([a, b, c, d]), "(i j) B C H W -> B C (H i) (W j)", i=2, j=2)


class _Encoder(nn.Module):
    def __init__(self, widths: list[int], patch_dim: int, num_layers: int, num_halvings: int, z_channels: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(patch_dim, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            _Level(before, after, num_layers, "downsample" if level < num_halvings else None)
            for level, (before, after) in enumerate(zip(widths, widths[1:], strict=False))
        )
        self.mid = _Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], z_channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.conv_in(x_BCHW)
        for level in self.down:
            x_BCHW = level(x_BCHW)
        return self.conv_out(F.silu(self.norm_out(self.mid(x_BCHW))))


class _Decoder(nn.Module):
    """Levels are numbered as in the encoder, and run from the last to the first."""

    def __init__(self, widths: list[int], patch_dim: int, num_layers: int, num_halvings: int, z_channels: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(z_channels, widths[-1], 3, padding=1)
        self.mid = _Middle(widths[-1])
        befores = [*widths[1:], widths[-1]]
        first_doubling = len(widths) - num_halvings
        self.up = nn.ModuleList(
            _Level(before, after, num_layers + 1, "upsample" if level >= first_doubling else None)
            for level, (before, after) in enumerate(zip(befores, widths, strict=True))
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], patch_dim, 3, padding=1)

    def forward(self, z_BCHW: Tensor) -> Tensor:
        x_BCHW = self.mid(self.conv_in(z_BCHW))
        for level in reversed(self.up):
            x_BCHW = level(x_BCHW)
        return self.conv_out(F.silu(self.norm_out(x_BCHW)))


class _Level(nn.Module):
    """Residual blocks, then resampling by a factor of 2."""

    def __init__(self, before: int, after: int, num_layers: int, resampling: str | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(_ResidualBlock(before if i == 0 else after, after) for i in range(num_layers))
        self.downsample = _Downsample(after) if resampling == "downsample" else None
        self.upsample = _Upsample(after) if resampling == "upsample" else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for block in self.block:
            x_BCHW = block(x_BCHW)
        for resample in (self.downsample, self.upsample):
            x_BCHW = x_BCHW if resample is None else resample(x_BCHW)
        return x_BCHW


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1 = _ResidualBlock(width, width)
        self.attn_1 = _Attention(width)
        self.block_2 = _ResidualBlock(width, width)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x_BCHW)))


class _ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = _norm(after), nn.Conv2d(after, after, 3, padding=1)
        self.nin_shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h_BCHW = self.conv1(F.silu(self.norm1(x_BCHW)))
        return self.nin_shortcut(x_BCHW) + self.conv2(F.silu(self.norm2(h_BCHW)))


class _Attention(nn.Module):
    """Every pixel attends to all others, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        normed = self.norm(x_BCHW)
        q, k, v = (rearrange(one(normed), "B C H W -> B 1 (H W) C") for one in (self.q, self.k, self.v))
        out = rearrange(F.scaled_dot_product_attention(q, k, v), "B 1 (H W) C -> B C H W", H=x_BCHW.shape[2])
        return x_BCHW + self.proj_out(out)


class _Downsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.conv(F.pad(x_BCHW, (0, 1, 0, 1)))


class _Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.conv(x_BCHW.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_NORM_GROUPS, width, eps=_NORM_EPSILON)
