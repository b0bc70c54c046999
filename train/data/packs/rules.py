"""Cropping, selection and rejection of samples before packing."""

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from megadit.models.diffusion.noise import Stream, sample_key, uniform_numbers
from megadit.models.shared.errors import UserError
from megadit.train.config.schema import DataConfig
from megadit.train.data.packs.packed_batch import EXTRAS, PackFormat
from megadit.train.data.packs.training_sample import Frames, TrainingSample

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Floating-point types with arithmetic, unlike the 8-bit ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Settings of `data.*` for single samples."""

    format: PackFormat
    max_frames: int | None = None
    max_latent: float = 1000.0
    min_aesthetic_score: float | None = None
    keep: tuple[tuple[str, float], ...] = ()
    """(image, video, or height x width; fraction of these samples read in each epoch)."""

    @classmethod
    def of(cls, data: DataConfig, format: PackFormat, *, training: bool) -> "Rules":
        """Rules of a configuration; validation reads every sample, so that its packs do not depend on the training mix.

        Raises:
            UserError: for a fraction that is malformed, or not above 0 and at most 1.
        """
        return cls(
            format=format,
            max_frames=data.max_frames,
            max_latent=data.max_latent,
            min_aesthetic_score=data.min_aesthetic_score,
            keep=tuple(map(_share, data.keep)) if training else (),
        )

    def crop(self, sample: TrainingSample) -> TrainingSample:
        """Crop to the first `max_frames` latent frames, before lengths are measured."""
        most = self.max_frames
        if most is None or max(latent.shape[1] for latent in (sample.latent_CTHW, *_others(sample)[:1])) <= most:
            return sample
        reference, rejected, frames = sample.reference_CTHW, sample.rejected_CTHW, sample.frames
        if frames is not None:
            kept = [index for index, time in enumerate(frames.times) if time <= most - 1]
            frames = (
                Frames(frames.latents_CTHW[:, kept], tuple(frames.times[index] for index in kept)) if kept else None
            )
        return replace(
            sample,
            latent_CTHW=sample.latent_CTHW[:, :most],
            reference_CTHW=None if reference is None else reference[:, :most],
            rejected_CTHW=None if rejected is None else rejected[:, :most],
            frames=frames,
            seed=None,  # its noise had the shape of the whole clip
            reward=None,
            state=None,
        )

    def is_read(self, sample: TrainingSample) -> bool:
        """Whether this epoch reads the sample: a stateless draw by (seed, sample id, occurrence), so that every sample
        is read in some epoch."""
        share = 1.0
        for name, part in self.keep:
            if name in (sample.kind, f"{sample.height}x{sample.width}"):
                share *= part
        if share >= 1:
            return True
        key = sample_key(self.format.seed, sample.sample_id, sample.occurrence)
        return uniform_numbers(key, 1, stream=Stream.KEEP)[0] < share

    def long_text(self, sample: TrainingSample) -> tuple[str, str] | None:
        """Reason to reject a text longer than a pack, checked before buffers hold many of them; or None."""
        texts = [text for text in (sample.text_LE, sample.image_text_LE) if text is not None]
        return self._long_text() if max(map(len, texts)) > self.format.text_seq_length else None

    def _long_text(self) -> tuple[str, str]:
        return "long_text", f"its text has more tokens than data.text_seq_length, {self.format.text_seq_length}"

    def reason_against(self, sample: TrainingSample) -> tuple[str, str] | None:
        """Reason to reject a sample, as one of `REFUSALS` and in words; or None."""
        model, latent_CTHW, text_LE = self.format.model, sample.latent_CTHW, sample.text_LE
        latents = (latent_CTHW, *_others(sample))
        states = () if sample.state is None else (sample.state.latent_CTHW,)  # noisy: of any size
        texts = (text_LE, *([] if sample.image_text_LE is None else [sample.image_text_LE]))
        if not {tensor.dtype for tensor in (*latents, *states, *texts)} <= DTYPES:
            return "other_dtype", "its latent or text is not of floating-point numbers of 16 to 64 bits"
        if latent_CTHW.shape[0] != model.in_channels:
            return "other_channels", f"its latent has not the {model.in_channels} channels of model.in_channels"
        if any(len(text) and text.shape[1] != model.crossattn_emb_size for text in texts):
            width = model.crossattn_emb_size
            return "other_text_width", f"its text is not as wide as model.crossattn_emb_size, {width}"
        if self.min_aesthetic_score is not None and not (sample.aesthetic_score or 0) >= self.min_aesthetic_score:
            least = f"{self.min_aesthetic_score:g}"
            return "low_score", f"its aesthetic score is below data.min_aesthetic_score, {least}, or missing"
        for extra in (EXTRAS[name] for name in self.format.extras):
            if extra.of(sample) is None:
                return extra.refusal, extra.reason
        try:
            num_tokens, text_places = self.format.lengths(sample)
        except UserError as error:
            return "odd_size", str(error)
        if num_tokens > self.format.seq_length:
            return "too_long", f"it has more tokens than data.seq_length, {self.format.seq_length}"
        if text_places > self.format.text_seq_length:
            return self._long_text()
        if not all(map(_is_finite, (*latents, *states, *texts))):
            return "not_finite", "it holds NaN or infinite values"
        if any(latent.numel() and latent.abs().max() > self.max_latent for latent in latents):
            return "too_large", f"its latent exceeds data.max_latent, {self.max_latent:g}"
        return None


def _others(sample: TrainingSample) -> list[Tensor]:
    """Extra latents of a sample: source clip of an edit, rejected video, and frames encoded as images."""
    frames = None if sample.frames is None else sample.frames.latents_CTHW
    found = (sample.reference_CTHW, sample.rejected_CTHW, frames)
    return [latent for latent in found if latent is not None]


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition(":")
    is_size = all(part.isdecimal() for part in name.split("x")) and name.count("x") == 1
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not (name in ("image", "video") or is_size) or not 0 < value <= 1:
        raise UserError(
            f"data.keep: {text!r} must be image, video, or a height and width such as 256x256, with a share above 0 "
            "and at most 1: data.keep=[image:0.25]"
        )
    return name, value


def _is_finite(x: Tensor) -> bool:
    """Whether x has no NaN or infinity; its sum would keep either, and is faster than a check of each element."""
    return isfinite(x.sum(dtype=torch.float32).item())
