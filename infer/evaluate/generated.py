"""Videos that a model generates for an evaluation, stored losslessly; existing ones are not generated again.

The n-th video has the seed n for every model and guidance scale: two models are compared with the same prompts and the
same noise.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megadit.infer.evaluate.videos import VIDEOS_PER_CHUNK, Clip, VideoChunk, VideoSet, decoded, hashed
from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline.adapters import NO_ADAPTERS, Scales, scaled_adapters
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import checkpoint_fingerprint
from megadit.infer.runtimes.ranks import Ranks
from megadit.infer.sampling.resolve import latent_size
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, write_json
from megadit.models.shared.progress import Progress


class Maker(Protocol):
    """Source of videos for prompts: a bundle on this machine, or a service."""

    defaults: SamplingSettings

    def about(self, settings: SamplingSettings) -> dict[str, Any]:
        """Describe everything in the maker and the settings that affects its videos."""

    def check(self, settings: SamplingSettings) -> None:
        """Raises UserError for settings that it cannot generate."""

    def videos(self, prompts: Sequence[str], seeds: Sequence[int], settings: SamplingSettings) -> Iterator[np.ndarray]:
        """Generate a video for each prompt, uint8 THWC."""


class BundleMaker:
    """Generates videos by a bundle, whose networks are loaded at the first video.

    `adapters` are attached to its network; with `is_sent`, videos are encoded as mp4 and decoded, as from a service.
    """

    def __init__(
        self, bundle: Bundle, *, device: str, dtype: str, adapters: Scales = NO_ADAPTERS, is_sent: bool = False
    ) -> None:
        self.bundle, self.defaults, self.adapters = bundle, bundle.defaults, adapters
        self._device, self._dtype, self._is_sent = device, dtype, is_sent
        self._pipeline: TextToVideo | None = None

    def about(self, settings: SamplingSettings) -> dict[str, Any]:
        return {
            "model": checkpoint_fingerprint(self.bundle),
            "tokenizer": self.bundle.manifest["fingerprints"]["tokenizer"],
            "dtype": self._dtype,
            "settings": asdict(settings),
            **({"adapters": [asdict(adapter) for adapter in scaled_adapters(self.adapters)]} if self.adapters else {}),
            **({"sent as": "mp4"} if self._is_sent else {}),
        }

    def check(self, settings: SamplingSettings) -> None:
        latent_size(settings, self.bundle.config, self.bundle.load_tokenizer())

    def videos(self, prompts: Sequence[str], seeds: Sequence[int], settings: SamplingSettings) -> Iterator[np.ndarray]:
        if self._pipeline is None:
            self._pipeline = TextToVideo.from_pretrained(self.bundle, device=self._device, dtype=self._dtype)
        options = {"seeds": seeds, "batch_size": len(prompts), "adapters": self.adapters}
        for result in self._pipeline.stream(prompts, settings, **options):
            if self._is_sent:
                yield received(encode_mp4(result.video, settings.fps), "a video", settings)
            else:
                yield result.video


def received(content: bytes, where: str, settings: SamplingSettings) -> np.ndarray:
    """The frames of an mp4 or png of a video of these settings, THWC. Raises UserError if it cannot be decoded, or has
    another size."""
    video_THWC = decoded(content, where)[0][:, : settings.height, : settings.width]  # an mp4 has even sides
    size = (settings.num_frames, settings.height, settings.width)
    if video_THWC.shape[:3] != size:
        raise UserError(f"{where} has {video_THWC.shape[:3]} frames, height, width in place of {size}")
    return video_THWC


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that affects the videos of a model."""

    maker: Maker
    prompts: Sequence[str]
    """Prompt of each video."""
    settings: SamplingSettings
    seed: int = 0
    """Seed of the first video; further ones count up from it."""

    @property
    def key(self) -> str:
        return hashed(json.dumps(self.about, sort_keys=True))[:16]

    @property
    def about(self) -> dict:
        return {**self.maker.about(self.settings), "prompts": list(self.prompts), "seed": self.seed}

    @property
    def parts(self) -> list[range]:
        count = len(self.prompts)
        return [range(first, min(first + VIDEOS_PER_CHUNK, count)) for first in range(0, count, VIDEOS_PER_CHUNK)]


def make_videos(folder: Path, request: Request, ranks: Ranks, *, shows_progress: bool) -> None:
    """Generates this process's missing chunks in `folder`/<key of the request>."""
    folder = folder / request.key
    if ranks.replica == 0 and not (folder / "request.json").exists():
        write_json(folder / "request.json", request.about)
    missing = [part for part in ranks.mine(request.parts) if not _file(folder, part).exists()]
    with Progress(sum(map(len, missing)), "generating videos", enabled=shows_progress) as bar:
        for part in missing:
            prompts, seeds = [request.prompts[n] for n in part], [request.seed + n for n in part]
            videos = []
            for video_THWC in request.maker.videos(prompts, seeds, request.settings):
                videos.append(torch.from_numpy(video_THWC))
                bar.advance()
            with atomic_path(_file(folder, part)) as temporary:
                save_file({"video_NTHWC": torch.stack(videos)}, temporary)


def made_videos(folder: Path, request: Request, label: str) -> VideoSet:
    """Open the videos that `make_videos` wrote."""
    folder = folder / request.key
    parts = [
        VideoChunk(
            key=hashed(request.key, str(part.start)),
            names=tuple(f"video {number} of {label}" for number in part),
            prompts=tuple(request.prompts[n] for n in part),
            read=partial(_read, _file(folder, part), [request.prompts[n] for n in part], float(request.settings.fps)),
        )
        for part in request.parts
    ]
    return VideoSet(label=label, parts=parts)


def _file(folder: Path, part: range) -> Path:
    return folder / f"{part.start:06d}.safetensors"


def _read(file: Path, prompts: Sequence[str], fps: float) -> list[Clip]:
    with safe_open(file, framework="pt") as stored:
        videos = stored.get_tensor("video_NTHWC").numpy()
    return [Clip(video, fps, prompt) for video, prompt in zip(videos, prompts, strict=True)]
