"""The shape of a video DiT, and the sizes that have names."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megadit.models.support import UserError, nearest

PositionEmbedding = Literal["rope", "sincos"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig:
    """Everything that decides the tensors of a `DiT`; saved beside its weights.

    Sizes count latent pixels unless they say otherwise. The defaults are DiT-S (arXiv 2212.09748, table 1) on the
    latents of the Cosmos 4x8x8 video tokenizer with text features 1024 wide (T5-11B).
    """

    num_layers: int = 12
    hidden_size: int = 384
    num_attention_heads: int = 6
    head_dim: int | None = None
    """Width of one attention head; None means hidden_size / num_attention_heads, which must then divide."""
    ffn_hidden_size: int | None = None
    """Width of the MLP between its two linears; None means 4 x hidden_size."""
    in_channels: int = 16
    """Channels of the latents, in and out."""
    patch_spatial: int = 2
    """Latent pixels along each side of a token."""
    patch_temporal: int = 1
    """Latent frames in a token."""
    crossattn_emb_size: int = 1024
    """Width of the text features; projected to hidden_size, never assumed equal to it."""
    position_embedding: PositionEmbedding = "rope"
    """`rope`: rotary, per axis; `sincos`: fixed and added once. Both are computed for the grid at hand, at any size."""
    rope_theta: float = 10000.0
    qk_layernorm: bool = True
    """RMS-normalise queries and keys per head (arXiv 2302.05442), which keeps attention logits bounded."""
    layernorm_epsilon: float = 1e-6
    sigma_data: float = 0.5
    """Standard deviation of the latents that the network is trained on (arXiv 2206.00364, table 1)."""

    def __post_init__(self) -> None:
        self._check_positive()
        if self.position_embedding not in get_args(PositionEmbedding):
            known = ", ".join(get_args(PositionEmbedding))
            raise UserError(f"model.position_embedding={self.position_embedding!r} is unknown; choose one of {known}")
        self._check_head_dim()

    def _check_positive(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise UserError(f"model.{field.name}={value} must be greater than 0")

    def _check_head_dim(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            divisors = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.num_attention_heads))
            raise UserError(
                f"model.num_attention_heads={self.num_attention_heads} does not divide "
                f"model.hidden_size={self.hidden_size}; use {near} heads, or set model.head_dim yourself"
            )
        if self.position_embedding == "rope" and (self.dim_per_head % 2 or self.dim_per_head < 6):
            raise UserError(
                f"rotary positions need an even head width of at least 6, got {self.dim_per_head} "
                f"(hidden_size {self.hidden_size}, {self.num_attention_heads} heads); set model.head_dim"
            )

    @property
    def dim_per_head(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of all heads together, which differs from `hidden_size` where `head_dim` is set."""
        return self.dim_per_head * self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        return self.ffn_hidden_size if self.ffn_hidden_size is not None else 4 * self.hidden_size

    @property
    def patch_dim(self) -> int:
        """Numbers in one token: pt * ph * pw * channels."""
        return self.patch_temporal * self.patch_spatial**2 * self.in_channels

    def token_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens along time, height and width of a latent of this size.

        Raises:
            UserError: if a side is not a multiple of the patch; names the nearest sizes that are.
        """
        sizes = {"frames": frames, "height": height, "width": width}
        patches = {"frames": self.patch_temporal, "height": self.patch_spatial, "width": self.patch_spatial}
        for name, size in sizes.items():
            patch = patches[name]
            if size < 1 or size % patch:
                below, above = size // patch * patch, -(-max(size, 1) // patch) * patch
                choices = f"{below} or {above}" if below else f"{above}"
                raise UserError(f"latent {name} {size} is not a multiple of the patch size {patch}; use {choices}")
        return frames // self.patch_temporal, height // self.patch_spatial, width // self.patch_spatial

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DiTConfig":
        """The inverse of `to_dict`.

        Raises:
            UserError: for a key this version does not know.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = nearest(key, known)
                hint = f"; did you mean {near!r}?" if near else "; was it written by a newer version?"
                raise UserError(f"unknown model setting {key!r}{hint}")
        return cls(**values)


NAMED_CONFIGS: dict[str, DiTConfig] = {
    "dit_s": DiTConfig(num_layers=12, hidden_size=384, num_attention_heads=6),
    "dit_b": DiTConfig(num_layers=12, hidden_size=768, num_attention_heads=12),
    "dit_l": DiTConfig(num_layers=24, hidden_size=1024, num_attention_heads=16),
    "dit_xl": DiTConfig(num_layers=28, hidden_size=1152, num_attention_heads=16),
    "dit_7b": DiTConfig(num_layers=32, hidden_size=3072, num_attention_heads=24),
    "digits": DiTConfig(
        num_layers=4,
        hidden_size=96,
        num_attention_heads=2,
        in_channels=32,
        patch_spatial=1,
        crossattn_emb_size=64,
        sigma_data=1.0,
    ),
}
"""The published sizes (L, XL and 7B as trained upstream on text and video) and the one that `make demo` trains."""
