"""Handwritten digits as images: in pixels with their names as labels, `megadit prepare digit_classes OUT`, or coloured,
with captions, `megadit prepare digit_captions OUT`; in motion, with what a clip shows as its label, `megadit prepare
digit_clips OUT`; as latents to make images from, `megadit prepare digit_images OUT`, and the same pictures in
twice as many pixels along each side, `megadit prepare digit_images_64 OUT`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.models.text_encoders import HashedWordEncoder, TextEncoder
from megadit.models.text_encoders.class_labels import ClassLabels
from megadit.models.text_encoders.token_ids import TokenIds, learned_words
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.prepare.drawn import (
    NUM_FITTING,
    PREVIEW,
    TEXT_WIDTH,
    Chunk,
    report,
    save_preview,
    side_by_side,
    write_chunk,
)
from megadit.train.data.writer import DatasetWriter, is_done
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.samples import DIGITS

NUM_IMAGES = 20_000
NUM_HELDOUT = 600
"""Captioned images of writers that training never sees."""
MAX_SHIFT = 3.0
"""Labelled training digits lie within this many pixels of the middle, along each axis."""
CHUNK = 250
"""Samples drawn and written at a time."""


def _pixels() -> HaarTokenizer:
    return HaarTokenizer(temporal_compression=1, spatial_compression=1)


def _latents() -> HaarTokenizer:
    """Tokenizer like that of the demo's clips, fitted to images of 32 x 32: the same for all sizes."""
    generator = torch.Generator().manual_seed(0)
    attributes = digits.random_attributes(NUM_FITTING, images=True, generator=generator)
    images_BCTHW = digits.draw_images(attributes, "train", generator)
    return HaarTokenizer.fit([images_BCTHW], channels=DIGITS.channels, temporal_compression=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """A data set of single digits, still or in motion."""

    name: str
    description: str
    make_text_encoder: Callable[[], TextEncoder]
    draw: Callable[[int, int], Iterator[Chunk]]
    """(number of training images, seed) -> all samples."""
    make_tokenizer: Callable[[], HaarTokenizer] = _pixels


def prepare_images(images: Images, out: Path, *, num_images: int = NUM_IMAGES, seed: int = 0) -> DatasetInfo:
    """Writes them. Raises UserError for a count that is not positive."""
    if num_images < 1:
        raise UserError(f"num_images={num_images} must be at least 1")
    start = time.monotonic()
    tokenizer = images.make_tokenizer()
    writer = DatasetWriter(out, tokenizer=tokenizer, text_encoder=images.make_text_encoder())
    preview: list[Tensor] = []
    with writer, Progress(num_images, "writing samples") as bar:
        for chunk in images.draw(num_images, seed):
            write_chunk(writer, chunk, tokenizer.encode(chunk.video_BCTHW).half())
            preview = preview or [side_by_side(chunk.video_BCTHW[:8], chunk.video_BCTHW[8:16])]
            if chunk.split == "train":
                bar.advance(len(chunk.keys))
    save_preview(out / PREVIEW, preview[0])
    info = DatasetInfo.read(out)
    report(info, time.monotonic() - start)
    return info


def draw_labelled(num_images: int, seed: int) -> Iterator[Chunk]:
    """Training glyphs at random places, and each held-out one once in the middle."""
    generator = torch.Generator().manual_seed(seed)
    num_glyphs, num_heldout = (len(digits.load_glyphs(split).digit_B) for split in ("train", "heldout"))
    for first in range(0, num_images, CHUNK):
        count = min(CHUNK, num_images - first)
        index_B = torch.randint(num_glyphs, (count,), generator=generator)
        middle_B2 = MAX_SHIFT * (2 * torch.rand(count, 2, generator=generator) - 1)
        yield _chunk("train", first, *digits.draw_glyphs("train", index_B, middle_B2))
    shuffled = torch.randperm(num_heldout, generator=generator)
    yield _chunk("val", 0, *digits.draw_glyphs("heldout", shuffled, torch.zeros(num_heldout, 2)))


def draw_captioned(num_images: int, seed: int, *, zoom: int = 1) -> Iterator[Chunk]:
    """Digits of all colours at random places, in the words of training; the last ones by held-out writers. The same
    pictures at every `zoom` (`digits.data.render_clips`)."""
    generator = torch.Generator().manual_seed(seed)
    for split, writers, total in (("train", "train", num_images), ("val", "heldout", NUM_HELDOUT)):
        for first in range(0, total, CHUNK):
            attributes = digits.random_attributes(min(CHUNK, total - first), images=True, generator=generator)
            images_BCTHW = digits.draw_images(attributes, writers, generator, zoom=zoom)
            yield _chunk(split, first, images_BCTHW, digits.random_captions(attributes, "train", generator))


def clip_label(attributes: digits.Attributes) -> str:
    """The class of a clip, "red seven left"."""
    return f"{attributes.colour} {digits.DIGITS[attributes.digit]} {attributes.direction}"


def _all_shown() -> list[digits.Attributes]:
    """All contents of clips, in the order of classes: a classifier must also know those that the demo's training leaves
    out."""
    return [
        digits.Attributes(digit=digit, colour=colour, direction=direction)
        for colour, digit, direction in product(digits.COLOURS, range(10), digits.DIRECTIONS)
    ]


def draw_clips(num_clips: int, seed: int) -> Iterator[Chunk]:
    """Training glyphs of all colours in motion, either way of either axis; each class at both speeds by held-out
    writers."""
    generator, shown = torch.Generator().manual_seed(seed), _all_shown()
    drawn = torch.randint(len(shown) * len(digits.SPEEDS), (num_clips,), generator=generator).tolist()
    heldout = range(len(shown) * len(digits.SPEEDS))
    for split, writers, numbers in (("train", "train", drawn), ("val", "heldout", heldout)):
        for first in range(0, len(numbers), CHUNK):
            attributes = [
                digits.with_speed(shown[number // 2], list(digits.SPEEDS)[number % 2])
                for number in numbers[first : first + CHUNK]
            ]
            clips_BCTHW = digits.draw_clips(attributes, writers, generator)
            yield _chunk(split, first, clips_BCTHW, list(map(clip_label, attributes)), digits.FPS)


def _chunk(split: str, first: int, video_BCTHW: Tensor, captions: list[str], fps: float = 0.0) -> Chunk:
    keys = [f"{split}-{number:06d}" for number in range(first, first + len(captions))]
    return Chunk(split=split, keys=keys, video_BCTHW=video_BCTHW, captions=captions, fps=fps)


def _words() -> TokenIds:
    """Tokenizer of the words of all training captions, as `clip_digits` reads them."""
    every = (digits.Attributes(digit=digit, colour=colour) for digit, colour in product(range(10), digits.COLOURS))
    texts = [caption for attributes in every for caption in digits.captions(attributes, "train")]
    tower = NAMED_CONFIGS["clip_digits"].text_tower
    return learned_words(texts, num_words=tower.num_words, max_length=tower.max_length)


CLASSES = Images(
    name="digit_classes",
    description="Images of the handwritten digits inside scikit-learn with their names as labels, in pixels.",
    make_text_encoder=lambda: ClassLabels(names=digits.DIGITS),
    draw=draw_labelled,
)
CAPTIONS = Images(
    name="digit_captions",
    description="Coloured images of the handwritten digits inside scikit-learn with captions, in pixels and tokens.",
    make_text_encoder=_words,
    draw=draw_captioned,
)
CLIPS = Images(
    name="digit_clips",
    description="Clips of the handwritten digits of scikit-learn, labelled by colour, digit and direction, in pixels.",
    make_text_encoder=lambda: ClassLabels(names=tuple(map(clip_label, _all_shown()))),
    draw=draw_clips,
)
LATENTS = tuple(
    Images(
        name=name,
        description=f"Coloured images of the handwritten digits inside scikit-learn with captions, {side} x {side}.",
        make_text_encoder=lambda: HashedWordEncoder(dim=TEXT_WIDTH),
        draw=partial(draw_captioned, zoom=zoom),
        make_tokenizer=_latents,
    )
    for name, zoom, side in (("digit_images", 1, 32), ("digit_images_64", 2, 64))
)
SOURCES = {each.name: each for each in (CLASSES, CAPTIONS, CLIPS, *LATENTS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesOptions:
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    num_images: int = setting(NUM_IMAGES, "training images, or clips (default: {default})")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare` for one of `SOURCES`."""
    images = SOURCES[source]
    options = read_options(ImagesOptions, argv, prog=f"megadit prepare {images.name}", description=images.description)
    if not is_done(options.out, overwrite=options.overwrite):
        prepare_images(images, options.out, num_images=options.num_images, seed=options.seed)
    return 0
