"""Packs of training samples: latents of any size in rows of fixed size.

Shapes: B samples of one size, C latent channels, T/H/W latent frames, height, width, S video tokens, L text tokens,
E text feature width, P patch dim (pt*ph*pw*C), G segments of a pack (padding included).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from megadit.infer.sampling.samplers import NoisyStep
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, sample_key, seed_key, uniform
from megadit.models.host_to_device import Need, SideStream, copy_in_turn, send_with
from megadit.models.networks.embeddings import token_sequence
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment, TokenMesh
from megadit.train.data.packs.conditioning import Drawn, draw
from megadit.train.data.packs.mixup import draw_mixture
from megadit.train.data.packs.training_sample import TrainingSample

REFUSALS = (
    "unreadable", "other_dtype", "other_channels", "other_text_width", "low_score", "no_seed", "no_reward", "odd_size",
    "too_long", "long_text", "not_finite", "too_large", "no_pair", "no_state",
)  # fmt: skip
"""Reasons for rejecting samples; `rules` has their descriptions."""
_TENSORS = "tokens_S1P", "text_L1E", "fps_G", "noise_key_G", "loss_weight_G"
"""The fields of a `PackedBatch` that are tensors."""


class Extra(NamedTuple):
    """A value of samples that only some objectives read."""

    of: Callable[[TrainingSample], float | None]
    """Returns the value; None if the sample has none, and is rejected."""
    dtype: torch.dtype
    refusal: str
    """One of `REFUSALS`."""
    reason: str


EXTRAS = {
    "seed_key": Extra(
        of=lambda sample: None if sample.seed is None else seed_key(sample.seed),
        dtype=torch.long,
        refusal="no_seed",
        reason="it names no seed; train.distill.objective=regression learns of `prepare trajectories`",
    ),
    "reward": Extra(
        of=lambda sample: sample.reward,
        dtype=torch.float32,
        refusal="no_reward",
        reason="it names no reward; train.distill.objective=diffusion_nft or flow_grpo learns of `prepare rollouts`",
    ),
    "preference": Extra(
        of=lambda sample: sample.preference,
        dtype=torch.float32,
        refusal="no_pair",
        reason="it holds no rejected video; train.distill.objective=dpo learns of `prepare preferences`",
    ),
    **{
        name: Extra(
            of=lambda sample, name=name: None if sample.state is None else getattr(sample.state.step, name),
            dtype=torch.long if name == "noise_index" else torch.float32,
            refusal="no_state",
            reason="it holds no state; train.distill.objective=flow_grpo learns of `prepare rollouts --states`",
        )
        for name in NoisyStep._fields
    },
}
"""Name in `PackedBatch.extra_G` -> value."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch: one or more concatenated packs. CPU tensors until `.to`."""

    tokens_S1P: Tensor
    """float32 clean latents, patchified, or states of sampling (`flow_grpo`); zero in the padding."""
    text_L1E: Tensor
    """float32 text features by text token; zero at null tokens and padding."""
    layout: PackLayout
    fps_G: Tensor
    """float32, 0 for images and padding."""
    noise_key_G: Tensor
    """int64 keys of the random draws of each sample (`models/diffusion/noise.py`); 0 for padding."""
    loss_weight_G: Tensor
    """float32 weight of each sample's loss; 1 except for prior samples."""
    sample_ids: tuple[str, ...]
    """Id of each segment's sample, "" for padding."""
    extra_G: Mapping[str, Tensor] = field(default_factory=dict)
    """Values that the objective alone reads, by their names in `EXTRAS`, 0 for padding; with mixup `own_share`, the
    float32 weight of each sample, and `partner`, the int64 offset in segments to its partner."""
    refused: tuple[int, ...] = (0,) * len(REFUSALS)
    """Number of samples that the reader rejected since the last batch, by reason."""
    unreadable_shards: tuple[str, ...] = ()
    """Shards of unreadable samples, on the rank that read the batch."""
    guidance_G: Tensor | None = None
    """float32 guidance scale of each sample for a guidance-distilled network, added by distillation or the network's
    wrapper."""
    real_S1P: Tensor | None = None
    """Clean tokens of the real samples, if `tokens_S1P` are those of a student's samples."""
    arrival: Callable[[], None] | None = None
    """Makes the current CUDA stream wait for the copy of the tensors."""

    @property
    def num_tokens(self) -> int:
        """Number of target tokens."""
        return self.layout.num_targets

    @property
    def conditions(self) -> dict[str, Any]:
        """Arguments of `denoise_packed` other than noisy tokens and noise levels."""
        return {
            "text_L1E": self.text_L1E,
            "fps_G": self.fps_G,
            "layout": self.layout,
            "guidance_G": self.guidance_G,
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the batch by name, those of `extra_G` among them."""
        return {name: getattr(self, name) for name in _TENSORS} | self.extra_G

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], **others: Any) -> "PackedBatch":
        """A batch with these `tensors`, and `others` of its fields."""
        return PackedBatch(**_fields(tensors), **others)

    def with_tensors(self, tensors: Mapping[str, Tensor], **others: Any) -> "PackedBatch":
        """The same batch with other tensors, by the names of `tensors`, and `others` of its fields."""
        return replace(self, **_fields(tensors), **others)

    def to(
        self, device: torch.device | str, needs: Sequence[Need] = (), side: SideStream | None = None
    ) -> "PackedBatch":
        """Copy to another device, with the layouts' tensors, asynchronously; after a copy on the stream `side` call
        `arrived`."""
        copy = copy_in_turn if side is None else side.copy
        sent = send_with(needs, self.tensors, torch.device(device), copy)
        return self.with_tensors(sent, arrival=None if side is None else side.arrival())

    def arrived(self) -> "PackedBatch":
        """Make the current stream wait for the copy."""
        if self.arrival is not None:
            self.arrival()
        return self

    def noisy(self, sigma_G: Tensor, noise_S1P: Tensor, conditioning_noise: float = 0.0) -> Tensor:
        """x0 + sigma n, [S, 1, P]; conditioning tokens have noise level `conditioning_noise`."""
        tensors = self.layout.on(sigma_G.device)
        sigma_S = sigma_G[tensors.segment_of_token_S]
        if self.layout.has_conditioning:
            sigma_S = torch.where(tensors.is_clean_S, conditioning_noise, sigma_S)
        return self.tokens_S1P + sigma_S[:, None, None] * noise_S1P

    def without_text(self) -> "PackedBatch":
        """The same batch with the null token in place of all texts."""
        layout = self.layout.without_text
        text_L1E = self.text_L1E.new_zeros(layout.text_capacity, *self.text_L1E.shape[1:])
        return replace(self, text_L1E=text_L1E, layout=layout)

    def shard(self, mesh: TokenMesh) -> "PackedBatch":
        """The context-parallel shard of this rank in `mesh`."""
        return self.cut(self.layout.shard(mesh))

    def cut(self, layout: PackLayout) -> "PackedBatch":
        """The context-parallel shard with the tokens of `layout`."""
        if layout.mesh.context == 1:
            return replace(self, layout=layout)
        tokens_S1P = self.tokens_S1P[layout.on(self.tokens_S1P.device).index_S]
        return replace(self, tokens_S1P=tokens_S1P, layout=layout)

    @staticmethod
    def concatenate(packs: "Sequence[PackedBatch]") -> "PackedBatch":
        """Several packs as one micro-batch."""
        if len(packs) == 1:
            return packs[0]
        tensors = {name: torch.cat([pack.tensors[name] for pack in packs]) for name in packs[0].tensors}
        return PackedBatch.of_tensors(
            tensors,
            layout=PackLayout.concatenate([pack.layout for pack in packs]),
            sample_ids=tuple(sample_id for pack in packs for sample_id in pack.sample_ids),
            refused=tuple(map(sum, zip(*(pack.refused for pack in packs), strict=True))),
            unreadable_shards=tuple(shard for pack in packs for shard in pack.unreadable_shards),
        )


def _fields(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a `PackedBatch`, from tensors by name."""
    extra_G = {name: tensor for name, tensor in tensors.items() if name not in _TENSORS}
    return {name: tensors[name] for name in _TENSORS} | {"extra_G": extra_G}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFormat:
    """Size of a pack, and settings of dropout, conditioning and mixup."""

    model: DiTConfig
    seq_length: int
    """Video tokens of a pack."""
    text_seq_length: int
    """Text tokens of a pack."""
    seed: int
    text_dropout: float
    """Fraction of samples whose text is dropped, 0 to 1."""
    prior_weight: float = 1.0
    """Loss weight of a prior sample."""
    prior_text_dropout: float | None = None
    """Fraction of prior samples whose text is dropped; None: `text_dropout`."""
    extras: tuple[str, ...] = ()
    """Names in `EXTRAS` of values that samples must have."""
    conditioning: tuple[tuple[str, float], ...] = ()
    """Conditioning modes and fractions of samples; see `conditioning.draw`, also for `conditioning_dropout`."""
    conditioning_dropout: tuple[float, float, float] = (0.0, 0.0, 0.0)
    mixup: float = 0.0
    """Parameter a of mixup; 0: no mixup."""

    def segments(self, sample: TrainingSample) -> list[Segment]:
        """The places that a sample needs, two for a pair, whether its text is dropped or not.

        Raises:
            UserError: if a side of the latent is not a multiple of the patch, or the network has no positions for it.
        """
        drawn = self._draw(sample, sample_key(self.seed, sample.sample_id, sample.occurrence))
        segment = self._segment(sample, drawn, keeps_text=True)
        self.model.check_grid(segment.reach)
        return [segment] * len(sample.videos)

    def lengths(self, sample: TrainingSample) -> tuple[int, int]:
        """Video tokens and text tokens of `segments`."""
        segments = self.segments(sample)
        return sum(segment.num_tokens for segment in segments), sum(segment.text_places for segment in segments)

    def pack(self, samples: Sequence[TrainingSample]) -> PackedBatch:
        """Concatenate samples in the given order, both videos of a pair, and pad.

        Text is dropped if the first uniform number of the sample's key is below `text_dropout`, which depends only on
        (seed, sample id, occurrence).
        """
        samples = [video for sample in samples for video in sample.videos]
        keys = [sample_key(self.seed, sample.sample_id, sample.occurrence) for sample in samples]
        drawn = [self._draw(sample, key) for sample, key in zip(samples, keys, strict=True)]
        is_read = [
            keep if one.keeps_text is None else one.keeps_text
            for one, keep in zip(drawn, self._keeps_text(samples, keys), strict=True)
        ]
        segments = [
            self._segment(sample, one, keeps_text=keep)
            for sample, one, keep in zip(samples, drawn, is_read, strict=True)
        ]
        layout = PackLayout.pack(segments, capacity=self.seq_length, text_capacity=self.text_seq_length)
        num_padding = layout.num_segments - len(samples)
        latents = [self._latents(sample, one) for sample, one in zip(samples, drawn, strict=True)]
        mixture = draw_mixture(layout.segments, keys, self.mixup)
        extra_G = {name: self._extra(name, samples, num_padding) for name in self.extras}
        if self.mixup:
            extra_G |= {"own_share": mixture.share_G, "partner": mixture.partner_G}
        return PackedBatch(
            tokens_S1P=self._tokens(mixture.of(latents)),
            text_L1E=self._text([one.text_LE for one in drawn], is_read),
            layout=layout,
            fps_G=torch.tensor([sample.fps for sample in samples] + [0.0] * num_padding, dtype=torch.float32),
            noise_key_G=torch.tensor(keys + [0] * num_padding, dtype=torch.long),
            loss_weight_G=torch.tensor(
                [self.prior_weight if sample.is_prior else 1.0 for sample in samples] + [1.0] * num_padding
            ),
            sample_ids=(*(sample.sample_id for sample in samples), *[""] * num_padding),
            extra_G=extra_G,
        )

    def _latents(self, sample: TrainingSample, drawn: Drawn) -> Tensor:
        if drawn.clean is not None:
            return drawn.clean.latents_BCTHW[0]
        return sample.state.latent_CTHW if "sigma" in self.extras else sample.latent_CTHW

    def _extra(self, name: str, samples: Sequence[TrainingSample], num_padding: int) -> Tensor:
        values = [EXTRAS[name].of(sample) for sample in samples]
        return torch.tensor(values + [0] * num_padding, dtype=EXTRAS[name].dtype)

    def _draw(self, sample: TrainingSample, key: int) -> Drawn:
        if not self.conditioning:
            return Drawn(None, sample.text_LE, None)
        return draw(sample, key, self.conditioning, self.conditioning_dropout, self.model)

    def _segment(self, sample: TrainingSample, drawn: Drawn, *, keeps_text: bool) -> Segment:
        text_length = len(drawn.text_LE) if keeps_text else 0
        if drawn.clean is not None:
            return drawn.clean.segment(self.model, text_length)
        return Segment(self.model.sample_grid(*sample.latent_CTHW.shape[1:]), text_length)

    def _keeps_text(self, samples: Sequence[TrainingSample], keys: list[int]) -> list[bool]:
        key_R = torch.tensor(keys, dtype=torch.long)
        number_R = uniform(key_R, torch.zeros_like(key_R), 1, stream=Stream.TEXT_DROPOUT)[:, 0]
        of_prior = self.text_dropout if self.prior_text_dropout is None else self.prior_text_dropout
        share_R = torch.tensor([of_prior if sample.is_prior else self.text_dropout for sample in samples])
        return (number_R >= share_R).tolist()

    def _tokens(self, latents: Sequence[Tensor]) -> Tensor:
        """Patchify all latents; adjacent ones of equal size at once."""
        tokens_S1P = torch.zeros(self.seq_length, 1, self.model.patch_dim)
        start = 0
        for _, group in groupby(latents, key=lambda latent: latent.shape):
            x_SBP = token_sequence(torch.stack(list(group)), self.model)
            x_RP = rearrange(x_SBP, "S B P -> (B S) P")
            tokens_S1P[start : start + len(x_RP), 0] = x_RP
            start += len(x_RP)
        return tokens_S1P

    def _text(self, texts: Sequence[Tensor], is_read: Sequence[bool]) -> Tensor:
        text_L1E = torch.zeros(self.text_seq_length, 1, self.model.crossattn_emb_size)
        null_1E = texts[0].new_zeros(1, self.model.crossattn_emb_size)
        rows_LE = torch.cat(
            [text_LE if keep and len(text_LE) else null_1E for text_LE, keep in zip(texts, is_read, strict=True)]
        )
        text_L1E[: len(rows_LE), 0] = rows_LE
        return text_L1E
