"""Conditioning of training samples: the part of a sample that is given, and not to be predicted.

A use is drawn for each sample, and its part of the sample, by the sample's key alone. Adding a use is one function and
its row in `KINDS`; sampling builds the same from a user's input (`infer/conditioning/items.py`).

Shapes: C latent channels, T/H/W latent frames, height, width, E extra latents beside them, all given.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, uniform_numbers
from megadit.models.networks.conditioning import with_conditioning
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError, choose_one
from megadit.train.data.packs.training_sample import TrainingSample

NUM_DRAWS = 10
"""Uniform numbers of one sample: its use, its dropout, seven that a use may spend, and which caption it has."""
SHARE_OF_IMAGE_TEXTS = 0.75
"""Share of samples with a caption for conditioning that are trained with it; the others keep the full one."""


class SampleConditioning(NamedTuple):
    """Conditioning of one sample."""

    is_clean_THW: Tensor
    """bool, True where given: the positions of the video's latents, then those of `extra_CTHW`."""
    extra_CTHW: Tensor | None = None
    """Latents of frames encoded as images, or of the clip that is edited."""
    extra_times: tuple[float, ...] = ()
    """Times of the extra latents, in latent frames."""

    def segment(self, model: DiTConfig, text_length: int) -> Segment:
        """The sample's tokens; see `with_conditioning`."""
        return with_conditioning(model, self.is_clean_THW, self.extra_times, text_length)

    def latents(self, sample: TrainingSample) -> Tensor:
        """All of its latents, [C, T + E, H, W]."""
        if self.extra_CTHW is None:
            return sample.latent_CTHW
        return torch.cat([sample.latent_CTHW, self.extra_CTHW.to(sample.latent_CTHW.dtype)], dim=1)


Draws = Sequence[float]
"""Seven uniform numbers."""


def _nothing(sample: TrainingSample) -> Tensor:
    return torch.zeros(sample.latent_CTHW.shape[1:], dtype=torch.bool)


def _first(sample: TrainingSample, count: int) -> SampleConditioning | None:
    """The first `count` latent frames, where others follow."""
    is_clean_THW = _nothing(sample)
    is_clean_THW[:count] = True
    return SampleConditioning(is_clean_THW) if 0 < count < len(is_clean_THW) else None


