"""The networks that an objective computes with: the one that learns, as the module of Megatron's schedules, and others.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megadit.models.diffusion.parameterization import denoise_packed
from megadit.models.networks.registry import Network
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.heads import Adversary
from megadit.train.objectives.losses import LossSums, Uncertainty

Denoise = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(pack, x [S, 1, P], sigma_G) -> D(x; sigma) [S, 1, P] with the text and conditioning of the pack; its own clean
tokens are not used."""
Discriminator = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(pack, x [S, 1, P], sigma_G) -> logits [S] that each token is real."""


@dataclass(kw_only=True, slots=True)
class Networks:
    """Networks, settings and process groups of an objective on this rank."""

    model: "TrainingModel"
    """The model chunk that learns; a student."""
    config: RunConfig
    teacher: Denoise | None = None
    """A student's teacher, guided; it and the critic need no gradients."""
    teachers_chunk: "TrainingModel | None" = None
    """The model chunk behind `teacher` on this rank."""
    critic: Denoise | None = None
    discriminator: Discriminator | None = None
    """Discriminator head of the critic, with gradients."""
    readers: ProcessGroup | None = None
    """Data-parallel ranks whose samples a contrastive loss compares; None: this one alone."""
    context: ProcessGroup | None = None
    """Context-parallel ranks that share a pack; None: this one alone."""
    step: int = 1
    """Optimizer step: 1, 2, ..."""


Objective = Callable[[Networks, PackedBatch], LossSums | Tensor]
"""Sums of losses of a pack; for a model chunk that is not the last, its activations [S, B, D]."""


class TrainingModel(nn.Module):
    """A model chunk as Megatron's schedules call it: from a pack to the sums of its objective.

    `megatron`, `model_type` and `share_embeddings_and_output_weights` are what schedules look for.
    """

    share_embeddings_and_output_weights = False

    def __init__(
        self,
        dit: Network,
        config: RunConfig,
        objective: Objective,
        megatron: TransformerConfig | None = None,
        *,
        readers: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        adversary: Adversary | None = None,
    ) -> None:
        super().__init__()
        self.config, self.model_type = megatron, ModelType.encoder_or_decoder
        self.dit = dit
        self.adversary = adversary
        """Discriminator head of a critic."""
        self.uncertainty = Uncertainty() if config.diffusion.learned_uncertainty and dit.part.is_last else None
        self.objective = objective
        self.networks = Networks(model=self, config=config, readers=readers, context=context)
        self.before: Tensor | None = None
        """Activations of the previous model chunk [S, B, D]; None for the first."""

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Set `before`: the activations [S, B, D] of the previous model chunk, or None."""
        self.before = input_tensor[0]

    def forward(self, batch: PackedBatch, compute: Callable[[Networks, PackedBatch], Any] | None = None) -> Any:
        """The objective of a pack, or `compute` in its place.

        All uses of the network start here, because data-parallel wrappers gather parameters when they are called.
        """
        self._announce_direct_reads()
        return (compute or self.objective)(self.networks, self._with_guidance(batch))

    def denoise(self, batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor) -> Tensor:
        """D(x; sigma) [S, 1, P] (`Denoise`), or activations [S, 1, D] of a model chunk that is not the last."""
        return denoise_packed(self.dit, x_S1P, sigma_G, **batch.conditions, before=self.before)

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


def denoiser_of(part: Callable[..., Any]) -> Denoise:
    """A `TrainingModel`, with or without data-parallel wrapper, as a denoiser of packs."""
    return lambda batch, x_S1P, sigma_G: part(batch, lambda own, pack: own.model.denoise(pack, x_S1P, sigma_G))


def discriminator_of(part: Callable[..., Any]) -> Discriminator:
    """The discriminator of a critic, with or without data-parallel wrapper."""
    return lambda batch, x_S1P, sigma_G: part(batch, lambda own, pack: own.model.discriminate(pack, x_S1P, sigma_G))
