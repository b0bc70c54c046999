"""The common protocol of network configurations, for the rest of the package.

`DiTConfig` and `UNetConfig` implement it; `components.NETWORKS` and `registry.OF_CONFIG` have a row for each.
"""

from typing import Any, Protocol

from megadit.models.configs.families import BetasName, ConditioningMode, ParameterizationName, Task


class NetworkConfig(Protocol):
    """Everything that determines the tensors of a network and its inputs; sizes count latent pixels."""

    family: str
    in_channels: int
    """Channels of the latents, in and out."""
    crossattn_emb_size: int
    """Width of the text features."""
    pooled_size: int | None
    """Width of the pooled text feature; None: the network reads none."""
    sigma_data: float
    """Standard deviation of the latents that it was trained on."""
    parameterization: ParameterizationName
    """The parameterization (`parameterization.py`)."""
    betas: BetasName
    """The DDPM noise schedule, for parameterizations that have one."""
    patch_spatial: int
    """Divisor of height and width, in latent pixels."""
    patch_temporal: int
    """Divisor of the number of frames, in latent frames."""
    learned_positions: tuple[int, int, int] | None
    """The largest supported grid of tokens; None: any."""
    most_latent_frames: int | None
    """Maximum number of latent frames of a video; None: any number."""
    samples_first: bool
    """Whether layers compute [B, S, ...], with the batch first, not [S, B, ...]."""
    conditions: tuple[str, ...]
    """Names of the conditioning inputs, as in exported networks."""
    has_text: bool
    """Whether the network reads texts of any length; False: one token, a class."""
    task: Task
    """Task of the network."""
    conditioning: ConditioningMode
    conditioning_sigma: float | None
    """Noise level of conditioning latents; None: the network was trained without them and accepts none."""
    conditioning_noise: float
    conditioning_scaled_as: float
    guidance_embedding_range: tuple[float, float] | None
    """Guidance scales of a guidance-distilled network; None: guidance takes two function evaluations."""
    image_size: int | None
    """Width of the features of a conditioning image; None: the network reads none."""
    outline: str
    """The network's size in a few words."""

    def token_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Size (time, height, width) of the grid of tokens that a latent of this size becomes.

        Raises:
            UserError: for an unsupported size; suggests the nearest supported ones.
        """

    def num_tokens(self, frames: int, height: int, width: int) -> int:
        """Size of a sample in a batch: its tokens, or latent pixels for a U-Net. Raises as `token_grid`."""

    def sample_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Grid of a sample in the sequence; raises as `token_grid`."""

    def check_grid(self, grid: tuple[int, int, int]) -> None:
        """Raises UserError for more tokens along an axis than the network supports."""

    def to_dict(self) -> dict[str, Any]: ...

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "NetworkConfig":
        """The inverse of `to_dict`.

        Raises:
            UserError: for a key this version does not know, or a value of another type.
        """
