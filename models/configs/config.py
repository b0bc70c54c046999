"""The configuration of a network; `named.py` has published and named sizes."""

import dataclasses
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, Literal, get_args, get_origin

from megadit.models.configs.block import LARGEST, BlockConfig, ExpertConfig, check_sizes
from megadit.models.configs.families import (
    CONDITIONING_MODES,
    FAMILIES,
    BetasName,
    ConditioningMode,
    ConditioningModeName,
    Task,
)
from megadit.models.configs.rules import RULES
from megadit.models.shared.errors import UserError, choose_one, did_you_mean, enforce, nearest_multiples

MAY_BE_ZERO = ("frequency_shift", "conditioning_sigma")
PositionEmbedding = Literal["rope", "sincos", "learned"]
Parameterization = Literal["edm", "vp", "flow"]
MOST_WORDS = LARGEST
"""Maximum vocabulary size: a token id is stored as two digits of base 256 (`embeddings.class_digits`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTowerConfig:
    """The text tower of CLIP (arXiv 2103.00020, section 2.4), and the embedding width of both towers; disabled without
    `num_layers`. The defaults are those of ViT-B/32.
    """

    num_layers: int = 0
    hidden_size: int = 512
    num_attention_heads: int = 8
    ffn_hidden_size: int | None = None
    """Width of the MLP between its two linears; None means 4 x hidden_size."""
    num_words: int = 49_408
    """Vocabulary size."""
    max_length: int = 77
    """Maximum tokens of a text, its start and end tokens included."""
    embedding_size: int = 512
    """Width of the embeddings of both towers."""
    pairwise: bool = False
    """True: SigLIP's loss, pairwise sigmoids (arXiv 2303.15343) with a learned offset of scores; False: CLIP's loss, a
    softmax over the batch."""

    def __post_init__(self) -> None:
        check_sizes(self, "model.text_tower")
        if self.num_layers < 0:
            raise UserError(f"model.text_tower.num_layers={self.num_layers} must not be negative")
        for name in ("hidden_size", "num_attention_heads", "ffn_hidden_size", "num_words", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.text_tower.{name}={value} must be greater than 0")
        if self.embedding_size < 1:
            raise UserError(f"model.text_tower.embedding_size={self.embedding_size} must be greater than 0")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.text_tower.num_attention_heads={self.num_attention_heads} does not divide "
                f"model.text_tower.hidden_size={self.hidden_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig(BlockConfig):
    """Everything that decides the tensors of a `DiT`; saved next to its weights.

    Sizes count latent pixels unless they say otherwise. The defaults are DiT-S (arXiv 2212.09748, table 1) on the
    latents of the Cosmos 4x8x8 video tokenizer with text features of width 1024 (T5-11B).
    """

    num_layers: int = 12
    in_channels: int = 16
    """Channels of the latents, in and out."""
    patch_spatial: int = 2
    """Latent pixels along each side of a token."""
    patch_temporal: int = 1
    """Latent frames in a token."""
    position_embedding: PositionEmbedding = "rope"
    """`rope`: rotary, per axis; `sincos`: fixed and added once. Both are computed for any grid size. `learned`: only
    `learned_positions`."""
    rope_theta: float = 10000.0
    rope_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Extrapolation factors of rotary positions along time, height and width (NTK-aware, arXiv 2309.00071, section
    3.1); 1 changes nothing."""
    rope_interpolation: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Divisors of positions along time, height and width, so that more tokens than in pre-training span the same
    positions (position interpolation, arXiv 2306.15595, eq. 4); 1 changes nothing."""
    learned_positions: tuple[int, int, int] | None = None
    """Largest grid of tokens (time, height, width) of learned positions, which are added in every block: the sum of
    one vector for each axis, normalised where the family does so; None: no learned positions. A `vit` accepts only this
    grid: each position has its own vector, added once."""
    sigma_data: float = 0.5
    """Standard deviation of the latents that the network is trained on (arXiv 2206.00364, table 1)."""
    parameterization: Parameterization = "edm"
    """Parameterization: `edm`, sigma and F as in arXiv 2206.00364; `vp`, F predicts the noise of DDPM's schedule (arXiv
    2006.11239); `flow`, the velocity of rectified flow (arXiv 2209.03003)."""
    conditioning_sigma: float | None = None
    """Noise level of conditioning latents (first frames, a clip to edit, ...). None: the network was trained without
    them and accepts none."""
    conditioning_mode: ConditioningModeName = "tokens"
    """How the network reads conditioning latents; `families.py` lists the modes."""
    image_positions: int | None = None
    """Number of learned positions of image features, for several conditioning images at once; None: no positions."""
    guidance_embedding_range: tuple[float, float] | None = None
    """Range of guidance scales of a guidance-distilled network, which embeds the scale: one function evaluation
    replaces two (arXiv 2210.03142, section 3.2). None: not guidance-distilled."""
    num_classes: int | None = None
    """Number of classes, without the null class: of a class-conditional network (`dit`), or of a classifier (`vit`;
    without classes it returns features)."""
    learned_variance: bool = False
    """The network also predicts DDPM's variance (arXiv 2102.09672), which is saved with the weights and not used."""
    padding_mask_channel: bool = False
    """One extra input channel, 1 where a video is padding; zeros without a mask."""
    frequency_shift: float = 0.0
    """Shift of the noise level's n sinusoids: the last has period 10000^((n - 1) / (n - shift)); 1 in diffusers."""
    text_tower: TextTowerConfig = TextTowerConfig()
    """Configuration of the text tower (`clip`); none without layers."""

    betas: ClassVar[BetasName] = "ddpm"
    """DDPM noise schedule of the `vp` parameterization."""
    pooled_size: ClassVar[None] = None
    """None: the network reads no pooled text feature."""
    samples_first: ClassVar[bool] = False
    """False: layers compute [S, B, ...], with the sequence first."""

    def __post_init__(self) -> None:
        self._check_values()
        enforce(RULES, self)

    def _check_values(self) -> None:
        check_sizes(self, "model")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and field.name not in MAY_BE_ZERO and not value > 0:
                raise UserError(f"model.{field.name}={value} must be greater than 0")
            if isinstance(value, tuple) and not min(value) > 0:
                raise UserError(f"model.{field.name}={list(value)} must be greater than 0")
        kinds = {"parameterization": get_args(Parameterization), "position_embedding": get_args(PositionEmbedding)}
        for name, known in {"family": FAMILIES, **kinds}.items():
            choose_one(getattr(self, name), known, f"model.{name}={getattr(self, name)!r} is unknown")

    @property
    def most_latent_frames(self) -> int | None:
        """Maximum number of latent frames, from the learned positions; None: any."""
        return None if self.learned_positions is None else self.learned_positions[0] * self.patch_temporal

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of the conditioning inputs: text, frame rate and maybe guidance scale."""
        return ("text", "text_length", "fps", *("guidance",) * (self.guidance_embedding_range is not None))

    @property
    def has_text(self) -> bool:
        return self.structure.cross_attention or self.task == "match"

    @property
    def task(self) -> Task:
        return self.structure.task

    @property
    def denoises(self) -> bool:
        """Whether the network is a denoiser; others have a class token and a fixed grid."""
        return self.task == "denoise"

    @property
    def outline(self) -> str:
        return f"{self.num_layers} blocks of {self.hidden_size}"

    @property
    def patch_dim(self) -> int:
        """Elements of one token: pt * ph * pw * channels."""
        return self.patch_temporal * self.patch_spatial**2 * self.in_channels

    @property
    def conditioning(self) -> ConditioningMode:
        """How the network reads conditioning latents."""
        return CONDITIONING_MODES[self.conditioning_mode]

    @property
    def conditioning_noise(self) -> float:
        """Standard deviation of the noise added to conditioning latents."""
        return self.conditioning_sigma or 0.0 if self.conditioning.is_noised else 0.0

    @property
    def conditioning_scaled_as(self) -> float:
        """Noise level by which conditioning latents are scaled."""
        return self.conditioning_sigma or 0.0 if self.conditioning.is_scaled else 0.0

    @property
    def conditioning_channels(self) -> int:
        """Extra channels for conditioning: mask, and latents where they do not replace noisy ones."""
        return self.conditioning.marks + (0 if self.conditioning.is_among else self.in_channels)

    @property
    def conditioning_dim(self) -> int:
        """Elements that these channels add to a token."""
        return self.patch_temporal * self.patch_spatial**2 * self.conditioning_channels

    @property
    def mask_dim(self) -> int:
        """Elements that the padding mask adds to a token."""
        return self.patch_temporal * self.patch_spatial**2 if self.padding_mask_channel else 0

    @property
    def token_dim(self) -> int:
        """Elements of one input token: latents, conditioning channels, padding mask."""
        return self.patch_dim + self.conditioning_dim + self.mask_dim

    @property
    def sent_size(self) -> int:
        """Width of the activations between pipeline stages; with two towers, that of the wider one."""
        return max(self.hidden_size, self.text_tower.hidden_size) if self.task == "match" else self.hidden_size

    def token_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens along time, height and width of a latent of this size.

        Raises:
            UserError: if a side is not a multiple of the patch; suggests the nearest sizes.
        """
        sizes = {"frames": frames, "height": height, "width": width}
        patches = {"frames": self.patch_temporal, "height": self.patch_spatial, "width": self.patch_spatial}
        for name, size in sizes.items():
            patch = patches[name]
            if size < 1 or size % patch:
                choices = nearest_multiples(size, patch)
                raise UserError(f"latent {name} {size} is not a multiple of the patch size {patch}; use {choices}")
        return frames // self.patch_temporal, height // self.patch_spatial, width // self.patch_spatial

    def num_tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a latent of this size; raises as `token_grid`."""
        return prod(self.token_grid(frames, height, width))

    @property
    def position_grid(self) -> tuple[int, int, int] | None:
        """The largest grid with learned positions (None: any); with a class token, class token and patches in a row."""
        if self.denoises:
            return self.learned_positions
        return 1, 1, 1 + prod(self.learned_positions)

    def sample_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Grid of a sample in the sequence whose latent has this size.

        Raises:
            UserError: as `token_grid`; with a class token, for any grid but that of `learned_positions`.
        """
        grid = self.token_grid(frames, height, width)
        if self.denoises:
            return grid
        if grid != self.learned_positions:
            found, known = ("x".join(map(str, sides)) for sides in (grid, self.learned_positions))
            raise UserError(f"{found} tokens (time x height x width) do not match model.learned_positions, {known}")
        return self.position_grid

    def check_grid(self, grid: tuple[int, int, int]) -> None:
        """Raises UserError for more tokens along an axis than the network has learned positions for."""
        largest = self.position_grid
        if largest is not None and any(size > most for size, most in zip(grid, largest, strict=True)):
            raise UserError(
                f"{'x'.join(map(str, grid))} tokens (time x height x width) are more than the "
                f"{'x'.join(map(str, largest))} that the network has learned positions for; make the video smaller"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DiTConfig":
        """The inverse of `to_dict`.

        Raises:
            UserError: for a key this version does not know, or a value of another type.
        """
        sections = {"experts": ExpertConfig, "text_tower": TextTowerConfig}
        made = {name: kind(**_checked(values.get(name, {}), kind)) for name, kind in sections.items()}
        return cls(**_checked({**values, **made}, cls))


def _checked(values: Any, config_class: type) -> dict[str, Any]:
    """Settings from JSON, with lists as tuples, after a check of their names and types."""
    if not isinstance(values, dict):
        raise UserError(f"model settings are {values!r:.60}, not names and values")
    kinds = {field.name: field.type for field in fields(config_class)}
    checked = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in checked.items():
        if name not in kinds:
            hint = did_you_mean(name, kinds, "was it written by a newer version?")
            raise UserError(f"unknown model setting {name!r}{hint}")
        if not _is_of(kinds[name], value):
            raise UserError(f"model.{name}={value!r:.60} has another type than {kinds[name]}")
    return checked


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value has an annotated type; integers are valid floats."""
    match get_origin(kind):
        case None:
            allowed = {float: (float, int), None: type(None)}.get(kind, kind)
            return isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        case origin if origin is Literal:
            return value in get_args(kind)
        case origin if origin is tuple:
            kinds = get_args(kind)
            return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is_of, kinds, value))
    return any(_is_of(choice, value) for choice in get_args(kind))
