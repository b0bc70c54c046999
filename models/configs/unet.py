"""The shape of Stable Diffusion's U-Net (arXiv 2112.10752; XL: 2307.01952), as settings of diffusers' class.

Missing settings of a checkpoint have diffusers' defaults.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from megadit.models.configs.families import CONDITIONING_MODES, BetasName, ConditioningMode, ParameterizationName, Task
from megadit.models.shared.errors import UserError, choose_one, nearest_multiples

Prediction = Literal["noise", "velocity"]
DIFFUSERS_CLASS = "UNet2DConditionModel"
USUAL: dict[str, Any] = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "dropout": 0.0,
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "cross_attention_dim": 1280,
    "transformer_layers_per_block": 1,
    "attention_head_dim": 8,
    "num_attention_heads": None,
    "use_linear_projection": False,
    "upcast_attention": False,
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
}
"""Settings in which Stable Diffusion's networks differ, with diffusers' defaults (`sample_size` has none here)."""
FIXED: dict[str, Any] = {
    "act_fn": "silu",
    "addition_embed_type_num_heads": 64,
    "attention_type": "default",
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_norm": None,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_only_cross_attention": None,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "num_class_embeds": None,
    "only_cross_attention": False,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "reverse_transformer_layers_per_block": None,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
}
"""Settings with one value in all supported networks: other values belong to networks with other inputs (upscalers,
distilled ones)."""
_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
_COUNTS = ("layers_per_block", "transformer_layers_per_block")
_MOST_LEVELS, _MOST_LAYERS, _LARGEST = 8, 64, 1 << 16
NUM_SIZES = 6
"""Number of XL's size conditions: original height and width, top and left of the crop, target height and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetConfig:
    """Configuration of a `UNet`; saved next to its weights.

    Raises:
        UserError: for settings that no Stable Diffusion network has, and for sizes that are too large.
    """

    settings: Mapping[str, Any]
    """Value of each setting in `USUAL`."""
    prediction: Prediction
    """Target of the network: the noise (1.x, XL), or the velocity (2.x at 768 pixels)."""
    pixels_per_latent: int
    """Pixels per latent along a side; XL is conditioned on sizes in pixels."""

    family: ClassVar[str] = "stable_diffusion"
    sigma_data: ClassVar[float] = 1.0
    """1, by the scaling factor of the autoencoder."""
    betas: ClassVar[BetasName] = "stable_diffusion"
    patch_temporal: ClassVar[int] = 1
    learned_positions: ClassVar[None] = None
    """Convolutions take any size."""
    most_latent_frames: ClassVar[int] = 1
    """1: the network makes images."""
    samples_first: ClassVar[bool] = True
    has_text: ClassVar[bool] = True
    task: ClassVar[Task] = "denoise"
    conditioning: ClassVar[ConditioningMode] = CONDITIONING_MODES["tokens"]
    conditioning_sigma: ClassVar[None] = None
    """None: the network was trained without conditioning latents."""
    conditioning_noise: ClassVar[float] = 0.0
    conditioning_scaled_as: ClassVar[float] = 0.0
    guidance_embedding_range: ClassVar[None] = None
    """None: guidance takes two function evaluations."""
    image_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        choose_one(self.prediction, get_args(Prediction), f"model.prediction={self.prediction!r} is unknown")
        if differing := self.settings.keys() ^ USUAL.keys():
            raise UserError(f"a {DIFFUSERS_CLASS} has other settings: {', '.join(sorted(differing))}")
        self._check_sizes()
        settings = self.settings
        if settings["in_channels"] != settings["out_channels"]:
            raise UserError(
                f"a {DIFFUSERS_CLASS} with in_channels={settings['in_channels']} reads more than noisy latents "
                f"(out_channels={settings['out_channels']!r:.40}; inpainting, editing), which is not supported: "
                "use a text-to-image network"
            )
        embed_type, width = settings["addition_embed_type"], settings["addition_time_embed_dim"]
        if embed_type not in (None, "text_time") or (embed_type and (self.pooled_size or 0) < 1):
            raise UserError(
                f"a {DIFFUSERS_CLASS} with addition_embed_type={embed_type}, addition_time_embed_dim={width} is not "
                f"conditioned on {NUM_SIZES} sizes as Stable Diffusion XL is (its refiner is not supported)"
            )

    def _check_sizes(self) -> None:
        settings = self.settings
        blocks = (*_sequence(settings["down_block_types"]), *_sequence(settings["up_block_types"]))
        levels = len(_sequence(settings["block_out_channels"]))
        if not 1 <= levels <= _MOST_LEVELS or len(blocks) != 2 * levels:
            raise UserError(f"a {DIFFUSERS_CLASS} of {levels} levels and {len(blocks)} blocks is not supported")
        for block in blocks:
            choose_one(block, _BLOCKS, f"a {DIFFUSERS_CLASS} with blocks {block!r} is not supported")
        for name, value in [("pixels_per_latent", self.pixels_per_latent), *settings.items()]:
            most = _MOST_LAYERS if name in _COUNTS else _LARGEST
            if any(not 0 <= number <= most for number in _numbers(value)):
                raise UserError(f"a {DIFFUSERS_CLASS} with {name}={value!r:.60} is too large")
        for name in ("in_channels", "cross_attention_dim", "sample_size"):
            if not isinstance(settings[name], int):
                raise UserError(
                    f"a {DIFFUSERS_CLASS} with {name}={settings[name]!r:.60} is not supported: it must be one number"
                )

    def __hash__(self) -> int:
        settings = tuple((name, self.settings[name]) for name in sorted(self.settings))
        return hash((settings, self.prediction, self.pixels_per_latent))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels at each level, from the finest to the coarsest; each level halves the sides."""
        return tuple(self.settings["block_out_channels"])

    @property
    def in_channels(self) -> int:
        return self.settings["in_channels"]

    @property
    def crossattn_emb_size(self) -> int:
        return self.settings["cross_attention_dim"]

    @property
    def pooled_size(self) -> int | None:
        if self.settings["addition_embed_type"] is None:
            return None
        of_sizes = NUM_SIZES * (self.settings["addition_time_embed_dim"] or 0)
        return (self.settings["projection_class_embeddings_input_dim"] or 0) - of_sizes

    @property
    def parameterization(self) -> ParameterizationName:
        return "vp" if self.prediction == "noise" else "vp_velocity"

    @property
    def patch_spatial(self) -> int:
        """Each level but the last halves the sides."""
        return 2 ** (len(self.widths) - 1)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of the conditioning inputs: text, and XL's pooled text feature."""
        return ("text",) if self.pooled_size is None else ("text", "pooled")

    @property
    def outline(self) -> str:
        return f"a U-Net of {len(self.widths)} levels, {self.widths[0]} to {self.widths[-1]} wide"

    def token_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Grid of the coarsest level.

        Raises:
            UserError: for more than one frame, and for sides that cannot be halved at every level.
        """
        if frames != 1:
            raise UserError("Stable Diffusion makes images, not videos: num_frames must be 1")
        for name, size in (("height", height), ("width", width)):
            if size < 1 or size % self.patch_spatial:
                choices = nearest_multiples(size, self.patch_spatial)
                raise UserError(f"latent {name} {size} is not a multiple of {self.patch_spatial}; use {choices}")
        return 1, height // self.patch_spatial, width // self.patch_spatial

    def num_tokens(self, frames: int, height: int, width: int) -> int:
        """Number of latent pixels, which the finest level computes."""
        self.token_grid(frames, height, width)
        return height * width

    def sample_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Same as `token_grid`."""
        return self.token_grid(frames, height, width)

    def check_grid(self, grid: tuple[int, int, int]) -> None:
        """Does nothing: any size is supported."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "UNetConfig":
        """The inverse of `to_dict`.

        Raises:
            UserError: for a key this version does not know, or a value of another type.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.keys() != names or not isinstance(values["settings"], dict):
            raise UserError(f"model settings {values!r:.60} are not {', '.join(sorted(names))}")
        settings = {name: _as_tuple(value) for name, value in values["settings"].items()}
        return cls(**{**values, "settings": settings})


def _as_tuple(value: Any) -> Any:
    """Convert lists in a JSON value to tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _sequence(value: Any) -> tuple:
    if not isinstance(value, tuple | list):
        raise UserError(f"a {DIFFUSERS_CLASS} with {value!r:.60} in place of a list is not supported")
    return tuple(value)


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a value."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
