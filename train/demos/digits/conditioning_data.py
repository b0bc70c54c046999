"""Digits for conditional training: clips with incomplete captions, and clips to edit with an instruction.

Shapes: B clips, C latent channels (of the video, colour channels), T/H/W frames, height, width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.shared.progress import Progress
from megadit.train.data.packs.training_sample import Frames, encode_frames, frame_times, keyframe_places
from megadit.train.data.writer import DatasetWriter
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.data import Attributes

NUM_CLIPS, NUM_EDITS, NUM_VAL = 8000, 2000, 256
CHUNK = 500
FRAMES = keyframe_places(digits.NUM_FRAMES, 2)
"""Frames of a clip that are also encoded as images, for `last_frame` and `keyframes`."""
NEUTRAL_WORDINGS = (
    "a digit moving {pace} {direction}",
    "something moving {direction} {pace}",
    "a digit that slides {pace} {direction}",
    "the digit moves {direction} {pace}",
    "it drifts {pace} {direction}",
    "a video of a digit drifting {direction} {pace}",
)
"""Captions of clips without the digit and its colour."""
INSTRUCTIONS = {
    "colour": ("make it {value}", "change the colour to {value}", "paint it {value}"),
    "digit": ("turn it into a {value}", "change the digit to {value}", "make it the number {value}"),
    "direction": ("let it move {value}", "change the direction to {value}", "make it go {value}"),
}
"""Changed attribute -> wordings of the instruction; all others stay."""


def neutral_caption(attributes: Attributes, generator: torch.Generator) -> str:
    """A caption that names neither digit nor colour; the pace is said in half of them."""
    paces = ("", digits.PACES[attributes.speed])
    choices = list(product(NEUTRAL_WORDINGS, digits.DIRECTION_WORDINGS[attributes.direction], paces))
    wording, direction, pace = choices[_draw(len(choices), generator)]
    return " ".join(wording.format(direction=direction, pace=pace).split())


def change(attributes: Attributes, name: str, generator: torch.Generator) -> tuple[Attributes, str]:
    """The attributes after an edit of `name`, and an instruction that asks for it."""
    values = {
        "colour": list(digits.COLOURS),
        "digit": list(range(len(digits.DIGITS))),
        "direction": list(digits.DIRECTION_WORDINGS),
    }
    others = [value for value in values[name] if value != getattr(attributes, name)]
    value = others[_draw(len(others), generator)]
    wordings = INSTRUCTIONS[name]
    words = wordings[_draw(len(wordings), generator)].format(value=_word(name, value, generator))
    return replace(attributes, **{name: value}), words.replace("a eight", "an eight").replace("a 8", "an 8")


def _word(name: str, value: str | int, generator: torch.Generator) -> str:
    if name == "digit":
        return (digits.DIGITS[value], str(value))[_draw(2, generator)]
    return digits.DIRECTION_WORDINGS[value][_draw(2, generator)] if name == "direction" else value


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def draw_edit_pairs(
    before: Sequence[Attributes], after: Sequence[Attributes], split: digits.Split, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Clips before and after edits, BCTHW in [-1, 1] each: on one path, and of one glyph unless the digit differs."""
    state = generator.get_state()
    clips = digits.draw_clips(before, split, generator)
    generator.set_state(state)  # the same draws: glyphs by rank among those of their digit, and places
    return clips, digits.draw_clips(after, split, generator)


def write_conditioning(
    out: Path,
    bundle: Bundle,
    *,
    num_clips: int = NUM_CLIPS,
    num_edits: int = NUM_EDITS,
    num_val: int = NUM_VAL,
    seed: int = 0,
) -> None:
    """Write a data set for the recipe `digits_conditioned`, with the encoders of the model to fine-tune."""
    generator = torch.Generator().manual_seed(seed + 2)
    tokenizer, text_encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    with (
        DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder) as writer,
        Progress(num_clips + num_edits + num_val, "writing samples") as bar,
    ):
        rounds = -(-(num_clips + num_edits) // CHUNK)
        for turn in range(rounds):
            for count, write in ((num_clips, _write_clips), (num_edits, _write_edits)):
                first, last = (count * n // rounds for n in (turn, turn + 1))
                write(writer, "train", range(first, last), generator)
                bar.advance(last - first)
        _write_clips(writer, "val", range(num_val), generator)
        bar.advance(num_val)


def _write_clips(writer: DatasetWriter, split: str, numbers: range, generator: torch.Generator) -> None:
    """Write clips with some frames encoded as images, and a neutral caption for use with conditioning."""
    glyphs = "train" if split == "train" else "heldout"
    attributes = digits.random_attributes(len(numbers), images=False, generator=generator)
    clips = digits.draw_clips(attributes, glyphs, generator)
    captions = digits.random_captions(attributes, glyphs, generator)
    neutral = [features for _, features in _texts(writer, [neutral_caption(each, generator) for each in attributes])]
    times = frame_times(FRAMES, writer.tokenizer)
    rows = zip(
        [f"{split}-given-{number:06d}" for number in numbers],
        _latents(writer, clips),
        _texts(writer, captions),
        neutral,
        encode_frames(writer.tokenizer.encode, clips, FRAMES).half(),
        strict=True,
    )
    for key, latent, text, image_text_LE, frames in rows:
        _add(writer, split, key, latent, text, image_text_LE=image_text_LE, frames=Frames(frames, times))


def _write_edits(writer: DatasetWriter, split: str, numbers: range, generator: torch.Generator) -> None:
    before = digits.random_attributes(len(numbers), images=False, generator=generator)
    names = [list(INSTRUCTIONS)[number % len(INSTRUCTIONS)] for number in numbers]
    after, instructions = zip(
        *(change(each, name, generator) for each, name in zip(before, names, strict=True)), strict=True
    )
    sources, results = draw_edit_pairs(before, after, "train", generator)
    keys = [f"{split}-edit-{number:06d}" for number in numbers]
    latents = zip(_latents(writer, results), _latents(writer, sources), strict=True)
    for key, (latent, source), row in zip(keys, latents, _texts(writer, list(instructions)), strict=True):
        _add(writer, split, key, latent, row, reference_CTHW=source)


def _add(
    writer: DatasetWriter, split: str, key: str, latent_CTHW: Tensor, text: tuple[str, Tensor], **conditioning
) -> None:
    caption, text_LE = text
    writer.add(
        split,
        key,
        latent_CTHW=latent_CTHW,
        text_LE=text_LE,
        caption=caption,
        num_frames=digits.NUM_FRAMES,
        height=digits.FRAME_SIZE,
        width=digits.FRAME_SIZE,
        fps=digits.FPS,
        **conditioning,
    )


def _latents(writer: DatasetWriter, clips_BCTHW: Tensor) -> Tensor:
    return writer.tokenizer.encode(clips_BCTHW).half()


def _texts(writer: DatasetWriter, captions: list[str]) -> Iterator[tuple[str, Tensor]]:
    text = writer.text_encoder.encode(captions)
    for caption, features_LE, length in zip(captions, text.features_BLE, text.length_B.tolist(), strict=True):
        yield caption, features_LE[:length]
