"""Handwritten digits as images with their names as labels, in pixels: `megadit prepare digit_classes OUT`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.shared.options import read_options
from megadit.models.shared.progress import Progress
from megadit.models.shared.setting import setting
from megadit.models.text_encoders.class_labels import ClassLabels
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.dataset_info import DatasetInfo
from megadit.train.data.drawn import PREVIEW, Chunk, report, save_preview, side_by_side, write_chunk
from megadit.train.data.writer import DatasetWriter, is_done
from megadit.train.digits import data as digits

NUM_LABELLED = 20_000
MAX_SHIFT = 3.0
"""Labelled training digits lie within this many pixels of the middle, along each axis."""
CHUNK = 250
"""Samples drawn and written at a time."""


def prepare_digit_classes(out: Path, *, num_images: int = NUM_LABELLED, seed: int = 0) -> DatasetInfo:
    """Writes labelled digits: training glyphs at random places, and each held-out one once in the middle.

    Raises:
        UserError: for a count that is not positive.
    """
    if num_images < 1:
        raise UserError(f"num_images={num_images} must be at least 1")
    start = time.monotonic()
    writer = DatasetWriter(
        out,
        tokenizer=HaarTokenizer(temporal_compression=1, spatial_compression=1),
        text_encoder=ClassLabels(names=digits.DIGITS),
    )
    preview: list[Tensor] = []
    with writer, Progress(num_images + len(digits.load_glyphs("heldout").digit_B), "writing samples") as bar:
        for chunk in draw_labelled(num_images, seed):
            write_chunk(writer, chunk, chunk.video_BCTHW.half())
            preview = preview or [side_by_side(chunk.video_BCTHW[:8], chunk.video_BCTHW[8:16])]
            bar.advance(len(chunk.keys))
    save_preview(out / PREVIEW, preview[0])
    info = DatasetInfo.read(out)
    report(info, time.monotonic() - start)
    return info


def draw_labelled(num_images: int, seed: int) -> Iterator[Chunk]:
    """All samples of `prepare_digit_classes`."""
    generator = torch.Generator().manual_seed(seed)
    num_glyphs, num_heldout = (len(digits.load_glyphs(split).digit_B) for split in ("train", "heldout"))
    for first in range(0, num_images, CHUNK):
        count = min(CHUNK, num_images - first)
        index_B = torch.randint(num_glyphs, (count,), generator=generator)
        middle_B2 = MAX_SHIFT * (2 * torch.rand(count, 2, generator=generator) - 1)
        yield _labelled("train", first, digits.draw_glyphs("train", index_B, middle_B2))
    shuffled = torch.randperm(num_heldout, generator=generator)
    yield _labelled("val", 0, digits.draw_glyphs("heldout", shuffled, torch.zeros(num_heldout, 2)))


def _labelled(split: str, first: int, drawn: tuple[Tensor, list[str]]) -> Chunk:
    images_BCTHW, names = drawn
    keys = [f"{split}-{number:06d}" for number in range(first, first + len(names))]
    return Chunk(split=split, keys=keys, video_BCTHW=images_BCTHW, captions=names, fps=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitClassesOptions:
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    num_images: int = setting(NUM_LABELLED, "training images ({default})")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def command(argv: list[str]) -> int:
    """`megadit prepare digit_classes OUT`."""
    options = read_options(
        DigitClassesOptions,
        argv,
        prog="megadit prepare digit_classes",
        description="Images of the handwritten digits inside scikit-learn with their names as labels, in pixels.",
    )
    if not is_done(options.out, overwrite=options.overwrite):
        prepare_digit_classes(options.out, num_images=options.num_images, seed=options.seed)
    return 0
