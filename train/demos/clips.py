"""Generated clips of a demo: generation, storage and display.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.infer.media.video_io import write_video
from megadit.infer.pipeline.adapters import NO_ADAPTERS, Scales
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.shared.files import atomic_path
from megadit.models.shared.progress import Progress

BATCH_SIZE = 48
LOOPS = 3
"""A clip lasts a second; its mp4 plays it this often."""


def make_clips(
    path: Path,
    bundle: Path,
    prompts: Sequence[str],
    conditioning: Any = None,
    adapters: Scales = NO_ADAPTERS,
    **settings: Any,
) -> None:
    """Generate a clip for each prompt and conditioning, with seeds 0, 1, ..., and save them as uint8 BCTHW."""
    pipeline, clips = TextToVideo.from_pretrained(bundle, device="cpu"), []
    chosen = resolve_settings(pipeline.defaults, **settings)
    seeds = list(range(len(prompts)))
    with Progress(len(prompts), "generating clips") as bar:
        many = pipeline.stream(
            prompts, chosen, seeds=seeds, batch_size=BATCH_SIZE, conditioning=conditioning, adapters=adapters
        )
        for video in many:
            clips.append(torch.from_numpy(video.video).permute(3, 0, 1, 2))
            bar.advance()
    with atomic_path(path) as temporary:
        save_file({"video_BCTHW": torch.stack(clips)}, temporary)


def read_clips(path: Path) -> Tensor:
    """BCTHW in [-1, 1]."""
    return as_float(load_file(path)["video_BCTHW"])


def as_float(video: Tensor) -> Tensor:
    """Video in [-1, 1] of uint8, of any shape."""
    return video.float() / 127.5 - 1


def as_uint8(video: Tensor) -> Tensor:
    """uint8 of video in [-1, 1], of any shape."""
    return ((video.clamp(-1, 1) + 1) * 127.5).round().byte()


def pixels(video_BCTHW: Tensor) -> np.ndarray:
    """uint8 BTHWC of video in [-1, 1]."""
    return as_uint8(video_BCTHW).permute(0, 2, 3, 4, 1).contiguous().numpy()


def write_clips(folder: Path, clips_BCTHW: Tensor, captions: Sequence[str], *, fps: float, zoom: int) -> None:
    """An mp4 for each clip, named by its caption, and `all.mp4` of all of them side by side at half the size."""
    for number, (clip_CTHW, caption) in enumerate(zip(clips_BCTHW, captions, strict=True)):
        path = folder / f"{number:02d}-{caption.replace(' ', '-')}.mp4"
        write_video(path, watchable(clip_CTHW, zoom), fps, metadata={"title": caption})
    write_video(folder / "all.mp4", watchable(wall(clips_BCTHW), zoom // 2), fps)


def wall(clips_BCTHW: Tensor, columns: int = 6) -> Tensor:
    """All clips as one, CTHW, side by side in rows; what is left of the last row stays black."""
    num_rows = -(-len(clips_BCTHW) // columns)
    _, channels, frames, height, width = clips_BCTHW.shape
    sheet = clips_BCTHW.new_full((num_rows * columns, channels, frames, height, width), -1.0)
    sheet[: len(clips_BCTHW)] = clips_BCTHW
    sheet = sheet.reshape(num_rows, columns, channels, frames, height, width).permute(2, 3, 0, 4, 1, 5)
    return sheet.reshape(channels, frames, num_rows * height, columns * width)


def watchable(clip_CTHW: Tensor, zoom: int, loops: int = LOOPS) -> np.ndarray:
    """uint8 THWC, each pixel a square of side `zoom`, played `loops` times."""
    frames = ((clip_CTHW + 1) * 127.5).round().byte().permute(1, 2, 3, 0)
    return frames.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2).repeat(loops, 1, 1, 1).numpy()
