"""Autoencoders of images, such as Stable Diffusion's, by diffusers' `AutoencoderKL`: each frame on its own.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from megadit.models import hub
from megadit.models.support import UserError
from megadit.models.tokenizers import network as networks
from megadit.models.tokenizers.network import DTYPES, Network
from megadit.models.tokenizers.tiling import Tiles, decode_in_tiles, encode_in_tiles

CLASS = "AutoencoderKL"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageAutoencoder:
    """Latents are the mean of the posterior, shifted and scaled as the checkpoint says, to about unit variance."""

    network: Network
    sigma_data: float = 1.0
    dtype: str = "float32"
    tiles: Tiles = field(default_factory=Tiles)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def latent_channels(self) -> int:
        return self.network.config["latent_channels"]

    @property
    def temporal_compression(self) -> int:
        return 1

    @property
    def spatial_compression(self) -> int:
        return 2 ** (len(self.network.config["block_out_channels"]) - 1)

    @property
    def causal(self) -> bool:
        return True

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of such a video.

        Raises:
            UserError: for a size that cannot be encoded; names the nearest sizes that can.
        """
        spatial = self.spatial_compression
        networks.check_size(frames, height, width, temporal=1, spatial=spatial)
        return self.latent_channels, frames, height // spatial, width // spatial

    def frames_covering(self, frames: int) -> int:
        return max(frames, 1)

    @torch.no_grad()
    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents (float32 BCTHW) of RGB video in [-1, 1].

        Raises:
            UserError: for sizes that cannot be encoded (see `latent_shape`).
        """
        self.latent_shape(*video_BCTHW.shape[2:])
        module, dtype = self.network.on(video_BCTHW.device, DTYPES[self.dtype]), DTYPES[self.dtype]

        def encode(video: Tensor) -> Tensor:
            frames = rearrange(video, "B C T H W -> (B T) C H W").to(dtype)
            z = module.encode(frames, return_dict=False)[0].mode().float()
            return rearrange(z, "(B T) C H W -> B C T H W", B=len(video))

        z_BCTHW = encode_in_tiles(encode, video_BCTHW, self.tiles, 1, self.spatial_compression)
        return self.sigma_data * self._scale * (z_BCTHW - self._shift)

    @torch.no_grad()
    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """RGB video (float32 BCTHW, not clamped)."""
        module, dtype = self.network.on(latents_BCTHW.device, DTYPES[self.dtype]), DTYPES[self.dtype]
        z_BCTHW = latents_BCTHW.float() / (self.sigma_data * self._scale) + self._shift

        def decode(z: Tensor) -> Tensor:
            frames = module.decode(rearrange(z, "B C T H W -> (B T) C H W").to(dtype), return_dict=False)[0].float()
            return rearrange(frames, "(B T) C H W -> B C T H W", B=len(z))

        return decode_in_tiles(decode, z_BCTHW, self.tiles, 1, self.spatial_compression)

    @property
    def _scale(self) -> float:
        return self.network.config.get("scaling_factor") or 1.0

    @property
    def _shift(self) -> float:
        return self.network.config.get("shift_factor") or 0.0

    def save(self, directory: str | os.PathLike) -> None:
        networks.save(directory, "autoencoder_kl", self._settings(), self.network)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "ImageAutoencoder":
        """The inverse of `save`.

        Raises:
            UserError: if files are missing or broken.
        """
        settings, network = networks.load(directory, CLASS, ["sigma_data", "dtype", "tiles"])
        return cls(network=network, **{**settings, "tiles": Tiles(**settings["tiles"])})

    @classmethod
    def from_published(cls, source: str | os.PathLike) -> "ImageAutoencoder":
        """From a directory of diffusers, or a model of the hub's cache.

        Raises:
            UserError: if it is neither, or another network.
        """
        path = hub.local_directory(str(source), "tokenizer", "config.json and diffusion_pytorch_model.safetensors")
        path = path / "vae" if (path / "vae" / "config.json").is_file() else Path(path)
        config, tensors = networks.read_diffusers(path, CLASS)
        complete = networks.empty_module(CLASS, config).config
        settings = {name: value for name, value in complete.items() if not name.startswith("_")}
        return cls(network=Network.build(CLASS, settings, tensors, f"the tensors of {path}"))

    def fingerprint(self) -> str:
        settings = {"type": "autoencoder_kl", "sigma_data": self.sigma_data, "network": dict(self.network.config)}
        return networks.fingerprint(settings, self.network)

    def _settings(self) -> dict[str, Any]:
        return {"sigma_data": self.sigma_data, "dtype": self.dtype, "tiles": asdict(self.tiles)}
