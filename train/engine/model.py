"""Module that Megatron's schedules call: it returns the loss of a pack, or the activations of a pipeline stage.

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
        """Ranks whose samples are compared with one another, where a loss does so; None: this one."""
        self.dit = dit
        """Network, or its substitute."""
        self.objective: Callable[[Callable[..., Tensor], PackedBatch], LossSums] | None = None
        """(D of packs, pack) -> what is minimised in place of the EDM loss."""
        self.adversary = adversary
        """Head of a critic that tells generated samples from real ones."""
        has_uncertainty = diffusion.learned_uncertainty and dit.part.is_last
        self.uncertainty = Uncertainty() if has_uncertainty else None
        self._before: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Takes the activations [S, B, D] of the part before, None where there is none."""
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
        """The sums of losses of this step's noise and noise levels, or of another objective; with `sigma_G`, those of
        these noise levels, without uncertainty; with `is_noisy`, D(tokens; sigma); with `is_discriminated`, the
        discriminator's logits. Activations, where this is not the last part. What denoises nothing knows no noise; with
        `is_alone`, images are matched with the texts of this micro-batch alone.
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
        """The adversary's logits [S], of what comes out of the first half of the blocks."""
        through = (len(self.dit.blocks) + 1) // 2
        return self.adversary(denoise_packed(self.dit, x_S1P, sigma_G, **batch.conditions, through=through))

    def _with_guidance(self, batch: PackedBatch) -> PackedBatch:
        """Add the lowest guidance scale, nearest to the samples themselves, if the network is guidance-distilled and
        the pack has none."""
        scales = self.dit.config.guidance_embedding_range
        if scales is None or batch.guidance_G is not None:
            return batch
        return replace(batch, guidance_G=torch.full_like(batch.fps_G, scales[0]))

    def _announce_direct_reads(self) -> None:
        """Runs the hooks of modules whose parameters are read without a call of the module.

        Megatron's distributed optimizer gathers updated parameters while the forward goes on, and waits for those of a
        module where the module is called.
        """
        readers = [self.dit] if self.uncertainty is None else [self.dit, self.uncertainty.linear]
        readers += [] if self.adversary is None else [self.adversary.linear_1, self.adversary.linear_2]
        for module in readers:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
