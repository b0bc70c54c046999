"""Published autoencoders as tokenizers: encoding, scaling, tiling and saving, the same for every network.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megadit.models.machine import auto_dtype, computing_dtype
from megadit.models.shared.errors import choose_one
from megadit.models.storage import components as parts
from megadit.models.tokenizers import network as networks
from megadit.models.tokenizers.base import frames_covering, latent_size
from megadit.models.tokenizers.kinds import KINDS, Kind
from megadit.models.tokenizers.network import DTYPES, Network
from megadit.models.tokenizers.tiling import Tiles, decode_in_tiles, encode_in_tiles


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Autoencoder:
    """Latents are sigma_data (z - mean) / std of the posterior's mean z, with the checkpoint's mean and std.

    Causal: a latent frame depends on no later frame, and an image is a video of one frame.
    """

    kind: Kind
    network: Network
    sigma_data: float
    dtype: str = "auto"
    """Dtype in which the network computes: float32, or bfloat16 where the device multiplies it; auto: the stored dtype
    on a GPU, else float32."""
    tiles: Tiles = field(default_factory=Tiles)

    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choose_one(self.dtype, ("auto", *DTYPES), f"dtype={self.dtype!r} is unknown")

    @property
    def latent_channels(self) -> int:
        return self.kind.latent_channels(self.network.config)

    @property
    def temporal_compression(self) -> int:
        return self.kind.temporal_compression(self.network.config)

    @property
    def spatial_compression(self) -> int:
        return self.kind.spatial_compression(self.network.config)

    @property
    def streams(self) -> bool:
        """Whether the network processes one latent frame after the other by itself."""
        return self.kind.streams

    @property
    def _tiles(self) -> Tiles:
        """Tiles; only in space if the network itself streams through time."""
        return replace(self.tiles, frames=2**30, context=1) if self.streams else self.tiles

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of such a video.

        Raises:
            UserError: for a size that cannot be encoded; suggests the nearest sizes.
        """
        factors = {"temporal": self.temporal_compression, "spatial": self.spatial_compression}
        return self.latent_channels, *latent_size(frames, height, width, **factors)

    def frames_covering(self, frames: int) -> int:
        """The smallest number of frames, at least `frames`, that can be encoded."""
        return frames_covering(frames, self.temporal_compression)

    @torch.no_grad()
    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents (float32 BCTHW) of RGB video in [-1, 1].

        Raises:
            UserError: for sizes that cannot be encoded (see `latent_shape`).
        """
        self.latent_shape(*video_BCTHW.shape[2:])
        module, dtype = self._on(video_BCTHW.device)

        def encode(video: Tensor) -> Tensor:
            return self.kind.encode(module, video.to(dtype)).float()

        z_BCTHW = encode_in_tiles(encode, video_BCTHW, self._tiles, self.temporal_compression, self.spatial_compression)
        mean, std = self.kind.statistics(self.network.config, z_BCTHW)
        return self.sigma_data * (z_BCTHW - mean) / std

    @torch.no_grad()
    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """RGB video (float32 BCTHW, not clamped)."""
        module, dtype = self._on(latents_BCTHW.device)
        mean, std = self.kind.statistics(self.network.config, latents_BCTHW)
        z_BCTHW = latents_BCTHW.float() / self.sigma_data * std + mean

        def decode(z: Tensor) -> Tensor:
            return self.kind.decode(module, z.to(dtype)).float()

        return decode_in_tiles(decode, z_BCTHW, self._tiles, self.temporal_compression, self.spatial_compression)

    def _on(self, device: torch.device) -> tuple[nn.Module, torch.dtype]:
        """The network on a device, and its dtype there."""
        if self.dtype == "auto":  # float16 overflows in some published decoders; on a CPU torch cannot pool bfloat16
            is_wide = device.type == "cpu" or self.network.stored == torch.float16
            dtype = torch.float32 if is_wide else auto_dtype(device, self.network.stored)
        else:
            dtype = computing_dtype(device, DTYPES[self.dtype])
        return self.network.on(device, dtype), dtype

    def save(self, directory: str | os.PathLike) -> None:
        settings: dict[str, Any] = {"sigma_data": self.sigma_data, "dtype": self.dtype, "tiles": asdict(self.tiles)}
        config = {"type": self.kind.name, **settings, "network": dict(self.network.config)}
        parts.write_component(directory, config, self.network.tensors())

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Autoencoder":
        """The inverse of `save`.

        Raises:
            UserError: if files are missing or broken.
        """
        kind = KINDS[parts.component_type(directory, "tokenizer", KINDS)]
        settings = parts.read_settings(directory, ["sigma_data", "dtype", "tiles", "network"])
        where = f"the tensors of {os.path.join(directory, parts.TENSOR_FILE)}"
        network = Network.build(kind.class_name, settings.pop("network"), parts.read_tensors(directory), where)
        return cls(kind=kind, network=network, **{**settings, "tiles": Tiles(**settings["tiles"])})

    def fingerprint(self) -> str:
        settings = {"type": self.kind.name, "sigma_data": self.sigma_data, "network": dict(self.network.config)}
        return networks.fingerprint(settings, self.network)
