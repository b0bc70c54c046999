"""The vision transformer (arXiv 2010.11929): from pixels in [-1, 1] of an image or a clip, or any latents, to class
logits.

    z_0 = [x_class; x_1 W; ...; x_N W] + positions      (eq. 1)
    z_l = block(z_(l-1))                                (eqs. 2 and 3)
    logits = head(LayerNorm(class token of z_L))        (eq. 4)

A patch x_n is `patch_temporal` frames of `patch_spatial` squared pixels; for clips there are positions along time, too
(`learned_positions`). In the sequence, an empty patch before those of a sample holds the position of the class token.
Linears, attention and MLP are those of the DiT, so ranks split them in the same way.

Shapes: B batch, C channels, T/H/W frames (1 for an image), height, width, S tokens, P patch dim, D width, G segments of
a pack, K classes, E embedding width of CLIP.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.blocks import BlockInputs
from megadit.models.networks.dit import WHOLE_NETWORK, Chunk
from megadit.models.networks.embeddings import token_sequence
from megadit.models.ops.reference import Linear
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Grid


class PatchEmbedder(nn.Module):
    """z_0: the class token, then patches in the network's width, each plus the learned position of its place."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.linear = Linear(config.token_dim, config.hidden_size, bias=config.structure.patch_bias)
        self.class_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.positions = nn.Parameter(torch.zeros(config.position_grid[-1], config.hidden_size))
        has_norm = config.structure.patch_layernorm
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon) if has_norm else nn.Identity()

    def forward(self, tokens_SBP: Tensor, place_S1: Tensor) -> Tensor:
        """[S, B, D] of patches [S, B, P]; `place_S1` is each token's position in its sample; the class token has 0."""
        place_S1 = place_S1.clamp(max=len(self.positions) - 1)  # only a pack's padding is beyond
        tokens_SBP = tokens_SBP.to(self.linear.weight.dtype)
        x_SBD = torch.where(place_S1[..., None] == 0, self.class_token, self.linear(tokens_SBP))
        return self.layernorm(x_SBD + F.embedding(place_S1, self.positions))


def resized_positions(positions_SD: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Position embeddings [S, D] resized from one grid (t, h, w) to another: bicubic in space, nearest in time.

    The embedding of the class token comes first and is unchanged.
    """
    places_TDHW = rearrange(positions_SD[1:], "(T H W) D -> T D H W", T=grid[0], H=grid[1])
    if grid[1:] != target[1:]:
        places_TDHW = F.interpolate(places_TDHW.float(), target[1:], mode="bicubic", align_corners=False)
    frame_T = torch.arange(target[0]) * grid[0] // target[0]
    resized_SD = rearrange(places_TDHW[frame_T], "T D H W -> (T H W) D").to(positions_SD)
    return torch.cat([positions_SD[:1], resized_SD])


class ClassHead(nn.Module):
    """The normalised class token (the last token of a text), mapped to logits in networks with classes, or to CLIP's
    embedding."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        is_matched = config.task == "match"
        rows = config.text_tower.embedding_size if is_matched else config.num_classes
        self.linear = None if rows is None else Linear(config.hidden_size, rows, bias=not is_matched)

    def forward(self, x_GD: Tensor) -> Tensor:
        """Logits [G, K] of class tokens [G, D], or embeddings [G, E]; without either features [G, D]."""
        x_GD = self.layernorm(x_GD)
        return x_GD if self.linear is None else self.linear(x_GD)


class ViT(nn.Module):
    """`forward` takes a uniform batch (inference, export), `forward_packed` a pack (training): by the same blocks."""

    def __init__(self, config: DiTConfig, part: Chunk = WHOLE_NETWORK) -> None:
        super().__init__()
        self.config = config
        self.part = part
        self.x_embedder = PatchEmbedder(config) if part.is_first else None
        self.blocks = part.build_blocks(config)
        self.head = ClassHead(config) if part.is_last else None
        # `megatron.parallelize` replaces these where ranks share the tokens
        self.enter, self.leave = nn.Identity(), nn.Identity()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Logits [B, K], or features [B, D] in a network without classes; pixels are in [-1, 1].

        Raises:
            UserError: if the size is not that of `config.learned_positions`.
        """
        grid, device = self.config.sample_grid(*x_BCTHW.shape[2:]), x_BCTHW.device
        tokens_SBP = token_sequence(x_BCTHW, self.config)
        no_text_BL = torch.zeros(x_BCTHW.shape[0], 0, dtype=torch.bool, device=device)
        place_S1 = torch.arange(tokens_SBP.shape[0], device=device)[:, None]
        return self.head(self._transform(tokens_SBP, place_S1, DenseLayout(grid, no_text_BL, device))[0])

    def forward_packed(self, tokens_S1P: Tensor, layout: PackLayout) -> Tensor:
        """Logits [G, K], or features, of the segments of a pack; rows of padding have no meaning.

        A model chunk that is not the first takes the activations (S1D) of the previous chunk in place of tokens; one
        that is not the last returns its own activations.
        """
        tensors = layout.on(tokens_S1P.device)
        x_S1D = self._transform(tokens_S1P, tensors.position_in_segment_S[:, None], layout)
        return self.head(x_S1D[tensors.first_token_G, 0]) if self.part.is_last else x_S1D

    def _transform(self, tokens_SBP: Tensor, place_S1: Tensor, layout: Layout) -> Tensor:
        x_SBD = tokens_SBP
        if self.part.is_first:
            x_SBD = self.enter(self.x_embedder(tokens_SBP, place_S1))
        x_SBD = self.blocks(x_SBD, BlockInputs(layout=layout))
        return self.leave(x_SBD) if self.part.is_last else x_SBD
