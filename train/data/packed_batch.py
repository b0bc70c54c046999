"""Packs of training samples: from latents of any size to rows of one size.

Shapes: B samples of one size, C latent channels, T/H/W latent frames, height, width, S video tokens, L text tokens,
E text feature width, P patch dim (pt*ph*pw*C), G segments of a pack (padding included).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from einops import rearrange
from torch import Tensor

from megadit.models.config import DiTConfig
from megadit.models.embeddings import patchify
from megadit.models.layout import PackLayout
from megadit.models.noise import Stream, sample_key, uniform
from megadit.models.segments import Segment, TokenMesh

REFUSALS = (
    "unreadable", "other_dtype", "other_channels", "other_text_width", "low_score", "odd_size", "too_long", "long_text",
    "not_finite", "too_large",
)  # fmt: skip
"""Why samples are left out; `rules` says it in words."""
BATCH_TENSORS = ("tokens_S1P", "text_L1E", "fps_G", "noise_key_G", "loss_weight_G")
"""The fields of a `PackedBatch` that are tensors."""


@dataclass(slots=True)
class TrainingSample:
    """One clip or image, encoded."""

    sample_id: str
    occurrence: int
    """How often this sample was read before: the passes over the data that came earlier."""
    latent_CTHW: Tensor
    text_LE: Tensor
    """Text features, [0, E] without a caption."""
    fps: float
    """Frames per second of the decoded video; 0 for images."""
    height: int = 0
    width: int = 0
    """Of the decoded video, in pixels."""
    aesthetic_score: float | None = None
    is_prior: bool = False
    """Whether a model made it, to keep what it can do while it learns something else (`megadit prepare prior`)."""

    @property
    def kind(self) -> str:
        return "video" if self.fps else "image"


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch: one pack, or several one after another. CPU tensors until `.to`."""

    tokens_S1P: Tensor
    """float32 clean latents, patchified; zero in the padding."""
    text_L1E: Tensor
    """float32 text features, slot by slot; zero where the null token stands and in the padding."""
    layout: PackLayout
    fps_G: Tensor
    """float32, 0 for images and padding."""
    noise_key_G: Tensor
    """int64 keys of `models.noise`, which decide noise, sigma and text dropout of each sample; 0 for padding."""
    loss_weight_G: Tensor
    """float32, what the loss of each sample counts; 1 but for prior samples."""
    sample_ids: tuple[str, ...]
    """One for each segment, "" for padding."""
    refused: tuple[int, ...] = (0,) * len(REFUSALS)
    """Samples that its reader left out since the batch before, by reason."""

    @property
    def num_tokens(self) -> int:
        """Video tokens of samples at hand, padding excluded."""
        return self.layout.num_tokens

    def to(self, device: torch.device | str) -> "PackedBatch":
        """On another device, without waiting for the copy (pinned memory makes that possible)."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PackedBatch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        return replace(self, **{name: change(getattr(self, name)) for name in BATCH_TENSORS})

    def shard(self, mesh: TokenMesh) -> "PackedBatch":
        """The same samples as `mesh` divides them, with the tokens of this rank's CP shard."""
        layout = self.layout.shard(mesh)
        if mesh.context == 1:
            return replace(self, layout=layout)
        tokens_S1P = self.tokens_S1P[layout.on(self.tokens_S1P.device).index_S]
        return replace(self, tokens_S1P=tokens_S1P, layout=layout)

    @staticmethod
    def concatenate(packs: "Sequence[PackedBatch]") -> "PackedBatch":
        """Several packs as one micro-batch."""
        if len(packs) == 1:
            return packs[0]
        return PackedBatch(
            tokens_S1P=torch.cat([pack.tokens_S1P for pack in packs]),
            text_L1E=torch.cat([pack.text_L1E for pack in packs]),
            layout=PackLayout.concatenate([pack.layout for pack in packs]),
            fps_G=torch.cat([pack.fps_G for pack in packs]),
            noise_key_G=torch.cat([pack.noise_key_G for pack in packs]),
            loss_weight_G=torch.cat([pack.loss_weight_G for pack in packs]),
            sample_ids=tuple(sample_id for pack in packs for sample_id in pack.sample_ids),
            refused=tuple(map(sum, zip(*(pack.refused for pack in packs), strict=True))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFormat:
    """The size of a pack, and what is decided when one is filled."""

    model: DiTConfig
    seq_length: int
    """Video tokens of a pack."""
    text_seq_length: int
    """Text slots of a pack."""
    seed: int
    text_dropout: float
    """Share of samples whose text is dropped, 0..1."""
    prior_weight: float = 1.0
    """What the loss of a prior sample counts."""
    prior_text_dropout: float | None = None
    """Share of prior samples whose text is dropped; None is `text_dropout`."""

    def lengths(self, sample: TrainingSample) -> tuple[int, int]:
        """Video tokens and text slots that a sample needs, its text dropped or not.

        Raises:
            UserError: if a side of the latent is not a multiple of the patch.
        """
        frames, height, width = self.model.token_grid(*sample.latent_CTHW.shape[1:])
        return frames * height * width, max(1, len(sample.text_LE))

    def pack(self, samples: Sequence[TrainingSample]) -> PackedBatch:
        """Lays samples out one after another, in the given order, and pads the tail.

        Text is dropped where the first uniform number of the sample's key falls below `text_dropout`, which depends on
        nothing but (seed, sample id, occurrence).
        """
        keys = [sample_key(self.seed, sample.sample_id, sample.occurrence) for sample in samples]
        is_kept = self._keeps_text(samples, keys)
        segments = [
            Segment(
                self.model.token_grid(*sample.latent_CTHW.shape[1:]),
                len(sample.text_LE) if keep else 0,
            )
            for sample, keep in zip(samples, is_kept, strict=True)
        ]
        layout = PackLayout.pack(segments, capacity=self.seq_length, text_capacity=self.text_seq_length)
        num_padding = layout.num_segments - len(samples)
        return PackedBatch(
            tokens_S1P=self._tokens(samples),
            text_L1E=self._text(samples, is_kept),
            layout=layout,
            fps_G=torch.tensor([sample.fps for sample in samples] + [0.0] * num_padding, dtype=torch.float32),
            noise_key_G=torch.tensor(keys + [0] * num_padding, dtype=torch.long),
            loss_weight_G=torch.tensor(
                [self.prior_weight if sample.is_prior else 1.0 for sample in samples] + [1.0] * num_padding
            ),
            sample_ids=(*(sample.sample_id for sample in samples), *[""] * num_padding),
        )

    def _keeps_text(self, samples: Sequence[TrainingSample], keys: list[int]) -> list[bool]:
        key_R = torch.tensor(keys, dtype=torch.long)
        number_R = uniform(key_R, torch.zeros_like(key_R), 1, stream=Stream.TEXT_DROPOUT)[:, 0]
        of_prior = self.text_dropout if self.prior_text_dropout is None else self.prior_text_dropout
        share_R = torch.tensor([of_prior if sample.is_prior else self.text_dropout for sample in samples])
        return (number_R >= share_R).tolist()

    def _tokens(self, samples: Sequence[TrainingSample]) -> Tensor:
        """Neighbours of equal size are patchified together."""
        tokens_S1P = torch.zeros(self.seq_length, 1, self.model.patch_dim)
        start = 0
        for _, group in groupby((sample.latent_CTHW for sample in samples), key=lambda latent: latent.shape):
            x_SBP = patchify(torch.stack(list(group)), self.model)
            x_RP = rearrange(x_SBP, "S B P -> (B S) P")
            tokens_S1P[start : start + len(x_RP), 0] = x_RP
            start += len(x_RP)
        return tokens_S1P

    def _text(self, samples: Sequence[TrainingSample], is_kept: Sequence[bool]) -> Tensor:
        text_L1E = torch.zeros(self.text_seq_length, 1, self.model.crossattn_emb_size)
        null_1E = samples[0].text_LE.new_zeros(1, self.model.crossattn_emb_size)
        rows_LE = torch.cat(
            [
                sample.text_LE if keep and len(sample.text_LE) else null_1E
                for sample, keep in zip(samples, is_kept, strict=True)
            ]
        )
        text_L1E[: len(rows_LE), 0] = rows_LE
        return text_L1E
