"""Videos that a model makes for an evaluation, kept without loss: what is there is not made again.

The n-th video has the seed n, whatever the model and the guidance: two models are compared with the same prompts and
the same noise.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megadit.infer.evaluate.videos import PART, Clip, Part, VideoSet, hashed
from megadit.infer.outputs import checkpoint_fingerprint
from megadit.infer.pipeline import TextToVideo
from megadit.infer.ranks import Ranks
from megadit.models.bundle.bundle import Bundle
from megadit.models.settings import SamplingSettings
from megadit.models.shared.files import atomic_path, write_json
from megadit.models.shared.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What decides the videos of a model."""

    bundle: Bundle
    prompts: Sequence[str]
    """One for each video."""
    settings: SamplingSettings
    dtype: str
    seed: int = 0
    """Of the first video."""

    @property
    def key(self) -> str:
        return hashed(json.dumps(self.about, sort_keys=True))[:16]

    @property
    def about(self) -> dict:
        return {
            "model": checkpoint_fingerprint(self.bundle),
            "tokenizer": self.bundle.manifest["fingerprints"]["tokenizer"],
            "prompts": list(self.prompts),
            "seed": self.seed,
            "dtype": self.dtype,
            "settings": asdict(self.settings),
        }

    @property
    def parts(self) -> list[range]:
        count = len(self.prompts)
        return [range(first, min(first + PART, count)) for first in range(0, count, PART)]


def make_videos(folder: Path, request: Request, load: Callable[[], TextToVideo], ranks: Ranks, *, told: bool) -> None:
    """Makes the parts of this process that are not there yet, in `folder`/<key of the request>; `load` is called where
    there are any."""
    folder = folder / request.key
    if ranks.replica == 0 and not (folder / "request.json").exists():
        write_json(folder / "request.json", request.about)
    missing = [part for part in ranks.mine(request.parts) if not _file(folder, part).exists()]
    with Progress(sum(map(len, missing)), "generating videos", enabled=told) as bar:
        for part in missing:
            prompts, seeds = [request.prompts[n] for n in part], [request.seed + n for n in part]
            videos = []
            for result in load().stream(prompts, request.settings, seeds=seeds, batch_size=PART):
                videos.append(torch.from_numpy(result.video))
                bar.advance()
            with atomic_path(_file(folder, part)) as temporary:
                save_file({"video_NTHWC": torch.stack(videos)}, temporary)


def made_videos(folder: Path, request: Request, label: str) -> VideoSet:
    """What `make_videos` has written."""
    folder = folder / request.key
    parts = [
        Part(
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
