"""Teacher and critic of a student; the critic learns the distribution of the student's videos.

Each has the parallel layout of the student. The teacher is frozen, without gradients, optimizer or EMA weights; the
critic is trained like any network, on packs that the student generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadit.models.diffusion.noise import seed_key, uniform
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.distill.adversary import Discriminator, critic_loss
from megadit.train.distill.objectives import (
    OBJECTIVES,
    Denoise,
    Teaching,
    Turn,
    made_batch,
    of_tokens,
    student_state,
    target_of,
    with_scale,
)
from megadit.train.objectives.denoise import LossSums

CALLS = 1
"""Random stream of the student's numbers of sampling steps, under the key of the run's seed."""


@dataclass(slots=True)
class Distillation:
    """Teacher and objective of a student's run."""

    seed: int
    teaching: Teaching
    frozen: nn.Module
    """The teacher's network on this rank."""
    teacher_fingerprint: str
    """`adapters.fingerprint` of the teacher's weights."""
    is_guided: bool
    """Whether guidance takes two forward passes of the teacher."""
    turn: Turn = field(default=Turn(calls=1, step=1), init=False)
    """Random choices of the current update."""

    def begin(self, step: int, update: int) -> None:
        """Draw the student's number of sampling steps, the same for all samples and ranks, for an update of step
        `step`: `update` 0 is the student's, 1, 2, ... are those of the critic before it."""
        key_R, position_R = torch.tensor([seed_key(self.seed)]), torch.tensor([step])
        number = uniform(key_R, position_R, update + 1, stream=CALLS)[0, update].item()
        self.turn = Turn(calls=1 + int(number * len(self.teaching.config.sigmas)), step=step)

    def loss(self, student: Denoise, batch: PackedBatch) -> LossSums:
        """Loss of the student (`objectives.Objective`)."""
        batch = with_scale(batch, self.teaching.model)
        return OBJECTIVES[self.teaching.config.objective](student, self.teaching, batch, self.turn)

    def discriminator_objective(self, discriminator: Discriminator) -> Callable[[Denoise, PackedBatch], LossSums]:
        """Loss of a critic with a discriminator head on packs of `made`."""
        diffusion, model, weight = self.teaching.diffusion, self.teaching.model, self.teaching.config.adversarial_weight
        return partial(critic_loss, discriminator=discriminator, diffusion=diffusion, model=model, weight=weight)

    @torch.no_grad()
    def made(self, student: Denoise, seen: Sequence[PackedBatch], update: int) -> list[PackedBatch]:
        """Replace the samples of packs by samples of the student, for update `update` (1, 2, ...) of the critic."""
        found = []
        for batch in (with_scale(batch, self.teaching.model) for batch in seen):
            own = made_batch(batch, batch.tokens_S1P, number=2 * update)
            x_S1P, sigma_G = student_state(student, self.teaching, own, self.turn.calls)
            x0_S1P = target_of(batch, student(batch, x_S1P, sigma_G))
            made = made_batch(batch, x0_S1P, number=2 * update + 1)
            found.append(replace(made, real_S1P=batch.tokens_S1P))
        return found


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor of any shape over a group, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def denoiser_of(part: Callable[..., Tensor]) -> Denoise:
    """Wrap a whole network, with or without data-parallel wrapper, as a denoiser of packs."""
    return lambda batch, x_S1P, sigma_G: part(replace(batch, tokens_S1P=x_S1P), sigma_G, is_noisy=True)


def discriminator_of(part: Callable[..., Tensor]) -> Discriminator:
    """Return the discriminator of a critic in its data-parallel wrapper."""
    return lambda batch, x_S1P, sigma_G: part(replace(batch, tokens_S1P=x_S1P), sigma_G, is_discriminated=True)


def guided(denoise: Denoise, scale: float) -> Denoise:
    """D(no text) + scale (D(text) - D(no text)) (arXiv 2207.12598); the conditioning is the same in both.

    For a guidance-distilled student the scales of the samples come from the pack.
    """

    def denoise_guided(batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor) -> Tensor:
        D_S1P = denoise(batch, x_S1P, sigma_G)
        if batch.guidance_G is None and scale == 1:
            return D_S1P
        base_S1P = denoise(batch.without_text(), x_S1P, sigma_G)
        scales = scale if batch.guidance_G is None else of_tokens(batch, batch.guidance_G)
        return base_S1P + scales * (D_S1P - base_S1P)

    return denoise_guided
