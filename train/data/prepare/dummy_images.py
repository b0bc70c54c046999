"""`megadit prepare dummy_images [OUT]`: random pictures, to try training without data.

Soft patches of random colours with some grain, in the latents of a tokenizer that compresses 8 x 8 pixels into 16
channels and with text features 1024 wide, as most recipes have them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.writer import DatasetWriter, is_done
from megadit.train.dataset.dataset_info import DatasetInfo

LATENT_CHANNELS = 16
TEXT_WIDTH = 1024
FACTORY = "prepare_dummy_image_dataset"
"""Name of this data set in NeMo's documentation."""
SHARE_OF_VAL = 8
"""One in so many pictures is for validation."""
CHUNK = 32


def draw(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Pictures [count, 3, 1, size, size] in [-1, 1]."""
    colours = 2 * torch.rand(count, 3, 4, 4, generator=generator) - 1
    patches = functional.interpolate(colours, size=(size, size), mode="bilinear")
    grain = 0.1 * torch.randn(patches.shape, generator=generator)
    return (patches + grain).clamp(-1, 1)[:, :, None]


def prepare_dummy_images(out: Path, *, num_images: int = 64, size: int = 256, seed: int = 0) -> DatasetInfo:
    """Write the pictures, some of them for validation.

    Raises:
        UserError: for too few pictures, or a size that the tokenizer does not support.
    """
    if num_images < SHARE_OF_VAL:
        raise UserError(f"num_images={num_images} must be at least {SHARE_OF_VAL}")
    if size < 16 or size % 16:
        raise UserError(f"size={size} must be a multiple of 16")
    generator = torch.Generator().manual_seed(seed)
    tokenizer = HaarTokenizer.fit([draw(CHUNK, size, generator)], channels=LATENT_CHANNELS)
    text_encoder = HashedWordEncoder(dim=TEXT_WIDTH)
    with (
        DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder) as writer,
        Progress(num_images, "writing pictures") as bar,
    ):
        for number in range(num_images):
            caption = f"dummy image {number}"
            text = text_encoder.encode([caption])
            writer.add(
                "val" if number % SHARE_OF_VAL == 0 else "train",
                f"dummy-{number:06d}",
                latent_CTHW=tokenizer.encode(draw(1, size, generator))[0].half(),
                text_LE=text.features_BLE[0, : text.length_B[0]],
                caption=caption,
                num_frames=1,
                height=size,
                width=size,
                fps=0.0,
            )
            bar.advance(1)
    return DatasetInfo.read(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class DummyImagesOptions:
    out: Path = setting(Path("dummy_images"), positional=True, metavar="OUT")
    factory: str | None = setting(None, "name of this data set in NeMo", choices=(FACTORY,))
    num_images: int = setting(64, "number of images, one in eight for validation (default: {default})")
    size: int = setting(256, "height and width in pixels (default: {default})")
    seed: int = setting(0, "the same seed gives the same files (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def command(source: str, argv: list[str]) -> int:
    """Run `megadit prepare dummy_images`; under torchrun the first rank alone writes."""
    options = read_options(
        DummyImagesOptions,
        argv,
        prog=f"megadit prepare {source}",
        description="Pictures of random colours, captioned.",
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    if is_done(options.out, overwrite=options.overwrite):
        return 0
    info = prepare_dummy_images(options.out, num_images=options.num_images, size=options.size, seed=options.seed)
    counts = ", ".join(f"{count} {split}" for split, count in info.num_samples.items())
    print(
        f"{info.root}: {counts} pictures; train on them with data.path={info.root} model.sigma_data={info.sigma_data}"
    )
    return 0
