"""Pictures of a finished video, for lists and players: a thumbnail and a sprite sheet.

They are made on request: the video is trusted, complete and of known size. Decoders are imported with the first
picture: they take a sixth of a gateway's memory.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Layout of a picture: frames in rows, evenly spaced over the video, each fitted into a square."""

    most_frames: int
    num_columns: int
    most_side: int
    suffix: str
    media_type: str


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "thumbnail": Variant(most_frames=1, num_columns=1, most_side=512, suffix=".webp", media_type="image/webp"),
        "spritesheet": Variant(most_frames=16, num_columns=4, most_side=256, suffix=".jpg", media_type="image/jpeg"),
    }
)
"""Name in `?variant=` -> variant."""


def picture_of(data: bytes, media_type: str, variant: Variant) -> bytes:
    """The picture of an mp4, or of an image, as a file.

    Raises:
        Exception: any exception of decoders, for other files.
    """
    from PIL import Image

    from megadit.infer.media.animations import encode_animation, encode_image

    frames = _frame(data) if media_type.startswith("image/") else _frames(data, variant.most_frames)
    cells = []
    for frame in frames:
        frame.thumbnail((variant.most_side, variant.most_side))
        cells.append(frame)
    width, height = cells[0].size
    columns = min(len(cells), variant.num_columns)
    sheet = Image.new("RGB", (width * columns, height * -(-len(cells) // columns)))
    for place, cell in enumerate(cells):
        row, column = divmod(place, columns)
        sheet.paste(cell, (column * width, row * height))
    pixels_HWC = np.asarray(sheet)
    if variant.suffix == ".webp":
        return encode_animation(pixels_HWC[None], 0, ".webp")
    return encode_image(pixels_HWC, variant.suffix)


def _frame(data: bytes) -> "Iterator[Image]":
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        yield image.convert("RGB")


def _frames(data: bytes, most: int) -> "Iterator[Image]":
    """Yield up to `most` frames, including the first and the last; one at a time is in memory at full size."""
    from megadit.infer.media.video_io import open_container

    with open_container(io.BytesIO(data), containers="mov,mp4") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        chosen = set(np.linspace(0, stream.frames - 1, min(most, stream.frames)).round().astype(int).tolist())
        for number, frame in enumerate(container.decode(stream)):
            if number in chosen:
                yield frame.to_image(threads=1)
            if number == max(chosen):
                return
