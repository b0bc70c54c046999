"""Encoding of clips into shards; a shard depends on its plan and the encoders alone, so that any can be redone.

Shapes: B clips of one size, C channels, T/H/W frames, height, width, L text tokens, E text feature width.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from megadit.infer.decoding.rules import UnusableSourceError
from megadit.infer.media.video_io import encode_mp4
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.decode import fit_image, read_frames, read_image
from megadit.train.data.ingest.clips.encodings import LATENT, Encoder
from megadit.train.data.ingest.plan import Clip, Settings
from megadit.train.data.ingest.pool import Pool
from megadit.train.data.packs.training_sample import another, encode_frames, frame_times, keyframe_places
from megadit.train.data.writer import sample_members, write_members

CAPTIONS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class Decoded:
    """A clip with its frames, or the reason why there are none."""

    clip: Clip
    frames_THWC: np.ndarray | None
    trouble: str = ""


def decode(clip: Clip, settings: Settings) -> Decoded:
    """Decode the frames of a clip at the size of its bucket."""
    try:
        if clip.source.kind == "image":
            frames_THWC = fit_image(read_image(clip.source, settings), clip.height, clip.width)[None]
        else:
            frames_THWC = read_frames(
                clip.source, settings, clip.pts, clip.height, clip.width, is_regular=clip.is_regular
            )
    except UnusableSourceError as error:
        return Decoded(clip, None, str(error))
    return Decoded(clip, np.ascontiguousarray(frames_THWC[:, :, ::-1]) if clip.is_mirrored else frames_THWC)


def lost(clip: Clip) -> Decoded:
    return Decoded(clip, None, "it crashes the decoder, or hangs it")


def decoded_clips(clips: Sequence[Clip], settings: Settings, pool: Pool) -> Iterator[Decoded]:
    """Decode clips, in order.

    Raises:
        UserError: for a source that has changed since it was scanned.
    """
    for decoded in pool.map(partial(decode, settings=settings), clips, lost):
        if decoded.frames_THWC is None:
            raise UserError(
                f"{decoded.clip.source.name} could be read when it was scanned and cannot now ({decoded.trouble}); "
                "put it back, or start anew with --overwrite"
            )
        yield decoded


def encode_shard(
    path: Path, clips: Sequence[Clip], settings: Settings, encoders: Sequence[Encoder], pool: Pool
) -> None:
    """Write one shard atomically, with samples in the order of `clips`."""
    tensors: list[dict[str, Tensor]] = [{} for _ in clips]
    times: dict[int, list[float]] = {}
    for encoder in encoders:
        if encoder.modality == "text":
            for start in range(0, len(clips), CAPTIONS_AT_A_TIME):
                stretch = clips[start : start + CAPTIONS_AT_A_TIME]
                for place, text_LE in enumerate(encoder.encode_texts([clip.source.caption for clip in stretch])):
                    if len(text_LE):
                        tensors[start + place][encoder.name] = text_LE
                for place, clip in enumerate(stretch, start):
                    if more := list(clip.source.more_captions):
                        texts = enumerate(encoder.encode_texts(more), 1)
                        tensors[place] |= {another(encoder.name, number): text_LE for number, text_LE in texts}
    video_encoders = [encoder for encoder in encoders if encoder.modality == "video"]
    for places, frames_BTHWC in _batches(decoded_clips(clips, settings, pool), batch_size(settings)):
        video_BCTHW = to_video(frames_BTHWC)
        for encoder in video_encoders:
            for place, latent_CTHW in zip(places, encoder.encode_videos(video_BCTHW), strict=True):
                tensors[place][encoder.name] = latent_CTHW
            chosen = keyframe_places(video_BCTHW.shape[2], settings.keyframes)
            if encoder.name == LATENT and chosen:
                frames_BCTHW = encode_frames(encoder.encode_videos, video_BCTHW, chosen)
                for place, frames_CTHW in zip(places, frames_BCTHW, strict=True):
                    tensors[place]["frames"] = frames_CTHW.clone()
                    times[place] = list(frame_times(chosen, encoder.model))
    write_members(
        path,
        (
            member
            for place, (clip, values) in enumerate(zip(clips, tensors, strict=True))
            for member in sample_members(clip.key, describe(clip, frame_times=times.get(place)), values)
        ),
    )


def store_shard(path: Path, clips: Sequence[Clip], settings: Settings, pool: Pool) -> None:
    """Write one shard of pixels (`--store raw`): mp4s of clips, pngs of images."""

    def members() -> Iterator[tuple[str, bytes]]:
        for decoded in decoded_clips(clips, settings, pool):
            chosen = keyframe_places(decoded.clip.num_frames, settings.keyframes)
            yield from sample_members(decoded.clip.key, describe(decoded.clip, keyframes=chosen), {})[:1]
            if decoded.clip.fps:
                yield f"{decoded.clip.key}.mp4", encode_mp4(decoded.frames_THWC, decoded.clip.fps)
            else:
                yield f"{decoded.clip.key}.png", png_bytes(decoded.frames_THWC[0])

    write_members(path, members())


def png_bytes(picture_HWC: np.ndarray) -> bytes:
    """A PNG of a picture: uint8 HWC."""
    buffer = io.BytesIO()
    Image.fromarray(picture_HWC).save(buffer, format="png")
    return buffer.getvalue()


def batch_size(settings: Settings) -> int:
    """Number of clips encoded together: about 16 million pixels of the largest size."""
    largest = max(height * width for height, width in settings.sizes) * max(settings.num_frames)
    return max(1, min(64, (1 << 24) // largest))


def describe(clip: Clip, **of_frames: list[float] | None) -> dict[str, Any]:
    """Metadata of a sample: its `.json` member; `of_frames` are the fields about frames encoded as images."""
    description = {
        "caption": clip.source.caption,
        "num_frames": clip.num_frames,
        "height": clip.height,
        "width": clip.width,
        "fps": clip.fps,
        "source": clip.source.name,
        "start": round(clip.start, 3),
    }
    if clip.source.more_captions:
        description["captions"] = clip.source.captions
    if clip.is_mirrored:
        description["mirrored"] = True
    if clip.source.aesthetic_score is not None:
        description["aesthetic_score"] = clip.source.aesthetic_score
    return description | {name: values for name, values in of_frames.items() if values}


def to_video(frames_BTHWC: np.ndarray) -> Tensor:
    """uint8 frames as the video that tokenizers take: float32 BCTHW in [-1, 1]."""
    return rearrange(torch.from_numpy(frames_BTHWC), "B T H W C -> B C T H W").float().div_(127.5).sub_(1)


def _batches(decoded: Iterable[Decoded], size: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """(places in the shard, frames) of up to `size` clips of one shape."""
    waiting: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
    for place, item in enumerate(decoded):
        group = waiting.setdefault(item.frames_THWC.shape, [])
        group.append((place, item.frames_THWC))
        if len(group) == size:
            yield _stacked(waiting.pop(item.frames_THWC.shape))
    for group in waiting.values():
        yield _stacked(group)


def _stacked(group: list[tuple[int, np.ndarray]]) -> tuple[list[int], np.ndarray]:
    return [place for place, _ in group], np.stack([frames for _, frames in group])
