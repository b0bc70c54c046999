"""`megadit prepare SOURCE OUT`: turns a source of clips into a folder that training reads.

megadit prepare digits runs/digits/dataset
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import imageio.v3 as iio
import torch
from torch import Tensor

from megadit.models.shared.command import run_command
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import atomic_path
from megadit.models.shared.options import read_options
from megadit.models.shared.progress import Progress, duration
from megadit.models.shared.setting import setting
from megadit.models.text_encoders.class_labels import ClassLabels
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data import dummy_images, edits, prior
from megadit.train.data.dataset_info import DatasetInfo
from megadit.train.data.ingest import command as ingest
from megadit.train.data.ingest.foreign import nemo_command
from megadit.train.data.writer import DatasetWriter, is_done
from megadit.train.digits import data as digits

LATENT_CHANNELS = 32
TEXT_WIDTH = 64
NUM_FITTING_CLIPS = 600
"""Clips and as many images from which the tokenizer's principal components are computed."""
CHUNK = 250
"""Samples drawn, encoded and written at a time."""
PREVIEW = "preview.png"
NUM_LABELLED = 20_000
MAX_SHIFT = 3.0
"""Labelled training digits lie within this many pixels of the middle, along each axis."""
NUM_CLIPS, NUM_IMAGES, NUM_VAL = 32_000, 16_000, 480
"""Samples of the handwritten digits. Mostly clips: token for token they teach more than images do, and cost less to
read, as one is as long as three images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Samples of one size, drawn but not encoded."""

    split: str
    keys: list[str]
    video_BCTHW: Tensor
    captions: list[str]
    fps: float


def prepare_digits(
    out: Path, *, num_clips: int = NUM_CLIPS, num_images: int = NUM_IMAGES, num_val: int = NUM_VAL, seed: int = 0
) -> DatasetInfo:
    """Writes the captioned digits: clips and images of training glyphs, and a validation split of held-out ones.

    Raises:
        UserError: for counts that are not positive.
    """
    for name, count in (("num_clips", num_clips), ("num_images", num_images), ("num_val", num_val)):
        if count < 1:
            raise UserError(f"{name}={count} must be at least 1")
    start = time.monotonic()
    tokenizer = fit_tokenizer(seed)
    print(f"tokenizer: {LATENT_CHANNELS} channels, {tokenizer.reconstruction_psnr:.1f} dB on what it was fitted to")
    text_encoder = HashedWordEncoder(dim=TEXT_WIDTH)
    preview: list[Tensor] = []
    with (
        DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder) as writer,
        Progress(num_clips + num_images + num_val, "writing samples") as bar,
    ):
        for chunk in draw_chunks(num_clips, num_images, num_val, seed):
            latents_BCTHW = tokenizer.encode(chunk.video_BCTHW).half()
            write_chunk(writer, chunk, latents_BCTHW)
            if not preview and chunk.fps:
                preview.append(_side_by_side(chunk.video_BCTHW, tokenizer.decode(latents_BCTHW[:8])))
            bar.advance(len(chunk.keys))
    save_preview(out / PREVIEW, preview[0])
    info = DatasetInfo.read(out)
    _report(info, time.monotonic() - start)
    return info


