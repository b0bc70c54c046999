"""Encoding of clips into shards; a shard depends on its plan and the encoders alone, so that any can be redone.

Shapes: B clips of one size, C channels, T/H/W frames, height, width, L text tokens, E text feature width.
"""

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from megadit.infer.decoding.rules import UnusableSourceError
from megadit.infer.media.video_io import encode_mp4
from megadit.models.host_to_device import fetch_together, sent_together
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


def decoded_clips(clips: Iterable[Clip], settings: Settings, pool: Pool) -> Iterator[Decoded]:
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
    path: Path, clips: Sequence[Clip], settings: Settings, encoders: Sequence[Encoder], decoded: Iterator[Decoded]
) -> None:
    """Write one shard atomically, with samples in the order of `clips`, the next ones of `decoded`."""
    tensors: list[dict[str, Tensor]] = [{} for _ in clips]
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
    batches = _batches(islice(decoded, len(clips)), batch_size(settings))
    for places, found in encoded_batches(batches, video_encoders, settings.keyframes):
        for name, latents_BCTHW in found.items():
            for place, latent_CTHW in zip(places, latents_BCTHW, strict=True):
                tensors[place][name] = latent_CTHW
    [tokenizer] = (encoder.model for encoder in video_encoders if encoder.name == LATENT)

    def description(clip: Clip) -> dict[str, Any]:
        chosen = keyframe_places(clip.num_frames, settings.keyframes)
        return describe(clip, frame_times=list(frame_times(chosen, tokenizer)))

    samples = zip(clips, tensors, strict=True)
    write_members(
        path, (member for clip, values in samples for member in sample_members(clip.key, description(clip), values))
    )


def encoded_batches(
    batches: Iterable[tuple[list[int], list[np.ndarray]]], encoders: Sequence[Encoder], keyframes: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """(places in the shard, latents BCTHW by their name) of batches of frames (uint8 THWC each), in order.

    A GPU is waited for one batch later: while it encodes, the next frames are read and sent.
    """
    running: deque[tuple[list[int], Callable[[], dict[str, Tensor]]]] = deque()
    for places, frames in batches:
        running.append((places, _encode(frames, encoders, keyframes)))
        if len(running) > 1:
            before, latents = running.popleft()
            yield before, latents()
    for places, latents in running:
        yield places, latents()


def _encode(
    frames: Sequence[np.ndarray], encoders: Sequence[Encoder], keyframes: int
) -> Callable[[], dict[str, Tensor]]:
    """Start to encode a batch of frames (uint8 THWC each); the function returned waits for the latents, BCTHW."""
    video_BCTHW = to_video(torch.stack(sent_together(list(map(torch.from_numpy, frames)), encoders[0].device)))
    chosen = keyframe_places(video_BCTHW.shape[2], keyframes)
    parts: list[tuple[str, Encoder, Tensor]] = []
    for encoder in encoders:
        parts.append((encoder.name, encoder, encoder.encode_videos(video_BCTHW)))
        if encoder.name == LATENT and chosen:
            parts.append(("frames", encoder, encode_frames(encoder.encode_videos, video_BCTHW, chosen)))
    names, owners, latents = zip(*parts, strict=True)
    fetched = fetch_together(latents)
    return lambda: {name: owner.checked(x) for name, owner, x in zip(names, owners, fetched(), strict=True)}


def store_shard(path: Path, clips: Sequence[Clip], settings: Settings, decoded: Iterator[Decoded]) -> None:
    """Write one shard of pixels (`--store raw`): mp4s of clips, pngs of images, the next ones of `decoded`."""

    def members() -> Iterator[tuple[str, bytes]]:
        for clip, found in zip(clips, decoded, strict=False):  # clips end first: no further one is asked for
            chosen = keyframe_places(clip.num_frames, settings.keyframes)
            yield from sample_members(clip.key, describe(clip, keyframes=chosen), {})[:1]
            if clip.fps:
                yield f"{clip.key}.mp4", encode_mp4(found.frames_THWC, clip.fps)
            else:
                yield f"{clip.key}.png", png_bytes(found.frames_THWC[0])

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


def to_video(frames_BTHWC: Tensor) -> Tensor:
    """uint8 frames as the video that tokenizers take, on their device: float32 BCTHW in [-1, 1]."""
    return rearrange(frames_BTHWC, "B T H W C -> B C T H W").float().div_(127.5).sub_(1)


def _batches(decoded: Iterable[Decoded], size: int) -> Iterator[tuple[list[int], list[np.ndarray]]]:
    """(places in the shard, frames THWC of each) of up to `size` clips of one shape."""
    waiting: dict[tuple[int, ...], tuple[list[int], list[np.ndarray]]] = {}
    for place, item in enumerate(decoded):
        places, frames = waiting.setdefault(item.frames_THWC.shape, ([], []))
        places.append(place)
        frames.append(item.frames_THWC)
        if len(places) == size:
            yield waiting.pop(item.frames_THWC.shape)
    yield from waiting.values()
