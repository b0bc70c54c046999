"""Synthetic data sets: `megadit prepare digits OUT`, `megadit prepare shapes OUT`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import imageio.v3 as iio
import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.progress import Progress, duration
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.writer import DatasetWriter, is_done, lock_of
from megadit.train.dataset.dataset_info import DatasetInfo

TEXT_WIDTH = 64
NUM_FITTING = 300
"""Maximum number of clips, and of images, to which the tokenizer's principal components are fitted."""
KINDS = "clip", "image"
PREVIEW = "preview.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Samples of one size, drawn but not encoded."""

    split: str
    keys: list[str]
    video_BCTHW: Tensor
    captions: list[str]
    fps: float
    image_captions: list[str] | None = None
    """Captions of samples whose conditioning frames already show the rest."""


class Drawing(NamedTuple):
    """Drawn samples of one size."""

    video_BCTHW: Tensor
    captions: list[str]
    image_captions: list[str] | None = None
    """See `Chunk`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Definition of a synthetic data set: its full size, latents and drawing function."""

    name: str
    description: str
    num_clips: int
    num_images: int
    num_val: int
    fps: float
    """Frame rate of the clips."""
    draw: Callable[[str, str, int, torch.Generator], Drawing]
    """(split "train" or "val", kind "clip" or "image", count, generator) -> drawn samples."""
    channels: int
    temporal_compression: int = 4
    spatial_compression: int = 8
    chunk: int = 250
    """Samples drawn, encoded and written at a time."""

    def fit_tokenizer(self, seed: int, num_fitting: int = NUM_FITTING) -> HaarTokenizer:
        """Fit principal components to clips and images drawn as in training."""
        generator = torch.Generator().manual_seed(seed)
        counts = [min(self.chunk, num_fitting - first) for first in range(0, num_fitting, self.chunk)]
        return HaarTokenizer.fit(
            (self.draw("train", kind, count, generator).video_BCTHW for kind in KINDS for count in counts),
            channels=self.channels,
            temporal_compression=self.temporal_compression,
            spatial_compression=self.spatial_compression,
        )

    def chunk_of(self, split: str, kind: str, numbers: range, generator: torch.Generator) -> Chunk:
        """Draw the samples with these numbers."""
        return Chunk(
            split=split,
            keys=[f"{split}-{kind}-{number:06d}" for number in numbers],
            fps=self.fps if kind == "clip" else 0.0,
            **self.draw(split, kind, len(numbers), generator)._asdict(),
        )


def prepare_drawn(
    drawn: Drawn,
    out: Path,
    *,
    num_clips: int | None = None,
    num_images: int | None = None,
    num_val: int | None = None,
    seed: int = 0,
) -> DatasetInfo:
    """Write clips and images with captions, and a validation split; None: the full size.

    Raises:
        UserError: for counts that are not positive.
    """
    asked = {"num_clips": num_clips, "num_images": num_images, "num_val": num_val}
    counts = {name: getattr(drawn, name) if count is None else count for name, count in asked.items()}
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name}={count} must be at least 1")
    start = time.monotonic()
    tokenizer = drawn.fit_tokenizer(seed, min(NUM_FITTING, counts["num_clips"]))
    print(f"tokenizer: {drawn.channels} channels, {tokenizer.reconstruction_psnr:.1f} dB on what it was fitted to")
    text_encoder = HashedWordEncoder(dim=TEXT_WIDTH)
    preview: list[Tensor] = []
    with (
        DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder) as writer,
        Progress(sum(counts.values()), "writing samples") as bar,
    ):
        for chunk in draw_chunks(drawn, seed=seed, **counts):
            latents_BCTHW = tokenizer.encode(chunk.video_BCTHW).half()
            write_chunk(writer, chunk, latents_BCTHW)
            if not preview and chunk.fps:
                preview.append(side_by_side(chunk.video_BCTHW, tokenizer.decode(latents_BCTHW[:8])))
            bar.advance(len(chunk.keys))
    save_preview(out / PREVIEW, preview[0])
    info = DatasetInfo.read(out)
    report(info, time.monotonic() - start)
    return info


