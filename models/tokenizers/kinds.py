"""Differences between published autoencoders: a table with a row for each kind.

| kind             | published as                                          | network                                  |
|------------------|-------------------------------------------------------|------------------------------------------|
| `cosmos`         | Cosmos tokenizers CV4x8x8, CV8x8x8 (arXiv 2501.03575) | diffusers' `AutoencoderKLCosmos`         |
| `cosmos_image`   | Cosmos tokenizers CI8x8, CI16x16                      | `CosmosImageNetwork`: frame by frame     |
| `autoencoder_kl` | Stable Diffusion's and other image ones               | diffusers' `AutoencoderKL`: likewise     |
| `wan`            | Wan 2.1's (4x8x8) and 2.2's (4x16x16), Predict2's     | diffusers' `AutoencoderKLWan`: streams   |

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from megadit.models.host_to_device import constant
from megadit.models.shared.errors import UserError

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The properties of one kind of autoencoder."""

    name: str
    class_name: str
    """Class name of the network, in diffusers or here."""
    sigma_data: float
    """Standard deviation that latents are scaled to, as diffusion networks trained on them expect."""
    temporal_compression: Callable[[Config], int]
    spatial_compression: Callable[[Config], int]
    encode: Callable[[nn.Module, Tensor], Tensor]
    """Video (BCTHW) to the mean of its latents."""
    decode: Callable[[nn.Module, Tensor], Tensor]
    """Latents (BCTHW) to video."""
    statistics: Callable[[Config, Tensor], tuple[Tensor, Tensor]]
    """Mean and standard deviation of latents, in shapes that broadcast with latents."""
    latent_channels: Callable[[Config], int] = lambda config: config["latent_channels"]
    streams: bool = False
    """The network processes one latent frame after the other and caches what the next one needs: any length in the
    memory of a frame, without approximation. It cannot be exported as a graph of fixed size."""


def _of_each_frame(call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Apply a function of images to each frame of a video."""

    def of_video(module: nn.Module, x_BCTHW: Tensor) -> Tensor:
        images = call(module, rearrange(x_BCTHW, "B C T H W -> (B T) C H W"))
        return rearrange(images, "(B T) C H W -> B C T H W", B=x_BCTHW.shape[0])  # len would be a constant in export

    return of_video


def _posterior_mean(module: nn.Module, x: Tensor) -> Tensor:
    return module.encode(x, return_dict=False)[0].mode()


def _decoded(module: nn.Module, z: Tensor) -> Tensor:
    return module.decode(z, return_dict=False)[0]


def _no_statistics(config: Config, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=like_BCTHW.device), torch.ones((), device=like_BCTHW.device)


def _statistics_of_frames(config: Config, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel and latent frame, [1, C, T, 1, 1]; later frames use the last ones.

    Checkpoints without statistics (Cosmos 0.1) are only scaled, as in NeMo and DFM.
    """
    if config.get("latents_mean") is None:
        return _no_statistics(config, like_BCTHW)
    values = []
    for name in ("latents_mean", "latents_std"):
        table_CT = constant(tuple(config[name]), like_BCTHW.device).reshape(config["latent_channels"], -1)
        frame_T = torch.arange(like_BCTHW.shape[2], device=like_BCTHW.device).clamp(max=table_CT.shape[1] - 1)
        values.append(table_CT[:, frame_T][None, :, :, None, None])
    return values[0], values[1]


def _shift_and_scale(config: Config, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of all latents, or per channel, [1, C, 1, 1, 1], as far as a checkpoint has them."""
    shift, scale = config.get("shift_factor") or 0.0, config.get("scaling_factor") or 1.0
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        mean, std = _statistics_of_channels(config, like_BCTHW)
        return mean, std / scale
    return torch.full((), shift, device=like_BCTHW.device), torch.full((), 1 / scale, device=like_BCTHW.device)


def _wan_compression(config: Config, name: str, found: int) -> int:
    """Return `found`, the compression by the layers, after a check that the setting `name` matches it."""
    if config.get(name, found) != found:
        raise UserError(f"config.json of an AutoencoderKLWan: {name}={config[name]!r:.40}, but its layers make {found}")
    return found


def _wan_temporal(config: Config) -> int:
    return _wan_compression(config, "scale_factor_temporal", 2 ** sum(map(bool, config["temperal_downsample"])))


def _wan_spatial(config: Config) -> int:
    layers = 2 ** (len(config["dim_mult"]) - 1)
    return _wan_compression(config, "scale_factor_spatial", layers * (config.get("patch_size") or 1))


def _statistics_of_channels(config: Config, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, [1, C, 1, 1, 1]."""
    mean, std = (constant(tuple(config[name]), like_BCTHW.device) for name in ("latents_mean", "latents_std"))
    return mean.reshape(1, -1, 1, 1, 1), std.reshape(1, -1, 1, 1, 1)


_ALL = (
    Kind(
        name="cosmos",
        class_name="AutoencoderKLCosmos",
        sigma_data=0.5,
        temporal_compression=lambda config: config["temporal_compression_ratio"],
        spatial_compression=lambda config: config["spatial_compression_ratio"],
        encode=_posterior_mean,
        decode=_decoded,
        statistics=_statistics_of_frames,
    ),
    Kind(
        name="cosmos_image",
        class_name="CosmosImageNetwork",
        sigma_data=0.5,
        temporal_compression=lambda config: 1,
        spatial_compression=lambda config: config["patch_size"] * 2 ** config["num_halvings"],
        encode=_of_each_frame(lambda module, x: module.encode(x)),
        decode=_of_each_frame(lambda module, z: module.decode(z)),
        statistics=_no_statistics,
    ),
    Kind(
        name="autoencoder_kl",
        class_name="AutoencoderKL",
        sigma_data=1.0,
        temporal_compression=lambda config: 1,
        spatial_compression=lambda config: 2 ** (len(config["block_out_channels"]) - 1),
        encode=_of_each_frame(_posterior_mean),
        decode=_of_each_frame(_decoded),
        statistics=_shift_and_scale,
    ),
    Kind(
        name="wan",
        class_name="AutoencoderKLWan",
        sigma_data=1.0,
        temporal_compression=_wan_temporal,
        spatial_compression=_wan_spatial,
        encode=_posterior_mean,
        decode=_decoded,
        statistics=_statistics_of_channels,
        latent_channels=lambda config: config["z_dim"],
        streams=True,
    ),
)
KINDS = {kind.name: kind for kind in _ALL}
KIND_OF_CLASS = {kind.class_name: kind for kind in _ALL}
