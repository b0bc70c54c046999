"""The Cosmos video tokenizers (arXiv 2501.03575, section 4), by diffusers' `AutoencoderKLCosmos`.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.models import hub
from megadit.models.convert import cosmos_tokenizer as names
from megadit.models.support import UserError
from megadit.models.tokenizers import network as networks
from megadit.models.tokenizers.network import DTYPES, Network
from megadit.models.tokenizers.tiling import Tiles, decode_in_tiles, encode_in_tiles

CLASS = "AutoencoderKLCosmos"
SIGMA_DATA = 0.5
"""What every network trained on these latents was told: they are scaled to it where statistics are known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CosmosTokenizer:
    """Causal: a latent frame depends on no later frame, and an image is a video of one frame.

    z -> sigma_data (z - mean) / std with the statistics of the checkpoint, for each channel and latent frame (frames
    beyond the last that has statistics take its). Checkpoints without (Cosmos 0.1) only scale, as NeMo and DFM did.
    """

    network: Network
    sigma_data: float = SIGMA_DATA
    dtype: str = "float32"
    """In which the network computes: float32 or bfloat16."""
    tiles: Tiles = field(default_factory=Tiles)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def latent_channels(self) -> int:
        return self.network.config["latent_channels"]

    @property
    def temporal_compression(self) -> int:
        return self.network.config["temporal_compression_ratio"]

    @property
    def spatial_compression(self) -> int:
        return self.network.config["spatial_compression_ratio"]

    @property
    def causal(self) -> bool:
        return True

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of such a video.

        Raises:
            UserError: for a size that cannot be encoded; names the nearest sizes that can.
        """
        temporal, spatial = self.temporal_compression, self.spatial_compression
        networks.check_size(frames, height, width, temporal=temporal, spatial=spatial)
        return self.latent_channels, 1 + (frames - 1) // temporal, height // spatial, width // spatial

    def frames_covering(self, frames: int) -> int:
        """The smallest number of frames, at least `frames`, that can be encoded."""
        return networks.frames_covering(frames, self.temporal_compression)

    @torch.no_grad()
    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents (float32 BCTHW) of RGB video in [-1, 1].

        Raises:
            UserError: for sizes that cannot be encoded (see `latent_shape`).
        """
        self.latent_shape(*video_BCTHW.shape[2:])
        module, dtype = self.network.on(video_BCTHW.device, DTYPES[self.dtype]), DTYPES[self.dtype]

        def encode(video: Tensor) -> Tensor:
            return module.encode(video.to(dtype), return_dict=False)[0].mode().float()

        z_BCTHW = encode_in_tiles(encode, video_BCTHW, self.tiles, self.temporal_compression, self.spatial_compression)
        mean, std = self._statistics(z_BCTHW)
        return self.sigma_data * (z_BCTHW - mean) / std

    @torch.no_grad()
    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """RGB video (float32 BCTHW, not clamped)."""
        module, dtype = self.network.on(latents_BCTHW.device, DTYPES[self.dtype]), DTYPES[self.dtype]
        mean, std = self._statistics(latents_BCTHW)
        z_BCTHW = latents_BCTHW.float() / self.sigma_data * std + mean

        def decode(z: Tensor) -> Tensor:
            return module.decode(z.to(dtype), return_dict=False)[0].float()

        return decode_in_tiles(decode, z_BCTHW, self.tiles, self.temporal_compression, self.spatial_compression)

    def _statistics(self, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, [1, C, T, 1, 1] (or numbers that change nothing)."""
        config = self.network.config
        if config.get("latents_mean") is None:
            return torch.zeros((), device=like_BCTHW.device), torch.ones((), device=like_BCTHW.device)
        values = []
        for name in ("latents_mean", "latents_std"):
            table_CT = torch.tensor(config[name], device=like_BCTHW.device).reshape(self.latent_channels, -1)
            frame_T = torch.arange(like_BCTHW.shape[2], device=like_BCTHW.device).clamp(max=table_CT.shape[1] - 1)
            values.append(table_CT[:, frame_T][None, :, :, None, None])
        return values[0], values[1]

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, directory: str | os.PathLike) -> None:
        networks.save(directory, "cosmos", self._settings(), self.network)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "CosmosTokenizer":
        """The inverse of `save`.

        Raises:
            UserError: if files are missing or broken.
        """
        settings, network = networks.load(directory, CLASS, ["sigma_data", "dtype", "tiles"])
        return cls(network=network, **{**settings, "tiles": Tiles(**settings["tiles"])})

    @classmethod
    def from_published(cls, source: str | os.PathLike, *, compression: str = "") -> "CosmosTokenizer":
        """From a directory of diffusers, a released `autoencoder.jit` or its directory, or a model of the hub's cache.

        Nothing of a `.jit` is executed. `compression` (as in 4x8x8) is only needed where nothing else tells it.

        Raises:
            UserError: if it is none of these, or another network.
        """
        path = Path(source)
        if path.suffix != ".jit":
            path = hub.local_directory(str(source), "tokenizer", "config.json, or autoencoder.jit")
        if (path / "vae" / "config.json").is_file():
            path = path / "vae"
        if (path / "config.json").is_file():
            config, tensors = networks.read_diffusers(path, CLASS)
        else:
            config, tensors = names.read_released(path, compression)
        return cls(network=build_network(config, tensors, str(path)))

    def fingerprint(self) -> str:
        settings = {
            "type": "cosmos",
            "sigma_data": self.sigma_data,
            "network": dict(sorted(self.network.config.items())),
        }
        return networks.fingerprint(settings, self.network)

    def _settings(self) -> dict[str, Any]:
        return {"sigma_data": self.sigma_data, "dtype": self.dtype, "tiles": asdict(self.tiles)}


def build_network(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> Network:
    """The network with its settings complete, as diffusers knows them."""
    module = networks.empty_module(CLASS, config)
    complete = {name: value for name, value in module.config.items() if not name.startswith("_")}
    return Network.build(CLASS, complete, tensors, f"the tensors of {source}")
