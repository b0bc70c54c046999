"""The video diffusion transformer: noisy latents, noise level, text and frame rate in; a prediction of their shape out.

Written once, as single-device code; `layers` decides how it is split over ranks.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, S video tokens, L text tokens, P patch dim,
D width, E text feature width, G segments of a pack.
"""

import torch
from torch import Tensor, nn

from megadit.models.blocks import Context, DiTBlock, FinalLayer
from megadit.models.conditioning import Conditioning
from megadit.models.config import DiTConfig
from megadit.models.embeddings import Rotary, ScalarEmbedder, patchify, rotary_table, sincos_table, unpatchify
from megadit.models.layers import LayerKit, TorchLayers
from megadit.models.segments import DenseLayout, Layout, SegmentLayout


class DiT(nn.Module):
    """DiT with adaLN-Zero, cross-attention to text and 3D positions (arXiv 2212.09748; per-head QK-norm, 2302.05442).

    `forward` takes a uniform batch of latents (sampling, export); `forward_packed` takes a pack of samples of any
    size (training). Both run the same blocks.
    """

    def __init__(self, config: DiTConfig, layers: LayerKit | None = None) -> None:
        super().__init__()
        layers = layers if layers is not None else TorchLayers()
        self.config = config
        self.layers = layers

        def linear(in_features: int, out_features: int) -> nn.Module:
            return layers.replicated_linear(in_features, out_features, sequence="sharded")

        self.x_embedder = layers.replicated_linear(config.patch_dim, config.hidden_size, sequence="replicated")
        self.sigma_embedder = ScalarEmbedder(config.hidden_size, linear, scale=100.0)
        self.fps_embedder = ScalarEmbedder(config.hidden_size, linear, scale=1.0)
        self.text_embedder = layers.replicated_linear(
            config.crossattn_emb_size, config.hidden_size, sequence="replicated"
        )
        self.null_text = nn.Parameter(torch.zeros(config.hidden_size))
        self.blocks = layers.block_stack(lambda: DiTBlock(config, layers), config.num_layers)
        self.final_layer = FinalLayer(config, layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.null_text.dtype

    def forward(self, x_BCTHW: Tensor, c_noise_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Predicts F (BCTHW) for a uniform batch; `c_noise_B` is the noise level as `edm_scalings` gives it.

        Raises:
            UserError: if the latents are not a whole number of patches.
        """
        grid = self.config.token_grid(*x_BCTHW.shape[2:])
        length_B = conditioning.text_length_B
        text_LBE = conditioning.text_BLE.transpose(0, 1)
        slot_L = torch.arange(text_LBE.shape[0], device=text_LBE.device)
        layout = DenseLayout(grid, slot_L < length_B.clamp(min=1)[:, None], x_BCTHW.device)
        is_null_1B1 = (length_B == 0)[None, :, None]
        tokens_SBP = patchify(x_BCTHW, self.config)
        F_SBP = self._transform(tokens_SBP, c_noise_B, text_LBE, is_null_1B1, conditioning.fps_B, layout)
        return unpatchify(F_SBP, grid, self.config)

    def forward_packed(
        self, tokens_S1P: Tensor, c_noise_G: Tensor, text_L1E: Tensor, fps_G: Tensor, layout: SegmentLayout
    ) -> Tensor:
        """Predicts F (S1P) for a pack: row g of `c_noise_G` and `fps_G` belongs to segment g of `layout`."""
        device = text_L1E.device
        is_null_L11 = layout.cached(("null_text", device), lambda: _null_mask(layout).to(device))
        return self._transform(tokens_S1P, c_noise_G, text_L1E, is_null_L11, fps_G, layout)

    def _transform(
        self,
        tokens_SBP: Tensor,
        c_noise_G: Tensor,
        text_LBE: Tensor,
        is_null: Tensor,
        fps_G: Tensor,
        layout: Layout,
    ) -> Tensor:
        x_SBD = self.x_embedder(tokens_SBP)
        x_SBD, rotary = self._add_positions(x_SBD, layout)
        condition_GD = self.sigma_embedder(c_noise_G, self.dtype) + self.fps_embedder(fps_G, self.dtype)
        text_LBD = torch.where(is_null, self.null_text, self.text_embedder(text_LBE.to(self.dtype)))
        runs = self.layers.local_runs(layout)

        x_SBD = self.layers.shard_sequence(x_SBD)
        x_SBD = self.blocks(x_SBD, Context(condition_GD, text_LBD, layout, runs, rotary))
        return self.layers.gather_sequence(self.final_layer(x_SBD, condition_GD, runs))

    def _add_positions(self, x_SBD: Tensor, layout: Layout) -> tuple[Tensor, Rotary | None]:
        """The tokens, with fixed positions added or beside rotary ones."""
        key = (self.config, x_SBD.device, x_SBD.dtype)
        if self.config.position_embedding == "sincos":
            width = self.config.hidden_size
            table = layout.cached(key, lambda: sincos_table(_positions(layout, x_SBD), width, x_SBD.dtype))
            return x_SBD + table, None
        return x_SBD, layout.cached(key, lambda: rotary_table(_positions(layout, x_SBD), self.config, x_SBD.dtype))


def _positions(layout: Layout, like: Tensor) -> Tensor:
    return layout.grid_positions_S3.to(like.device)


def _null_mask(layout: SegmentLayout) -> Tensor:
    """bool [L, 1, 1]: the text slots where the null token stands."""
    mask = torch.zeros(layout.text_capacity, 1, 1, dtype=torch.bool)
    mask[layout.null_text_slots] = True
    return mask