def first_frame(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Image to video: the first latent frame, which a causal tokenizer makes of the first frame alone."""
    return _first(sample, model.patch_temporal)


def prefix(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Continuation: one latent frame or more from the beginning."""
    return _first(sample, _frames(sample, draws[0], model))


def suffix(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Give one latent frame or more at the end; the network predicts what leads up to them."""
    part = _first(sample, _frames(sample, draws[0], model))
    return part and SampleConditioning(part.is_clean_THW.flip(0))


def _frames(sample: TrainingSample, draw: float, model: DiTConfig) -> int:
    """Number of given latent frames, at least one token's and not all."""
    pt = model.patch_temporal
    return pt * (1 + int(draw * (sample.latent_CTHW.shape[1] // pt - 1)))


def last_frame(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """The last frame as an image, in every fourth sample with the first one."""
    if sample.frames is None:
        return None
    last = max(range(len(sample.frames.times)), key=lambda index: sample.frames.times[index])
    return _with_frames(sample, [last], with_first=draws[0] < 0.25, model=model)


def keyframes(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Give frames encoded as images, each with probability 1/2, and in half of the samples the first latent frame."""
    if sample.frames is None:
        return None
    count = len(sample.frames.times)
    chosen = [index for index in range(count) if draws[1 + index % (len(draws) - 1)] < 0.5]
    return _with_frames(sample, chosen or [int(draws[1] * count)], with_first=draws[0] < 0.5, model=model)


def _with_frames(
    sample: TrainingSample, chosen: Sequence[int], *, with_first: bool, model: DiTConfig
) -> SampleConditioning | None:
    is_clean_THW = _nothing(sample)
    is_clean_THW[: model.patch_temporal if with_first else 0] = True
    extra_CTHW = sample.frames.latents_CTHW[:, list(chosen)]
    is_extra_THW = torch.ones(extra_CTHW.shape[1:], dtype=torch.bool)
    times = tuple(sample.frames.times[index] for index in chosen)
    return SampleConditioning(torch.cat([is_clean_THW, is_extra_THW]), extra_CTHW, times)


def inpaint(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Give all but a box, a quarter to all of each side; in every other video for a part of the time alone."""
    targets = []
    patches = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    for axis, (size, patch) in enumerate(zip(sample.latent_CTHW.shape[1:], patches, strict=True)):
        share = 1.0 if axis == 0 and draws[6] < 0.5 else 0.25 + 0.75 * draws[2 * axis]
        length = math.ceil(share * (size // patch))
        first = int(draws[2 * axis + 1] * (size // patch - length + 1))
        targets.append(slice(patch * first, patch * (first + length)))
    is_clean_THW = ~_nothing(sample)
    is_clean_THW[tuple(targets)] = False
    return SampleConditioning(is_clean_THW) if is_clean_THW.any() else None


def edit(sample: TrainingSample, draws: Draws, model: DiTConfig) -> SampleConditioning | None:
    """Give the clip that an instruction changes, frame for frame beside the target (InstructPix2Pix, arXiv 2211.09800,
    with the source as tokens of its own rather than channels)."""
    if sample.reference_CTHW is None:
        return None
    source_CTHW = sample.reference_CTHW
    is_source_THW = torch.ones(source_CTHW.shape[1:], dtype=torch.bool)
    is_clean_THW = torch.cat([_nothing(sample), is_source_THW])
    return SampleConditioning(is_clean_THW, source_CTHW, tuple(map(float, range(source_CTHW.shape[1]))))


KINDS: dict[str, Callable[[TrainingSample, Draws, DiTConfig], SampleConditioning | None]] = {
    "first_frame": first_frame,
    "last_frame": last_frame,
    "keyframes": keyframes,
    "prefix": prefix,
    "suffix": suffix,
    "inpaint": inpaint,
    "edit": edit,
}
"""Conditioning modes; one that does not suit a sample gives nothing of it."""


class Drawn(NamedTuple):
    """Conditioning and text drawn for one sample."""

    part: SampleConditioning | None
    text_LE: Tensor
    keeps_text: bool | None
    """Whether the text stays; None without conditioning: `data.text_dropout` decides."""


def draw(
    sample: TrainingSample,
    key: int,
    shares: Sequence[tuple[str, float]],
    dropout: tuple[float, float, float],
    model: DiTConfig,
) -> Drawn:
    """Draw the conditioning of a sample by its key.

    Args:
        shares: of samples that each use is for. Those with a clip to edit are for `edit`, and no others.
        dropout: shares of the samples drawn that lose what is given, their text, or both: guidance needs each
            (arXiv 2211.09800, section 3.2.1).
    """
    chosen, dropped, *draws = uniform_numbers(key, NUM_DRAWS, stream=Stream.CONDITIONING)
    is_edit = sample.reference_CTHW is not None
    for name, share in shares:
        if (name == "edit") != is_edit:
            continue
        if chosen < share:
            part = KINDS[name](sample, draws, model)
            break
        chosen -= share
    else:
        part = None
    if part is None:
        return Drawn(None, sample.text_LE, None)
    conditioning_alone, text_alone, both = dropout
    loses_conditioning = (
        dropped < conditioning_alone
        or conditioning_alone + text_alone <= dropped < conditioning_alone + text_alone + both
    )
    loses_text = conditioning_alone <= dropped < conditioning_alone + text_alone + both
    has_own_text = sample.image_text_LE is not None and not loses_conditioning and draws[-1] < SHARE_OF_IMAGE_TEXTS
    text_LE = sample.image_text_LE if has_own_text else sample.text_LE
    return Drawn(None if loses_conditioning else part, text_LE, not loses_text)


def parse_kinds(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """(use, share) of `data.conditioning`.

    Raises:
        UserError: for an unknown use, a share that is not above 0 and at most 1, and shares of more than all samples.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition(":")
        choose_one(name, KINDS, f"data.conditioning: unknown conditioning {name!r}")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = 0.0
        if not 0 < shares[name] <= 1:
            raise UserError(f"data.conditioning: {text!r} needs a share above 0 and at most 1, as in [first_frame:0.2]")
    if (total := sum(share for name, share in shares.items() if name != "edit")) > 1 + 1e-9:
        raise UserError(
            f"data.conditioning: the shares add up to {total:g}, more than 1; the rest is trained without conditioning"
        )
    return tuple(shares.items())
