"""Sections of a network's configuration: mixtures of experts, and CLIP's text tower."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from megadit.models.shared.errors import UserError, choose_one

Routing = Literal["token_choice", "expert_choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of the MLP of every block; disabled without `num_experts`.

    `token_choice`: each token goes to the `top_k` experts with the highest scores (arXiv 2101.03961), none is dropped.
    `expert_choice`: each expert computes the tokens of a sample with the highest scores, equally many of every sample
    (arXiv 2202.09368, for diffusion 2410.02098); a token may have any number of experts, also none.
    """

    num_experts: int = 0
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


MOST_WORDS = 1 << 16
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
        if self.num_words > MOST_WORDS:
            raise UserError(f"model.text_tower.num_words={self.num_words} are more than {MOST_WORDS:,}")
