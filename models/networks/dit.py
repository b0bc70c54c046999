"""The video diffusion transformer: noisy latents, noise level, text and frame rate in; a prediction of their shape out.

Plain torch on one device; `config.family` decides which of the published structures it has (`families.py`), and
`megatron.parallelize` how ranks share it.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, S video tokens, L text tokens, P patch dim,
D width, E feature width, I image tokens, F width of the frame rate's embedding, G segments of a pack, or the samples of
a dense batch, R modulation rows (those of G, then one for each of them with conditioning tokens), M width of the shared
modulation, Q extra conditioning channels of a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.attention import AxialInputs, Rotary
from megadit.models.networks.axial import axial_inputs
from megadit.models.networks.blocks import BLOCKS, MLP, BlockInputs, BlockStack, FinalLayer
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.embeddings import (
    ClassEmbedder,
    ImageMLP,
    LearnedPositions,
    RMSNorm,
    TextMLP,
    fps_embedder,
    guidance_embedder,
    patchify,
    rotary_table,
    shared_embedder,
    sigma_embedder,
    sincos_table,
    unpatchify,
)
from megadit.models.networks.experts import ExpertMLP
from megadit.models.networks.modulation import SharedModulation
from megadit.models.ops.fusion import two_or_more
from megadit.models.ops.reference import Linear
from megadit.models.packing.dense_layout import DenseLayout, TensorCache
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import DenseRows

BASE_FPS = 24.0
"""Frame rate at which rotary time is not rescaled, with `Structure.fps` = rotary."""


class Chunk(NamedTuple):
    """The `index`-th of `count` model chunks of a network, each with equally many blocks."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the network begins here: the input is patches, not the activations of the previous chunk."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the network ends here: the output is patches."""
        return self.index == self.count - 1

    def build_blocks(self, config: DiTConfig) -> BlockStack:
        """The chunk's blocks, by their global indices."""
        size, make_block = config.num_layers // self.count, BLOCKS[config.structure.block]
        here = range(self.index * size, (self.index + 1) * size)
        make_mlp = ExpertMLP if config.experts.num_experts else MLP
        return BlockStack({str(index): make_block(config, make_mlp) for index in here})


WHOLE_NETWORK = Chunk()


