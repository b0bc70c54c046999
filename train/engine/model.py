"""The module that Megatron's schedules call.

Shapes: G segments of a pack (padding included).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megadit.models.diffusion.parameterization import denoise_packed
from megadit.models.networks.registry import Network
from megadit.train.config.schema import DiffusionConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.distill.adversary import Adversary
from megadit.train.objectives.classify import classification_loss
from megadit.train.objectives.contrast import matching_loss
from megadit.train.objectives.denoise import LossSums, Uncertainty, edm_loss
from megadit.train.objectives.noise_levels import draw_sigma, token_noise


class TrainingModel(nn.Module):
    """Module that Megatron's schedules call: from a pack to sums of losses, or to the activations of a pipeline stage.

    `config` is Megatron's TransformerConfig; the other attributes are those that its schedules look for.
    """

    share_embeddings_and_output_weights = False

    def __init__(
        self,
        dit: Network,
        diffusion: DiffusionConfig,
        config,
        model_type,
        *,
        label_smoothing: float = 0.0,
        contrast_rows: int | None = None,
        readers: ProcessGroup | None = None,
        adversary: Adversary | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model_type = model_type
        self.diffusion = diffusion
        self.label_smoothing = label_smoothing
        self.contrast_rows = contrast_rows
        self.readers = readers
        """Data-parallel ranks whose samples a contrastive loss compares; None: this one alone."""
        self.dit = dit
        """The network."""
        self.objective: Callable[[Callable[..., Tensor], PackedBatch], LossSums] | None = None
        """(denoiser of packs, pack) -> the loss in place of the EDM loss."""
        self.adversary = adversary
        """Discriminator head of a critic."""
        has_uncertainty = diffusion.learned_uncertainty and dit.part.is_last
        self.uncertainty = Uncertainty() if has_uncertainty else None
        self._before: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Set the activations [S, B, D] of the previous model chunk; None for the first."""
        self._before = input_tensor[0]

    def forward(
        self,
        batch: PackedBatch,
        sigma_G: Tensor | None = None,
        *,
        is_noisy: bool = False,
        is_discriminated: bool = False,
        is_alone: bool = False,
    ) -> LossSums | Tensor:
        """Loss sums of a pack, or activations if this is not the last model chunk.

        With `sigma_G`: losses at these noise levels, without uncertainty. With `is_noisy`: D(tokens; sigma). With
        `is_discriminated`: the discriminator's logits. With `is_alone`: images are matched with the texts of this
        micro-batch alone. Networks that do not denoise use no noise levels.
        """
        self._announce_direct_reads()
        if self.dit.config.task == "match":
            readers = None if is_alone else self.readers
            return matching_loss(self.dit, batch, readers, self.contrast_rows, self._before)
        if self.dit.config.task == "classify":
            return classification_loss(self.dit, batch, self.label_smoothing, self._before)
        batch = self._with_guidance(batch)
        if is_noisy or is_discriminated:
            return (self.discriminate if is_discriminated else self._denoise)(batch, batch.tokens_S1P, sigma_G)
        if sigma_G is None and self.objective is not None:
            return self.objective(self._denoise, batch)
        uncertainty = self.uncertainty if sigma_G is None else None
        sigma_G = draw_sigma(batch.noise_key_G, self.diffusion, batch.layout) if sigma_G is None else sigma_G
        return edm_loss(self.dit, batch, sigma_G, token_noise(batch), uncertainty, self._before)

    def _denoise(self, batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor) -> Tensor:
        return denoise_packed(self.dit, x_S1P, sigma_G, **batch.conditions, before=self._before)

    def discriminate(self, batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor) -> Tensor:
        """The discriminator's logits [S], computed from the output of the first half of the blocks."""
        through = (len(self.dit.blocks) + 1) // 2
        return self.adversary(denoise_packed(self.dit, x_S1P, sigma_G, **batch.conditions, through=through))

    def _with_guidance(self, batch: PackedBatch) -> PackedBatch:
        """Add the lowest guidance scale to a pack without one, if the network is guidance-distilled."""
        scales = self.dit.config.guidance_embedding_range
        if scales is None or batch.guidance_G is not None:
            return batch
        return replace(batch, guidance_G=torch.full_like(batch.fps_G, scales[0]))

    def _announce_direct_reads(self) -> None:
        """Run the hooks of modules whose parameters are read without a call of the module.

        Megatron's distributed optimizer gathers updated parameters during the forward, and waits for those of a module
        in the hook of its call.
        """
        readers = [self.dit] if self.uncertainty is None else [self.dit, self.uncertainty.linear]
        readers += [] if self.adversary is None else [self.adversary.linear_1, self.adversary.linear_2]
        for module in readers:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
