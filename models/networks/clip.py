"""CLIP (arXiv 2103.00020): an image tower and a text tower, whose embeddings are near for matching images and texts.

The image tower is the ViT. The text tower has the same blocks with causal attention, and its last token represents the
text. Token ids are stored as digits in place of text features (`embeddings.class_digits`).

Shapes: B batch, C channels, T/H/W frames (1 for an image), height, width, S tokens, P patch dim, L text tokens, D
width, G segments of a pack, E embedding width, I images, J texts.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.blocks import BlockInputs
from megadit.models.networks.dit import WHOLE_NETWORK, Chunk
from megadit.models.networks.embeddings import class_index
from megadit.models.networks.vit import ClassHead, ViT
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

HIGHEST_SCALE = 100.0
"""Upper bound of the factor of cosines: more makes training unstable (section 2.5)."""


def text_config(config: DiTConfig) -> DiTConfig:
    """The configuration of the text tower's blocks, as of a separate network."""
    text = config.text_tower
    sizes = {name: getattr(text, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    return replace(config, **sizes, ffn_hidden_size=text.ffn_hidden_size, head_dim=None, num_query_groups=None)


class WordEmbedder(nn.Module):
    """A learned vector for each token id, and one for each position."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        text = config.text_tower
        self.words = nn.Parameter(torch.zeros(text.num_words, text.hidden_size))
        self.positions = nn.Parameter(torch.zeros(text.max_length, text.hidden_size))

    def forward(self, token_LB: Tensor, place_L1: Tensor) -> Tensor:
        """[L, B, D] of token ids (int64); `place_L1` is each token's position in its text."""
        place_L1 = place_L1.clamp(max=len(self.positions) - 1)  # only a pack's padding is beyond
        return F.embedding(token_LB, self.words) + F.embedding(place_L1, self.positions)


class TextTower(nn.Module):
    """Maps texts of any length to embeddings [B, E]."""

    def __init__(self, config: DiTConfig, part: Chunk = WHOLE_NETWORK) -> None:
        super().__init__()
        of_text = text_config(config)
        self.part = part
        self.num_words = config.text_tower.num_words
        self.x_embedder = WordEmbedder(config) if part.is_first else None
        self.blocks = part.build_blocks(of_text)
        self.head = ClassHead(of_text) if part.is_last else None
        # `megatron.parallelize` replaces these where ranks share the tokens
        self.enter, self.leave = nn.Identity(), nn.Identity()

    def forward(self, token_BL: Tensor, length_B: Tensor) -> Tensor:
        """[B, E] of token ids (int64), of which only the first `length_B` of each text are read."""
        device, length = token_BL.device, token_BL.shape[1]
        no_text_BL = torch.zeros(token_BL.shape[0], 0, dtype=torch.bool, device=device)
        layout = DenseLayout((1, 1, length), no_text_BL, device, over="before")
        x_LBD = self._transform(token_BL.T, torch.arange(length, device=device)[:, None], layout)
        last_1BD = (length_B - 1)[None, :, None].expand(1, -1, x_LBD.shape[-1])
        return self.head(x_LBD.gather(0, last_1BD)[0])

    def forward_packed(self, text_L1E: Tensor, layout: PackLayout) -> Tensor:
        """[G, E] of the texts of a pack; rows of padding, and of samples without text, have no meaning.

        Model chunks take and return activations (L1D) as in `ViT.forward_packed`.
        """
        texts = layout.memo(texts_as_segments)
        tensors = texts.on(text_L1E.device)
        token_L1 = class_index(text_L1E, self.num_words) if self.part.is_first else text_L1E
        x_L1D = self._transform(token_L1, tensors.position_in_segment_S[:, None], texts)
        return self.head(x_L1D[tensors.last_token_G, 0]) if self.part.is_last else x_L1D

    def _transform(self, tokens: Tensor, place_L1: Tensor, layout: Layout) -> Tensor:
        """[L, B, D] of `tokens`: ids, int64 [L, B], or, after the first model chunk, activations [L, B, D]."""
        x_LBD = self.enter(self.x_embedder(tokens, place_L1)) if self.part.is_first else tokens
        x_LBD = self.blocks(x_LBD, BlockInputs(layout=layout))
        return self.leave(x_LBD) if self.part.is_last else x_LBD


def texts_as_segments(layout: PackLayout) -> PackLayout:
    """A layout whose segments are the texts of a pack, in the order of its samples, with causal attention."""
    slots = zip(layout.segments, layout.text_places, strict=True)
    segments = tuple(Segment((1, 1, count), 0, is_padding=segment.is_padding) for segment, count in slots)
    return PackLayout(segments, is_causal=True).shard(layout.mesh)


class CLIP(nn.Module):
    """Image and text towers; `scale` and `offset` turn cosines into logits for the loss."""

    def __init__(self, config: DiTConfig, part: Chunk = WHOLE_NETWORK) -> None:
        super().__init__()
        self.config = config
        self.part = part
        self.image_tower = ViT(config, part)
        self.text_tower = TextTower(config, part)
        has_offset = part.is_last and config.text_tower.pairwise
        self.log_scale = nn.Parameter(torch.zeros(1)) if part.is_last else None
        self.score_offset = nn.Parameter(torch.zeros(1)) if has_offset else None

    @property
    def towers(self) -> tuple[ViT, TextTower]:
        return self.image_tower, self.text_tower

    @property
    def dtype(self) -> torch.dtype:
        return self.image_tower.dtype

    @property
    def scale(self) -> Tensor:
        """Factor of the cosines (inverse temperature), [1], float32; at most 100."""
        return bounded(self.log_scale.float(), math.log(HIGHEST_SCALE)).exp()

    def embed_images(self, x_BCTHW: Tensor) -> Tensor:
        """Unit vectors [B, E], float32; pixels are in [-1, 1], or latents of the bundle's tokenizer."""
        return F.normalize(self.image_tower(x_BCTHW).float(), dim=-1)

    def embed_texts(self, token_BL: Tensor, length_B: Tensor) -> Tensor:
        """Unit vectors [B, E], float32; see `TextTower`."""
        return F.normalize(self.text_tower(token_BL, length_B).float(), dim=-1)

    def forward(self, x_BCTHW: Tensor, token_JL: Tensor, length_J: Tensor) -> Tensor:
        """Scores [I, J]: scaled cosines."""
        return self.scale * self.embed_images(x_BCTHW) @ self.embed_texts(token_JL, length_J).T

    def forward_packed(
        self, tokens_S1P: Tensor, text_L1E: Tensor, layout: PackLayout, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Image and text embeddings of a pack, both [G, E], from the two towers.

        A model chunk that is not the first takes `before`, the activations of both towers from the previous chunk,
        in place of tokens; one that is not the last returns its own activations. They are one tensor [S + L, 1, D] of
        the wider tower's D: image tokens, then text tokens, padded with zeros.
        """
        image, text = (tokens_S1P, text_L1E) if self.part.is_first else self._of_towers(before, layout)
        made = self.image_tower.forward_packed(image, layout), self.text_tower.forward_packed(text, layout)
        if self.part.is_last:
            return made
        return torch.cat([F.pad(x, (0, self.config.sent_size - x.shape[-1])) for x in made])

    def _of_towers(self, both: Tensor, layout: PackLayout) -> tuple[Tensor, Tensor]:
        """Split `forward_packed`'s tensor into (image S1D, text L1D); ranks share either sequence in the same way."""
        counts = [count // layout.mesh.slices for count in (layout.capacity, layout.text_capacity)]
        image, text = both.split(counts)
        return image[..., : self.config.hidden_size], text[..., : self.config.text_tower.hidden_size]


class _Bounded(torch.autograd.Function):
    """min(x, most); beyond the bound only gradients that lead back to it pass."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ((x <= ctx.most) | (grad > 0)), None


def bounded(x: Tensor, most: float) -> Tensor:
    """min(x, most) of any shape, with gradients that lead back below the bound."""
    return _Bounded.apply(x, most)