class DiT(nn.Module):
    """DiT with adaLN-Zero, cross-attention to text and 3D positions (arXiv 2212.09748; per-head QK-norm, 2302.05442).

    `forward` takes a uniform batch of latents (sampling, export); `forward_packed` takes a pack of samples of any
    size (training). Both run the same blocks.
    """

    def __init__(self, config: DiTConfig, part: Chunk = WHOLE_NETWORK) -> None:
        super().__init__()
        self.config = config
        self.part = part
        structure, width = config.structure, config.hidden_size

        self.x_embedder = self.final_layer = None
        if part.is_first:
            self.x_embedder = Linear(config.token_dim, width, bias=structure.patch_bias)
        self.sigma_embedder = sigma_embedder(config)
        self.fps_embedder = fps_embedder(config)
        self.guidance_embedder = guidance_embedder(config)
        self.shared_embedder = shared_embedder(config)
        self.shared_modulation = SharedModulation(config) if structure.single_modulation else None
        self.class_embedder = self.condition_layernorm = self.text_embedder = self.null_text = self.positions = None
        if config.num_classes is not None:
            self.class_embedder = ClassEmbedder(config.num_classes, width)
        if structure.condition_layernorm:
            self.condition_layernorm = RMSNorm(width)
        if structure.text_mlp:
            self.text_embedder = TextMLP(config)
        elif structure.projects_text and structure.cross_attention:
            self.text_embedder = Linear(config.crossattn_emb_size, width)
            self.null_text = nn.Parameter(torch.zeros(width))
        self.image_embedder = None if config.image_size is None else ImageMLP(config)
        if config.learned_positions is not None:
            self.positions = LearnedPositions(config.learned_positions, width, structure.normalized_positions)
        self.blocks = part.build_blocks(config)
        if part.is_last:
            self.final_layer = FinalLayer(config)
        # `megatron.parallelize` replaces these where ranks share the tokens
        self.enter, self.leave = nn.Identity(), nn.Identity()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(
        self,
        x_BCTHW: Tensor,
        c_noise_B: Tensor,
        conditioning: Conditioning,
        padding_mask_B1THW: Tensor | None = None,
        layout: DenseLayout | None = None,
    ) -> Tensor:
        """Predicts F (BCTHW) for a uniform batch; `c_noise_B` is the noise level, scaled as its parameterization says.

        With conditioning latents in place of noisy ones, `x_BCTHW` contains them (`CleanLatents.among`), and
        `c_noise_B` is [2 B]: the noise levels of the noisy latents, then those of the conditioning.
        `padding_mask_B1THW` is 1 where the video is padding (`config.padding_mask_channel`); None means nowhere.
        `layout` is the result of `dense_layout` for this conditioning and size; None: it is computed for this call.

        Raises:
            UserError: if the latents are not a whole number of patches, or more than the network has positions for.
        """
        if layout is None:
            layout = self.dense_layout(conditioning, x_BCTHW.shape[2:], x_BCTHW.device)
        text_LBE = conditioning.text_BLE.transpose(0, 1)
        is_null_B = conditioning.text_length_B == 0
        tokens_SBP, clean = patchify(x_BCTHW, self.config), conditioning.clean
        if clean is not None and self.config.conditioning_dim:
            tokens_SBP = torch.cat([tokens_SBP, patchify(clean.channels(self.config).to(x_BCTHW), self.config)], dim=-1)
        elif padding_mask_B1THW is not None and self.config.conditioning_dim:
            tokens_SBP = F.pad(tokens_SBP, (0, self.config.conditioning_dim))
        if padding_mask_B1THW is not None and self.config.padding_mask_channel:
            tokens_SBP = torch.cat([tokens_SBP, patchify(padding_mask_B1THW.to(x_BCTHW), self.config)], dim=-1)
        of_samples = (conditioning.fps_B, text_LBE[0], is_null_B, self._check_guidance(conditioning.guidance_B))
        if clean is not None and self.config.conditioning.is_among:
            of_samples = (None if values_B is None else torch.cat([values_B, values_B]) for values_B in of_samples)
        condition = self._embed_condition(c_noise_B, *of_samples)
        text_LBD = layout.per_condition(DiT._embed_text, self, text_LBE, is_null_B[None, :, None])
        image_IBD = None
        if self.image_embedder is not None and conditioning.image_BIE is not None:
            image_IBD = layout.per_condition(DiT._embed_image, self, conditioning.image_BIE)
        F_SBP = self._transform(tokens_SBP, *condition, text_LBD, conditioning.fps_B[None], layout, image_IBD)
        return unpatchify(F_SBP, layout.grid, self.config)

    def dense_layout(
        self,
        conditioning: Conditioning,
        size: tuple[int, int, int],
        device: torch.device,
        kept: TensorCache | None = None,
    ) -> DenseLayout:
        """Lay out a uniform batch of latents of `size` (T, H, W), with any extra conditioning frames.

        `kept` caches values that are the same at every noise level (positions, keys and values of the text), from the
        first call of `forward` with this layout on; it is valid while the network's parameters do not change.

        Raises:
            UserError: if the latents are not a whole number of patches, or more than the network has positions for.
        """
        sample = conditioning.segment(self.config, size)
        self.config.check_grid(sample.reach)
        rows = None
        if (
            conditioning.clean is not None and self.config.conditioning.is_among
        ):  # also if no whole token is conditioning
            rows = DenseRows(sample.num_tokens, sample.clean, len(conditioning))
        return DenseLayout(
            sample.grid, conditioning.text_mask_BL, device, rows=rows, times=sample.times or None, kept=kept
        )

    def forward_packed(
        self,
        tokens_S1P: Tensor,
        c_noise_R: Tensor,
        text_L1E: Tensor,
        fps_G: Tensor,
        layout: PackLayout,
        attached_S1Q: Tensor | None = None,
        guidance_G: Tensor | None = None,
        through: int | None = None,
    ) -> Tensor:
        """Predicts F (S1P) for a pack: row g of `fps_G` and `guidance_G` belongs to segment g of `layout`.

        `c_noise_R` has one value for each modulation row: of the segments, then of their conditioning tokens.
        `attached_S1Q` are extra conditioning channels (`config.conditioning_dim`); conditioning tokens follow from the
        layout. A model chunk that is not the first takes the activations (S1D) of the previous chunk in place of
        tokens; one that is not the last returns its own activations. With `through`, only so many blocks run, and their
        output (S1D) is returned.
        """
        for segment in layout.segments:
            if not segment.is_padding:
                self.config.check_grid(segment.reach)
        tensors = layout.on(text_L1E.device)
        if self.part.is_first and self.config.conditioning_dim and self.config.conditioning.is_among:
            attached_S1Q = tensors.is_clean_S[:, None, None].expand(-1, -1, self.config.conditioning_dim)
        if self.part.is_first and attached_S1Q is not None:
            tokens_S1P = torch.cat([tokens_S1P, attached_S1Q.to(tokens_S1P)], dim=-1)
        has_classes = self.class_embedder is not None
        of_segments = (
            fps_G,
            text_L1E[tensors.first_text_G, 0] if has_classes else None,
            tensors.has_no_text_G if has_classes else None,
            self._check_guidance(guidance_G),
        )
        if layout.has_conditioning:
            rows = tensors.segment_of_row_R
            of_segments = (None if values_G is None else values_G[rows] for values_G in of_segments)
        of_rows = (None if values is None else two_or_more(values) for values in (c_noise_R, *of_segments))
        condition = self._embed_condition(*of_rows)
        text_L1D = self._embed_text(text_L1E, tensors.null_text_L[:, None, None])
        return self._transform(tokens_S1P, *condition, text_L1D, fps_G[:, None], layout, through=through)

    def _check_guidance(self, guidance: Tensor | None) -> Tensor | None:
        """Guidance scales of samples or segments, for a guidance-distilled network; None for others."""
        assert self.guidance_embedder is None or guidance is not None, "the network needs a guidance scale"
        return None if self.guidance_embedder is None else guidance

    def _embed_condition(
        self,
        c_noise_R: Tensor,
        fps_R: Tensor,
        first_text_RE: Tensor | None,
        is_null_R: Tensor | None,
        guidance_R: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(condition_RD, shared_RM or None); class-conditional networks read the class from the first text token."""
        condition_RD = self.sigma_embedder(c_noise_R, self.dtype)
        if self.fps_embedder is not None:
            fps_RF = self.fps_embedder(fps_R, self.dtype)
            missing = self.config.hidden_size - fps_RF.shape[-1]
            condition_RD = condition_RD + (F.pad(fps_RF, (0, missing)) if missing else fps_RF)
        if guidance_R is not None:
            condition_RD = condition_RD + self.guidance_embedder(guidance_R, self.dtype)
        if self.class_embedder is not None:
            condition_RD = condition_RD + self.class_embedder(first_text_RE, is_null_R)
        if self.condition_layernorm is not None:
            condition_RD = self.condition_layernorm(condition_RD)
        if self.shared_modulation is not None:
            return condition_RD, self.shared_modulation(condition_RD)
        shared_RM = None if self.shared_embedder is None else self.shared_embedder(c_noise_R, self.dtype)
        return condition_RD, shared_RM

    def _embed_text(self, text_LBE: Tensor, is_null: Tensor) -> Tensor | None:
        """Text features for keys and values, the null token where `is_null`; None without cross-attention."""
        if not self.config.structure.cross_attention:
            return None
        text_LBE = text_LBE.to(self.dtype)
        if self.null_text is None:
            text_LBE = text_LBE.masked_fill(is_null, 0.0)
            return text_LBE if self.text_embedder is None else self.text_embedder(text_LBE)
        return torch.where(is_null, self.null_text, self.text_embedder(text_LBE))

    def _embed_image(self, image_BIE: Tensor) -> Tensor:
        return self.image_embedder(image_BIE.transpose(0, 1).to(self.dtype))

    def _transform(
        self,
        tokens_SBP: Tensor,
        condition_GD: Tensor,
        shared_GM: Tensor | None,
        text_LBD: Tensor | None,
        fps: Tensor,
        layout: Layout,
        image_IBD: Tensor | None = None,
        through: int | None = None,
    ) -> Tensor:
        """`fps` is [1, B] for a dense batch, and [G, 1] for a pack."""
        device = tokens_SBP.device
        rotary = self._rotary(fps, layout, device)
        inputs = BlockInputs(
            condition_GD=condition_GD,
            shared_GM=shared_GM,
            text_LBD=text_LBD,
            layout=layout,
            image_IBD=image_IBD,
            rotary=rotary,
            positions_SBD=self._learned_positions(layout, device),
            **self._axial(layout, rotary, device),
        )
        x_SBD = self._embed(tokens_SBP, layout) if self.part.is_first else tokens_SBP
        if through is not None:
            return self.leave(self.blocks.first(through)(x_SBD, inputs))
        x_SBD = self.blocks(x_SBD, inputs)
        return self.leave(self.final_layer(x_SBD, inputs)) if self.part.is_last else x_SBD

    def _embed(self, tokens_SBP: Tensor, layout: Layout) -> Tensor:
        """This rank's tokens, with fixed positions added where the network has them."""
        missing = self.config.token_dim - tokens_SBP.shape[-1]  # no conditioning, or no padding mask
        x_SBD = self.x_embedder(F.pad(tokens_SBP, (0, missing)) if missing else tokens_SBP)
        if self.config.position_embedding == "sincos":
            x_SBD = x_SBD + layout.memo(_sincos, self.config, x_SBD.device, x_SBD.dtype)
        return self.enter(x_SBD)

    def _rotary(self, fps: Tensor, layout: Layout, device: torch.device) -> Rotary | None:
        """Rotary embedding of each token; None without rotary positions."""
        if self.config.position_embedding != "rope":
            return None
        if self.config.structure.fps == "rotary":
            return layout.per_condition(DiT._scaled_rotary, self, fps, layout, device)
        return layout.memo(_rotary, self.config, device, self.dtype)

    def _scaled_rotary(self, fps: Tensor, layout: Layout, device: torch.device) -> Rotary:
        time_scale = _time_scale(fps, layout)
        return rotary_table(layout.on(device).positions_S3, self.config, self.dtype, time_scale)

    def _axial(self, layout: Layout, rotary: Rotary | None, device: torch.device) -> dict[str, AxialInputs]:
        """Inputs of attention along time and along space; {} unless the blocks are ST-DiT's."""
        if self.config.structure.block != "st_dit":
            return {}
        return {axis: axial_inputs(layout, axis, rotary, self.config, device, self.dtype) for axis in ("time", "space")}

    def _learned_positions(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Learned positions, which every block adds; None where positions are not learned."""
        if self.positions is None:
            return None
        return layout.per_condition(DiT._positions, self, layout, device)

    def _positions(self, layout: Layout, device: torch.device) -> Tensor:
        # only a pack's padding is beyond the largest grid
        axes = zip(layout.on(device).positions_S3.unbind(-1), self.config.learned_positions, strict=True)
        position_S3 = torch.stack([at.clamp(max=size - 1) for at, size in axes], dim=-1)
        if position_S3.is_floating_point():  # frames at fractional times take the nearest position
            position_S3 = position_S3.round().long()
        return self.enter(self.positions(position_S3))


def _sincos(layout: Layout, config: DiTConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    return sincos_table(layout.on(device).positions_S3, config, dtype)


def _rotary(layout: Layout, config: DiTConfig, device: torch.device, dtype: torch.dtype) -> Rotary:
    return rotary_table(layout.on(device).positions_S3, config, dtype)


def _time_scale(fps: Tensor, layout: Layout) -> Tensor:
    """Speed of rotary time: base rate / frame rate for videos, 1 for images; [1, B], for a pack [S, 1]."""
    time_scale = torch.where(fps > 0, BASE_FPS / fps.clamp(min=1e-6), torch.ones_like(fps)).float()
    return time_scale if isinstance(layout, DenseLayout) else time_scale[layout.on(fps.device).segment_of_token_S]
