"""Pictures for classifiers and CLIP models: files, crops, and latents.

Shapes: N pictures, T/H/W frames, height, width, C colours.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megadit.infer.decoding.rules import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from megadit.infer.evaluate.videos import Clip
from megadit.infer.evaluate.window import Window, cut
from megadit.infer.media.video_io import read_video
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import files_under

SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)


def picture_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Return all files, those of folders in the order of their names.

    Raises:
        UserError: for a path without pictures.
    """
    for path in paths:
        inside = files_under(path) if path.is_dir() else [path]
        files = [each for each in inside if each.suffix.lower() in SUFFIXES or each == path]
        if not files:
            raise UserError(f"{path} holds no picture; known are {', '.join(SUFFIXES)}")
        yield from files


def read_picture(path: Path) -> Clip:
    """Read the frames of a picture, or of a video.

    Raises:
        UserError: if it cannot be read.
    """
    frames_THWC, fps = read_video(path)
    return Clip(np.ascontiguousarray(frames_THWC), fps, str(path))


def batches_of_pictures(paths: Sequence[Path], asked: int, most: int | None) -> Iterator[list[Clip]]:
    """Read pictures in batches of `asked`, or of `most` (the network's limit; None: no limit) if that is less.

    Raises:
        UserError: if a picture cannot be read.
    """
    size = min(asked, most or asked)
    for first in range(0, len(paths), size):
        yield [read_picture(path) for path in paths[first : first + size]]


class Sight:
    """Maps clips to latents as in training of a bundle's network: the centre crop, resized; of a video, its middle
    frames."""

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self._tokenizer, self._device = bundle.load_tokenizer(), device
        size = bundle.defaults
        self.window = Window(
            frames=size.num_frames, height=size.height, width=size.width, fps=size.fps, is_resized=True
        )

    def __call__(self, clips: Sequence[Clip]) -> Tensor:
        """Latents of N clips, BCTHW with B = N.

        Raises:
            UserError: for a video that is shorter than in training, or has another frame rate.
        """
        seen_NTHWC = torch.stack([cut(clip, clip.prompt, self.window) for clip in clips])
        video_NCTHW = seen_NTHWC.to(self._device).movedim(-1, 1).float() / 127.5 - 1
        return self._tokenizer.encode(video_NCTHW)
