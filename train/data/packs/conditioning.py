"""Conditioning of training samples: clean latents that the network is given and need not predict.

The conditioning mode of a sample, and which latents are clean, are drawn by the sample's key alone. To add a mode, add
a function and its entry in `KINDS`; sampling builds the same from a user's input (`infer/conditioning/items.py`).

Shapes: C latent channels, T/H/W latent frames, height, width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, uniform_numbers
from megadit.models.networks.conditioning import CleanLatents
from megadit.models.shared.errors import UserError, choose_one
from megadit.train.data.packs.training_sample import TrainingSample

NUM_DRAWS = 10
"""Uniform numbers per sample: for mode, dropout, seven for the mode's function, and the choice of caption."""
SHARE_OF_IMAGE_TEXTS = 0.75
"""Probability that a sample with conditioning uses its caption for conditioning, if it has one, not the full one."""


Draws = Sequence[float]
"""Seven uniform numbers for the function of a mode."""


def _nothing(sample: TrainingSample) -> Tensor:
    return torch.zeros(sample.latent_CTHW.shape[1:], dtype=torch.bool)


def _clean(
    sample: TrainingSample, is_clean_THW: Tensor, extra_CTHW: Tensor | None = None, times: tuple[float, ...] = ()
) -> CleanLatents:
    """The latents of a sample as a batch of one, with clean ones of frames encoded as images, or of the source clip of
    an edit, after them."""
    latents_CTHW = sample.latent_CTHW
    if extra_CTHW is not None:
        latents_CTHW = torch.cat([latents_CTHW, extra_CTHW.to(latents_CTHW.dtype)], dim=1)
        is_clean_THW = torch.cat([is_clean_THW, torch.ones(extra_CTHW.shape[1:], dtype=torch.bool)])
    return CleanLatents(latents_CTHW[None], is_clean_THW, times)


def _first(sample: TrainingSample, count: int) -> CleanLatents | None:
    """Condition on the first `count` latent frames, if others follow."""
    is_clean_THW = _nothing(sample)
    is_clean_THW[:count] = True
    return _clean(sample, is_clean_THW) if 0 < count < len(is_clean_THW) else None


def first_frame(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """Image-to-video: the first latent frame, which a causal tokenizer encodes from the first frame alone."""
    return _first(sample, model.patch_temporal)


def prefix(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """Video continuation: one or more latent frames at the start."""
    return _first(sample, _frames(sample, draws[0], model))


def suffix(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """One or more latent frames at the end."""
    part = _first(sample, _frames(sample, draws[0], model))
    return part and replace(part, is_clean_THW=part.is_clean_THW.flip(0))


def _frames(sample: TrainingSample, draw: float, model: DiTConfig) -> int:
    """Number of conditioning latent frames: at least one patch, and not all."""
    pt = model.patch_temporal
    return pt * (1 + int(draw * (sample.latent_CTHW.shape[1] // pt - 1)))


def last_frame(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """The last frame, encoded as an image; in a quarter of the samples also the first latent frame."""
    if sample.frames is None:
        return None
    last = max(range(len(sample.frames.times)), key=lambda index: sample.frames.times[index])
    return _with_frames(sample, [last], with_first=draws[0] < 0.25, model=model)


def keyframes(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """Frames encoded as images, each with probability 1/2; in half of the samples also the first latent frame."""
    if sample.frames is None:
        return None
    count = len(sample.frames.times)
    chosen = [index for index in range(count) if draws[1 + index % (len(draws) - 1)] < 0.5]
    chosen = chosen or [int((2 * draws[1] - 1) * count)]  # of a number that is at least 1/2 here
    return _with_frames(sample, chosen, with_first=draws[0] < 0.5, model=model)


def _with_frames(
    sample: TrainingSample, chosen: Sequence[int], *, with_first: bool, model: DiTConfig
) -> CleanLatents | None:
    is_clean_THW = _nothing(sample)
    is_clean_THW[: model.patch_temporal if with_first else 0] = True
    times = tuple(sample.frames.times[index] for index in chosen)
    return _clean(sample, is_clean_THW, sample.frames.latents_CTHW[:, list(chosen)], times)


def inpaint(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """All but a box of 1/4 to 1 of each side; in half of the videos the box covers only a part of the time."""
    targets = []
    patches = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    for axis, (size, patch) in enumerate(zip(sample.latent_CTHW.shape[1:], patches, strict=True)):
        share = 1.0 if axis == 0 and draws[6] < 0.5 else 0.25 + 0.75 * draws[2 * axis]
        length = math.ceil(share * (size // patch))
        first = int(draws[2 * axis + 1] * (size // patch - length + 1))
        targets.append(slice(patch * first, patch * (first + length)))
    is_clean_THW = ~_nothing(sample)
    is_clean_THW[tuple(targets)] = False
    return _clean(sample, is_clean_THW) if is_clean_THW.any() else None


def edit(sample: TrainingSample, draws: Draws, model: DiTConfig) -> CleanLatents | None:
    """The source clip of an edit, aligned with the target frame by frame (InstructPix2Pix, arXiv 2211.09800, but as
    extra tokens rather than channels)."""
    if sample.reference_CTHW is None:
        return None
    source_CTHW = sample.reference_CTHW
    return _clean(sample, _nothing(sample), source_CTHW, tuple(map(float, range(source_CTHW.shape[1]))))


KINDS: dict[str, Callable[[TrainingSample, Draws, DiTConfig], CleanLatents | None]] = {
    "first_frame": first_frame,
    "last_frame": last_frame,
    "keyframes": keyframes,
    "prefix": prefix,
    "suffix": suffix,
    "inpaint": inpaint,
    "edit": edit,
}
"""Conditioning mode -> its function; it returns None for a sample to which it does not apply."""


class Drawn(NamedTuple):
    """Conditioning and text drawn for one sample."""

    clean: CleanLatents | None
    text_LE: Tensor
    keeps_text: bool | None
    """Whether the text is kept; None without conditioning: `data.text_dropout` applies."""


def draw(
    sample: TrainingSample,
    key: int,
    shares: Sequence[tuple[str, float]],
    dropout: tuple[float, float, float],
    model: DiTConfig,
) -> Drawn:
    """Draw the conditioning of a sample by its key.

    Args:
        shares: fraction of samples per mode. `edit` applies to the samples with a source clip, which get no other mode.
        dropout: fractions of the samples with conditioning that lose their conditioning, their text, or both, which
            guidance needs (arXiv 2211.09800, section 3.2.1).
    """
    chosen, dropped, *draws, of_caption = uniform_numbers(key, NUM_DRAWS, stream=Stream.CONDITIONING)
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
    has_own_text = sample.image_text_LE is not None and not loses_conditioning and of_caption < SHARE_OF_IMAGE_TEXTS
    text_LE = sample.image_text_LE if has_own_text else sample.text_LE
    return Drawn(None if loses_conditioning else part, text_LE, not loses_text)


def parse_kinds(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse `data.conditioning` to (mode, fraction).

    Raises:
        UserError: for an unknown mode, a fraction not above 0 and at most 1, or fractions that sum to more than 1.
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
