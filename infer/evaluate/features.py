"""Features of videos, computed once and cached on disk by a hash of everything that affects them.

Shapes: N videos, T/H/W frames, height, width, C colour channels, F features of each video, D width.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megadit.infer.evaluate.extractors.base import Extractor
from megadit.infer.evaluate.metrics.table import Better
from megadit.infer.evaluate.videos import VideoChunk, VideoSet, hashed
from megadit.infer.evaluate.window import Window, windowed
from megadit.infer.runtimes.ranks import Ranks
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.progress import Progress

PICTURES_AT_ONCE = 32


class Scorer(Protocol):
    """Scorer of single videos and their prompts: (uint8 BTHWC, prompts) -> float32 BS, one number per column."""

    name: str
    sees: str
    """"scores"."""
    columns: tuple[str, ...]
    better: Mapping[str, Better]
    """Better direction of each column."""
    fewest_frames: int
    needs_prompts: bool
    protocol: str
    fingerprint: str

    def __call__(self, video_BTHWC: Tensor, prompts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FeatureStore:
    folder: Path
    window: Window

    def fill(
        self, sets: Sequence[VideoSet], extractors: Sequence[Extractor | Scorer], ranks: Ranks, shows_progress: bool
    ) -> None:
        """Computes the missing features of this process's chunks. Raises UserError for videos that do not fit the
        window or an extractor."""
        for extractor in extractors:
            if self.window.frames < extractor.fewest_frames:
                raise UserError(
                    f"{extractor.name} needs {extractor.fewest_frames} frames or more of a video, the window has "
                    f"{self.window.frames}: make longer videos, or leave it out"
                )
        parts = {part.key: part for each in sets for part in each.parts}
        missing = [
            (part, extractors_left)
            for part in ranks.mine(list(parts.values()))
            if (extractors_left := [each for each in extractors if not self._file(part, each).exists()])
        ]
        with Progress(sum(len(part.names) for part, _ in missing), "features", enabled=shows_progress) as bar:
            for part, extractors_left in missing:
                video_NTHWC, prompts = windowed(part, self.window)
                for extractor in extractors_left:
                    self._write(part, extractor, _features(extractor, video_NTHWC, prompts), prompts)
                bar.advance(len(prompts))

    def load(self, videos: VideoSet, extractor: Extractor | Scorer) -> tuple[Tensor, list[str]]:
        """Load the features [N, F, D] of all videos of a set, and their prompts."""
        found, prompts = [], []
        for part in videos.parts:
            with safe_open(self._file(part, extractor), framework="pt") as stored:
                found.append(stored.get_tensor("features_NFD"))
                prompts += json.loads(stored.metadata()["prompts"])
        return torch.cat(found), prompts

    def _file(self, part: VideoChunk, extractor: Extractor | Scorer) -> Path:
        decides = (part.key, extractor.name, extractor.sees, extractor.protocol, extractor.fingerprint)
        return self.folder / f"{hashed(*decides, self.window.text)[:32]}.safetensors"

    def _write(self, part: VideoChunk, extractor: Extractor | Scorer, features_NFD: Tensor, prompts: list[str]) -> None:
        if not features_NFD.isfinite().all():
            raise UserError(
                f"{extractor.name} gives values that are not finite for {part.names[0]} or the videos after it"
            )
        with atomic_path(self._file(part, extractor)) as temporary:
            tensors = {"features_NFD": features_NFD.float().cpu().contiguous()}
            save_file(tensors, temporary, metadata={"prompts": json.dumps(prompts)})


def _features(extractor: Extractor | Scorer, video_NTHWC: Tensor, prompts: Sequence[str]) -> Tensor:
    """Features [N, F, D]: for extractors of pictures, F is the number of frames, else 1."""
    if extractor.sees == "scores":
        return extractor(video_NTHWC, prompts)[:, None]
    if extractor.sees != "pictures":
        return extractor(video_NTHWC)[:, None]
    pictures = video_NTHWC.flatten(0, 1)[:, None]
    found = torch.cat([extractor(part).cpu() for part in pictures.split(PICTURES_AT_ONCE)])
    return found.reshape(*video_NTHWC.shape[:2], -1)
