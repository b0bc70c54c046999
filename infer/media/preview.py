"""Previews of latents without a decoder, by a linear map to RGB that is fitted to a tokenizer.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, R latent positions of all videos, p the values of
a position's k x k patch of RGB. Each position is shown as a patch, not only its mean colour, so that previews of a
linear tokenizer (Haar, PCA) are exact.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.tokenizers import VideoTokenizer

_SIDE = 8
"""Latent positions along each side of the videos that the map is fitted to."""
_LATENT_FRAMES = 3
_POSITIONS_PER_CHANNEL = 4
_MAX_DETAIL = 8
"""Pixels of a patch along each side, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearPreview:
    """patch = latents weight + bias, at every latent position."""

    weight_Cp: Tensor
    bias_p: Tensor
    detail: int
    """Pixels of a patch along each side."""

    def __call__(self, latents_BCTHW: Tensor) -> np.ndarray:
        """uint8 [B, T, H * detail, W * detail, 3]: one frame for each latent frame."""
        latents_BTHWC = rearrange(latents_BCTHW.detach().float().cpu(), "B C T H W -> B T H W C")
        rgb = latents_BTHWC @ self.weight_Cp + self.bias_p
        rgb = rearrange(rgb, "B T H W (k1 k2 c) -> B T (H k1) (W k2) c", k1=self.detail, k2=self.detail)
        return ((rgb + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()


def fit_preview(tokenizer: VideoTokenizer, device: torch.device | str = "cpu") -> LinearPreview:
    """Fits a preview by least squares from the latents of synthetic videos to their decoded frames, downscaled.

    The videos are colours that vary smoothly over space and time, plus finer texture. Ridge regression, with a fraction
    of the latents' variance, decides between maps that fit these videos equally well.
    """
    frames = tokenizer.frames_covering(1 + (_LATENT_FRAMES - 1) * tokenizer.temporal_compression)
    side = _SIDE * tokenizer.spatial_compression
    nearest_size = getattr(tokenizer, "nearest_size", lambda *size: size)  # an exported tokenizer
    size = nearest_size(frames, side, side)
    C, T, H, W = tokenizer.latent_shape(*size)
    detail = min(_MAX_DETAIL, tokenizer.spatial_compression)
    num_videos = math.ceil(_POSITIONS_PER_CHANNEL * C / (T * H * W))
    rows, patches = [], []
    for index in range(num_videos):
        video_1cTHW = _made_up_video(index, size)
        latents_1CTHW = tokenizer.encode(video_1cTHW.to(device)).float()
        small_1cTHW = _made_small(tokenizer.decode(latents_1CTHW).float().cpu(), (T, H * detail, W * detail))
        rows.append(rearrange(latents_1CTHW.cpu(), "1 C T H W -> (T H W) C"))
        pattern = "1 c T (H k1) (W k2) -> (T H W) (k1 k2 c)"
        patches.append(rearrange(small_1cTHW, pattern, k1=detail, k2=detail))
    weight_Cp, bias_p = _ridge(torch.cat(rows).double(), torch.cat(patches).double())
    return LinearPreview(weight_Cp, bias_p, detail)


def _made_up_video(index: int, size: tuple[int, int, int]) -> Tensor:
    """Synthetic video, float32 [1, 3, frames, height, width] in [-1, 1]; a function of the index."""

    def field(coarseness: int, amplitude: float, seed: int) -> Tensor:
        coarse = tuple(max(1, math.ceil(side / coarseness)) for side in size)
        noise = latent_noise(torch.tensor([seed_key(seed)]), (3, *coarse))
        return amplitude * F.interpolate(noise, size=size, mode="trilinear", align_corners=False)

    smooth = field(max(size), 0.5, 3 * index) + field(max(2, min(size) // 2), 0.5, 3 * index + 1)
    return (smooth + field(1, 0.1, 3 * index + 2)).clamp(-1, 1)


def _made_small(video_BcTHW: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Means over the pixels of each cell; a causal tokenizer's first latent frame covers one frame."""
    T, H, W = grid
    small = F.adaptive_avg_pool3d(video_BcTHW, (video_BcTHW.shape[2], H, W))
    if T == 1:
        return small.mean(2, keepdim=True)
    return torch.cat([small[:, :, :1], F.adaptive_avg_pool3d(small[:, :, 1:], (T - 1, H, W))], dim=2)


def _ridge(latents_RC: Tensor, patches_Rp: Tensor, strength: float = 1e-4) -> tuple[Tensor, Tensor]:
    """(weight_Cp, bias_p), float32."""
    mean_C, mean_p = latents_RC.mean(0), patches_Rp.mean(0)
    centred_RC = latents_RC - mean_C
    gram_CC = centred_RC.T @ centred_RC
    gram_CC += strength * gram_CC.diagonal().mean() * torch.eye(len(gram_CC), dtype=gram_CC.dtype)
    weight_Cp = torch.linalg.solve(gram_CC, centred_RC.T @ (patches_Rp - mean_p))
    return weight_Cp.float(), (mean_p - mean_C @ weight_Cp).float()
