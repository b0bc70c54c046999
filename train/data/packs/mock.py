"""Endless random packs with the interface of the data loader, for benchmarks, tests and first tries.

Shapes: C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from megadit.infer.sampling.samplers import NoisyStep
from megadit.models.diffusion.noise import sample_key
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.packed_batch import PackedBatch, PackFormat
from megadit.train.data.packs.training_sample import Frames, State, TrainingSample

MAX_TEXT_LENGTH = 16
FPS = 24.0


class MockLoader:
    """Packs of random samples, each pack a function of its number alone.

    Packs are numbered 0, 1, 2, ... over the whole run. Each `micro_batch_size` of them are one micro-batch, and rank r
    of n reads the micro-batches r, r + n, r + 2n, ... So a step reads the same packs on any number of ranks, and the
    saved state, a number of packs, can be restored on another number of ranks.

    Latents are normal with standard deviation `sigma_data`, of the given shapes in turn; texts are normal, of 1 to 16
    tokens. No sample occurs twice.
    """

    def __init__(
        self,
        format: PackFormat,
        *,
        latent_shapes: tuple[tuple[int, int, int], ...],
        micro_batch_size: int,
        rank: int,
        world_size: int,
        name: str = "mock",
        num_batches: int | None = None,
    ) -> None:
        self.format = format
        self.latent_shapes = latent_shapes
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.num_batches = num_batches
        """Micro-batches of all ranks after which an iteration ends and the next one starts from the beginning; None:
        endless."""
        self._position = 0  # micro-batches that this rank has yielded

    def __iter__(self) -> Iterator[PackedBatch]:
        if self.num_batches is not None:
            numbers = range(self.rank, self.num_batches, self.world_size)
            yield from (self.micro_batch(number) for number in numbers)
            return
        while True:
            self._position += 1
            yield self.micro_batch((self._position - 1) * self.world_size + self.rank)

    def save_state(self) -> dict[str, Any]:
        return {"num_packs": self._position * self.world_size * self.micro_batch_size}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue after the packs that all ranks together had yielded.

        Raises:
            UserError: if the state is not that of mock data, or the packs read do not divide among these ranks.
        """
        if "num_packs" not in state:
            raise UserError("cannot resume mock data: the state is that of a data set; set data.mock=false")
        packs_per_turn = self.world_size * self.micro_batch_size
        self._position, remainder = divmod(state["num_packs"], packs_per_turn)
        if remainder:
            raise UserError(
                f"cannot resume after {state['num_packs']} packs with {self.world_size} data-parallel ranks x "
                f"data.micro_batch_size={self.micro_batch_size}, whose product does not divide them"
            )

    def micro_batch(self, number: int) -> PackedBatch:
        first = number * self.micro_batch_size
        return PackedBatch.concatenate([self.pack(first + offset) for offset in range(self.micro_batch_size)])

    def pack(self, number: int) -> PackedBatch:
        """Samples in turn until the next one does not fit, sorted by length."""
        key = sample_key(self.format.seed, f"{self.name}-{number}", 0)
        samples, tokens_left, text_left = [], self.format.seq_length, self.format.text_seq_length
        for sample in self._samples(number, torch.Generator().manual_seed(key)):
            tokens, text = self.format.lengths(sample)
            if tokens > tokens_left or text > text_left:
                if not samples:  # the rules count tokens of a video alone
                    raise UserError(
                        f"a mock sample has {tokens} video and {text} text tokens with all that belongs to it, more "
                        f"than a pack of data.seq_length={tokens_left} and data.text_seq_length={text_left}; raise "
                        "these or use smaller data.mock_latent_shapes"
                    )
                break
            samples.append(sample)
            tokens_left, text_left = tokens_left - tokens, text_left - text
        return self.format.pack(sorted(samples, key=self.format.lengths))

    def _samples(self, number: int, generator: torch.Generator) -> Iterator[TrainingSample]:
        model = self.format.model
        longest_text = min(MAX_TEXT_LENGTH, self.format.text_seq_length)
        for index in count():
            T, H, W = self.latent_shapes[(number + index) % len(self.latent_shapes)]
            text_length = int(torch.randint(1, longest_text + 1, (), generator=generator))
            sample = TrainingSample(
                sample_id=f"{self.name}-{number}-{index}",
                occurrence=0,
                latent_CTHW=model.sigma_data * torch.randn(model.in_channels, T, H, W, generator=generator),
                text_LE=torch.randn(text_length, model.crossattn_emb_size, generator=generator),
                fps=FPS if T > 1 else 0.0,
                seed=number + index,
                reward=(number + index) % 5 / 4,
            )
            if "preference" in self.format.extras:
                sample = self._with_rejected(sample)
            if "sigma" in self.format.extras:
                sigma = 0.1 + (number + index) % 7
                sample.state = State(
                    sigma * sample.latent_CTHW, NoisyStep(2 * (index % 3) + 1, sigma, 0.5 * sigma, 0.3 * sigma)
                )
            yield self._with_conditioning(sample, number + index) if self.format.conditioning else sample

    def _with_rejected(self, sample: TrainingSample) -> TrainingSample:
        """Make it a pair, whose rejected video is drawn by its own key."""
        generator = torch.Generator().manual_seed(sample_key(self.format.seed, sample.sample_id, 2))
        rejected_CTHW = self.format.model.sigma_data * torch.randn(sample.latent_CTHW.shape, generator=generator)
        return replace(sample, rejected_CTHW=rejected_CTHW, preference=1.0)

    def _with_conditioning(self, sample: TrainingSample, number: int) -> TrainingSample:
        """Add the last frame as an image to a clip, and a source clip to every third one; drawn by its own key."""
        generator = torch.Generator().manual_seed(sample_key(self.format.seed, sample.sample_id, 1))
        C, T, H, W = sample.latent_CTHW.shape
        if T == 1:
            return sample
        deviation = self.format.model.sigma_data
        frames = Frames(deviation * torch.randn(C, 1, H, W, generator=generator), (float(T - 1),))
        is_edit = "edit" in dict(self.format.conditioning) and number % 3 == 0
        reference = deviation * torch.randn(C, T, H, W, generator=generator) if is_edit else None
        return replace(sample, frames=frames, reference_CTHW=reference)
