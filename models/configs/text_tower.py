"""Configuration of CLIP's text tower."""

from dataclasses import dataclass

from megadit.models.shared.errors import UserError

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