def draw_chunks(drawn: Drawn, num_clips: int, num_images: int, num_val: int, seed: int) -> Iterator[Chunk]:
    """Draw all samples, clips and images interleaved in proportion."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_rounds = -(-max(num_clips, num_images) // drawn.chunk)
    for turn in range(num_rounds):
        for kind, count in zip(KINDS, (num_clips, num_images), strict=True):
            first, last = (count * n // num_rounds for n in (turn, turn + 1))
            if last > first:
                yield drawn.chunk_of("train", kind, range(first, last), generator)
    for first in range(0, num_val, drawn.chunk):
        yield drawn.chunk_of("val", "clip", range(first, min(first + drawn.chunk, num_val)), generator)


def write_chunk(writer: DatasetWriter, chunk: Chunk, latents_BCTHW: Tensor) -> None:
    """Add samples of one size with their latents and the features of their captions."""
    text = writer.text_encoder.encode(chunk.captions)
    image_text: list[Tensor | None] = [None] * len(chunk.keys)
    if chunk.image_captions is not None:
        features = writer.text_encoder.encode(chunk.image_captions)
        pairs = zip(features.features_BLE, features.length_B.tolist(), strict=True)
        image_text = [text_LE[:length] for text_LE, length in pairs]
    _, _, num_frames, height, width = chunk.video_BCTHW.shape
    lengths = text.length_B.tolist()
    rows = zip(chunk.keys, latents_BCTHW, text.features_BLE, lengths, chunk.captions, image_text, strict=True)
    for key, latent_CTHW, text_LE, length, caption, image_text_LE in rows:
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
            image_text_LE=image_text_LE,
        )


def write_few(
    out: Path, bundle: Bundle, name: str, video_BCTHW: Tensor, captions: Sequence[str], *, fps: float
) -> None:
    """Write a data set of a few clips with the caption `name`, encoded for a model that is fine-tuned on them.

    Validation has the same clips, because there are too few to hold some out.
    """
    tokenizer, text_encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    latents_BCTHW = tokenizer.encode(video_BCTHW).half()
    with DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
        for split in writer.splits:
            keys = [f"{split}-{name}-{number:02d}" for number in range(len(captions))]
            chunk = Chunk(split=split, keys=keys, video_BCTHW=video_BCTHW, captions=list(captions), fps=fps)
            write_chunk(writer, chunk, latents_BCTHW)


def side_by_side(video_BCTHW: Tensor, decoded_BCTHW: Tensor) -> Tensor:
    """A picture CHW with one clip per row: its frames as drawn, then as reconstructed by the tokenizer."""
    both = torch.cat([video_BCTHW[: len(decoded_BCTHW)], decoded_BCTHW], dim=2)
    return both.permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2, 3)


def save_preview(path: Path, picture_CHW: Tensor, *, zoom: int = 3) -> None:
    """Write a picture in [-1, 1] as a png, enlarged by `zoom`."""
    pixels = ((picture_CHW.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
    with atomic_path(path) as temporary:
        iio.imwrite(temporary, pixels.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).numpy())


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnOptions:
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    num_clips: int | None = setting(None, "training clips (default: the full size)")
    num_images: int | None = setting(None, "training images (default: the full size)")
    num_val: int | None = setting(None, "validation clips (default: the full size)")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def command(drawn: Drawn, argv: list[str]) -> int:
    """Runs `megadit prepare` for a synthetic data set."""
    options = read_options(DrawnOptions, argv, prog=f"megadit prepare {drawn.name}", description=drawn.description)
    with lock_of(options.out):
        if is_done(options.out, overwrite=options.overwrite):
            return 0
        prepare_drawn(
            drawn,
            options.out,
            num_clips=options.num_clips,
            num_images=options.num_images,
            num_val=options.num_val,
            seed=options.seed,
        )
    return 0


def report(info: DatasetInfo, seconds: float) -> None:
    """Print what was written, and how long it took."""
    size = sum(shard.stat().st_size for shard in info.root.glob("*.tar"))
    counts = ", ".join(f"{count} {split}" for split, count in info.num_samples.items())
    print(f"{info.root}: {counts} samples, {size / 2**20:.0f} MiB, {duration(seconds)}; look at {info.root / PREVIEW}")
