"""The settings of a network that decide its blocks."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from megadit.models.configs.families import COMPAT, FAMILIES, Structure
from megadit.models.shared.errors import UserError, choose_one

Routing = Literal["token_choice", "expert_choice"]
LARGEST = 1 << 16
"""Maximum size of a network along any axis: a configuration is untrusted, and PyTorch counts elements in 64 bits."""
_MOST = {"num_layers": 1000, "num_experts": 4096}
"""Maximum numbers of parts of a network, each of which takes time to build."""


def check_sizes(config: Any, section: str) -> None:
    """Raises UserError for a whole number in a section of a network's configuration that is too large for a size."""
    for field in fields(config):
        value, most = getattr(config, field.name), _MOST.get(field.name, LARGEST)
        sizes = [size for size in (value if isinstance(value, tuple) else (value,)) if isinstance(size, int)]
        if max(sizes, default=0) > most:
            shown = list(value) if isinstance(value, tuple) else value
            raise UserError(f"{section}.{field.name}={shown} is too large; at most {most}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of the MLP of every block; disabled without `num_experts`.

    `token_choice`: each token goes to the `top_k` experts with the highest scores (arXiv 2101.03961), none is dropped.
    `expert_choice`: each expert computes the tokens of a sample with the highest scores, equally many of every sample
    (arXiv 2202.09368, for diffusion 2410.02098); a token may have any number of experts, also none.
    """

    num_experts: int = 0
    """Experts of each layer; 0: an MLP in their place."""
    routing: Routing = "token_choice"
    top_k: int = 2
    """Experts of each token, with `token_choice`."""
    capacity_factor: float = 2.0
    """Experts of a token on average, with `expert_choice`: each computes top_k / num_experts of a sample's tokens."""
    ffn_hidden_size: int | None = None
    """Width of an expert between its two linears; None means that of the MLP."""
    shared_ffn_hidden_size: int = 0
    """Width of a shared expert, which computes all tokens; 0 means none."""
    balance_coefficient: float = 0.01
    """Weight of the load-balancing loss, with `token_choice` (arXiv 2101.03961, eq. 4)."""

    def __post_init__(self) -> None:
        choose_one(self.routing, get_args(Routing), f"model.experts.routing={self.routing!r} is unknown")
        check_sizes(self, "model.experts")
        for name in ("num_experts", "shared_ffn_hidden_size", "balance_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"model.experts.{name}={getattr(self, name)} must not be negative")
        for name in ("top_k", "capacity_factor", "ffn_hidden_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"model.experts.{name}={value} must be greater than 0")
        if self.num_experts and not self.experts_per_token <= self.num_experts:
            name = "top_k" if self.routing == "token_choice" else "capacity_factor"
            raise UserError(
                f"model.experts.{name}={getattr(self, name)} asks for more experts than "
                f"model.experts.num_experts={self.num_experts}"
            )

    @property
    def experts_per_token(self) -> float:
        """Number of experts that compute a token, on average."""
        return self.top_k if self.routing == "token_choice" else self.capacity_factor

    def capacity(self, num_tokens: int) -> int:
        """Number of a sample's tokens that each expert computes, with `expert_choice`: at least one."""
        return math.ceil(num_tokens * self.capacity_factor / self.num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    """The settings that determine a block of a `DiT`."""

    hidden_size: int = 384
    num_attention_heads: int = 6
    head_dim: int | None = None
    """Width of one attention head; None means hidden_size / num_attention_heads, which must be whole (or is rounded
    down if positions are only learned)."""
    num_query_groups: int | None = None
    """Heads of keys and values in self-attention (grouped-query attention, arXiv 2305.13245); None means
    num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width of the MLP between its two linears; None means 4 x hidden_size."""
    experts: ExpertConfig = ExpertConfig()
    """Experts in place of every MLP; disabled without `num_experts`."""
    crossattn_emb_size: int = 1024
    """Width of the text features; they are projected to hidden_size."""
    qk_layernorm: bool = True
    """RMS-normalise queries and keys per head (arXiv 2302.05442), which keeps attention logits bounded."""
    layernorm_epsilon: float = 1e-6
    image_size: int | None = None
    """Width of image features that tokens attend to in addition to the text (Wan 2.1); None: no image features."""
    family: str = "megadit"
    """Name of the structure; `families.py` lists the differences."""
    compat: Literal["nemo", "predict2_5"] | None = None
    """Variant of the family with structural differences, for loading its checkpoints; None means none."""
    adaln_lora_dim: int | None = None
    """Rank of the bottleneck in each modulation; None: no bottleneck (`cosmos` and `dfm` have one, `st_dit` should)."""
    qk_layernorm_epsilon: float | None = None
    """None means `layernorm_epsilon`."""
    mlp_layernorm_epsilon: float | None = None
    """Epsilon of the norm before the MLP; None means `layernorm_epsilon`."""
    quick_gelu: bool = False
    """The MLP's GELU is x sigmoid(1.702 x), as in OpenAI's CLIP."""

    @property
    def structure(self) -> Structure:
        return FAMILIES[self.family] if self.compat is None else COMPAT[self.family, self.compat]

    @property
    def dim_per_head(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of all heads together, which differs from `hidden_size` where `head_dim` is set."""
        return self.dim_per_head * self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values in self-attention."""
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        return self.ffn_hidden_size if self.ffn_hidden_size is not None else 4 * self.hidden_size

    @property
    def mlp_factors(self) -> int:
        """Outputs of the MLP's first linear for each of `mlp_size`: 2 with SwiGLU, else 1."""
        return 2 if self.structure.gated_mlp else 1

    @property
    def mlp_rows(self) -> int:
        """Output features of the MLP's first linear."""
        return self.mlp_factors * self.mlp_size

    @property
    def expert_size(self) -> int:
        """Width of an expert between its two linears."""
        return self.experts.ffn_hidden_size or self.mlp_size

    @property
    def text_size(self) -> int:
        """Width of the text features that keys and values read."""
        return self.hidden_size if self.structure.projects_text else self.crossattn_emb_size
