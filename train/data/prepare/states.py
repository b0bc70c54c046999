"""Noisy states of the sampling of videos: `train.distill.objective=flow_grpo` learns of the steps from there.

Shapes: K states, C latent channels, T/H/W latent frames, height, width.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megadit.infer.pipeline.batches import DENOISE
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.samplers import NoisyStep, noisy_steps
from megadit.infer.sampling.schedules import settings_sigmas
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError


class States:
    """Records `count` states of each video that a pipeline samples, drawn by the video's seed."""

    def __init__(self, settings: SamplingSettings, count: int) -> None:
        """
        Raises:
            UserError: for settings whose steps are not one denoiser call each with noise behind it, or fewer steps.
        """
        if settings.sampler != "euler" or not settings.eta or settings.churn or settings.guidance != 1:
            raise UserError(
                "states need --sampler euler --eta 1 --churn 0 --guidance 1: a step is one call of "
                "the network, and its likelihood that of the noise behind it"
            )
        if settings.cache_budget:
            raise UserError("states need --cache_budget 0: a predicted call is no call of the network")
        self._steps, self._count = noisy_steps(settings_sigmas(settings), settings.eta), count
        if count > len(self._steps):
            raise UserError(
                f"--states {count}: {len(self._steps)} of {settings.num_steps} steps add noise; keep fewer states, or "
                "take more steps (--num_steps)"
            )
        self._calls: list[Tensor] = []
        self._found: dict[int, Tensor] = {}

    def watch(self, pipeline: TextToVideo) -> None:
        """Records the calls of its denoiser from now on; sample within `around`."""
        denoiser = pipeline.denoiser

        def watched(x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
            self._calls.append(x_BCTHW.cpu())
            return denoiser(x_BCTHW, sigma_B, conditioning)

        pipeline.denoiser = watched

    @contextmanager
    def around(self, stage: str, places: range) -> Iterator[None]:
        """Context around each stage of `TextToVideo.stream`."""
        self._calls.clear()
        yield
        if stage == DENOISE:
            self._found |= {place: torch.stack([x[n] for x in self._calls]) for n, place in enumerate(places)}
            self._calls.clear()

    def of(self, place: int, seed: int) -> tuple[Tensor, list[NoisyStep]]:
        """States [K, C, T, H, W] of the video at this place, float32, and their steps."""
        numbers = sorted(random.Random(f"states {seed}").sample(range(len(self._steps)), self._count))
        return self._found.pop(place)[numbers], [self._steps[number] for number in numbers]