def prepare_digit_classes(out: Path, *, num_images: int = NUM_LABELLED, seed: int = 0) -> DatasetInfo:
    """Writes labelled digits, in pixels: training glyphs at random places, and each held-out one once in the middle.

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
            preview = preview or [_side_by_side(chunk.video_BCTHW[:8], chunk.video_BCTHW[8:16])]
            bar.advance(len(chunk.keys))
    save_preview(out / PREVIEW, preview[0])
    info = DatasetInfo.read(out)
    _report(info, time.monotonic() - start)
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


def fit_tokenizer(seed: int) -> HaarTokenizer:
    """Principal components of clips and images as training has them."""
    generator = torch.Generator().manual_seed(seed)
    clips = digits.random_attributes(NUM_FITTING_CLIPS, images=False, generator=generator)
    images = digits.random_attributes(NUM_FITTING_CLIPS, images=True, generator=generator)
    videos = [
        *digits.draw_clips(clips, "train", generator).split(CHUNK),
        *digits.draw_images(images, "train", generator).split(CHUNK),
    ]
    return HaarTokenizer.fit(videos, channels=LATENT_CHANNELS)


def draw_chunks(num_clips: int, num_images: int, num_val: int, seed: int) -> Iterator[Chunk]:
    """All samples, clips and images in turns so that any stretch of a shard holds both in their proportion."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_rounds = -(-max(num_clips, num_images) // CHUNK)
    for turn in range(num_rounds):
        first, last = (num_clips * n // num_rounds for n in (turn, turn + 1))
        if last > first:
            yield _draw("train", "clip", range(first, last), generator)
        first, last = (num_images * n // num_rounds for n in (turn, turn + 1))
        if last > first:
            yield _draw("train", "image", range(first, last), generator)
    for first in range(0, num_val, CHUNK):
        yield _draw("val", "clip", range(first, min(first + CHUNK, num_val)), generator)


def _draw(split: str, kind: str, numbers: range, generator: torch.Generator) -> Chunk:
    attributes = digits.random_attributes(len(numbers), images=kind == "image", generator=generator)
    glyphs: digits.Split = "train" if split == "train" else "heldout"
    draw = digits.draw_images if kind == "image" else digits.draw_clips
    return Chunk(
        split=split,
        keys=[f"{split}-{kind}-{number:06d}" for number in numbers],
        video_BCTHW=draw(attributes, glyphs, generator),
        captions=digits.random_captions(attributes, glyphs, generator),
        fps=0.0 if kind == "image" else digits.FPS,
    )


def write_chunk(writer: DatasetWriter, chunk: Chunk, latents_BCTHW: Tensor) -> None:
    """Adds samples of one size, whose latents are these, with the features of their captions."""
    text = writer.text_encoder.encode(chunk.captions)
    _, _, num_frames, height, width = chunk.video_BCTHW.shape
    rows = zip(chunk.keys, latents_BCTHW, text.features_BLE, text.length_B.tolist(), chunk.captions, strict=True)
    for key, latent_CTHW, text_LE, length, caption in rows:
        writer.add(
            chunk.split,
            key,
            latent_CTHW=latent_CTHW,
            text_LE=text_LE[:length],
            caption=caption,
            num_frames=num_frames,
            height=height,
            width=width,
            fps=chunk.fps,
        )


def _side_by_side(video_BCTHW: Tensor, decoded_BCTHW: Tensor) -> Tensor:
    """A picture CHW: each row one clip, its frames as drawn and then as the tokenizer gives them back."""
    both = torch.cat([video_BCTHW[: len(decoded_BCTHW)], decoded_BCTHW], dim=2)
    return both.permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2, 3)


def save_preview(path: Path, picture_CHW: Tensor, *, zoom: int = 3) -> None:
    """Writes a picture in [-1, 1] as a png, each pixel `zoom` wide."""
    pixels = ((picture_CHW.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
    with atomic_path(path) as temporary:
        iio.imwrite(temporary, pixels.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).numpy())


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions:
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    num_clips: int = setting(NUM_CLIPS, "training clips of 9 frames ({default})")
    num_images: int = setting(NUM_IMAGES, "training images ({default})")
    num_val: int = setting(NUM_VAL, "validation clips, of held-out digits ({default})")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def _digits_command(argv: list[str]) -> int:
    options = read_options(
        DigitsOptions,
        argv,
        prog="megadit prepare digits",
        description="Captioned clips and images of the handwritten digits inside scikit-learn.",
    )
    if is_done(options.out, overwrite=options.overwrite):
        return 0
    prepare_digits(
        options.out,
        num_clips=options.num_clips,
        num_images=options.num_images,
        num_val=options.num_val,
        seed=options.seed,
    )
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitClassesOptions:
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    num_images: int = setting(NUM_LABELLED, "training images ({default})")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def _digit_classes_command(argv: list[str]) -> int:
    options = read_options(
        DigitClassesOptions,
        argv,
        prog="megadit prepare digit_classes",
        description="Images of the handwritten digits inside scikit-learn with their names as labels, in pixels.",
    )
    if not is_done(options.out, overwrite=options.overwrite):
        prepare_digit_classes(options.out, num_images=options.num_images, seed=options.seed)
    return 0


def _report(info: DatasetInfo, seconds: float) -> None:
    size = sum(shard.stat().st_size for shard in info.root.glob("*.tar"))
    counts = ", ".join(f"{count} {split}" for split, count in info.num_samples.items())
    print(f"{info.root}: {counts} samples, {size / 2**20:.0f} MiB, {duration(seconds)}; look at {info.root / PREVIEW}")


SOURCES: dict[str, Callable[[list[str]], int]] = {
    "digits": _digits_command,
    "digit_classes": _digit_classes_command,
    "dummy_images": dummy_images.command,
    **ingest.commands(),
    "nemo": nemo_command,
    "prior": prior.command,
    "trajectories": prior.trajectories_command,
    "edits": edits.command,
}
"""Source -> its command, which takes the arguments after the source's name."""


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit prepare`; returns its exit code."""
    return run_command(_prepare, sys.argv[1:] if argv is None else argv)


def _prepare(argv: list[str]) -> int:
    """Prepares the source that the first argument names.

    Raises:
        UserError: for an unknown source.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: megadit prepare SOURCE OUT ...\n\nsources: {', '.join(SOURCES)}")
        print("\n`megadit prepare SOURCE --help` describes one of them.")
        return 0
    source, *rest = argv
    return SOURCES[choose_one(source, SOURCES, f"unknown source {source!r}")](rest)


if __name__ == "__main__":
    raise SystemExit(main())
