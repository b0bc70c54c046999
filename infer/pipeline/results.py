"""Results of a generation: videos that can be saved, and that notebooks show."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megadit.infer.media.animations import encode_image
from megadit.infer.media.signing import Marker
from megadit.infer.media.video_io import encode_mp4, write_video
from megadit.infer.pipeline.adapters import Scales, scaled_adapters
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SamplingSettings

_NARROWEST = 256
"""Minimum width of a video in a notebook, in CSS pixels."""


_RECORD_VERSION = 1


def origin_of(bundle: Bundle, *, dtype: str, runtime: str, cache_measure: str) -> dict[str, Any]:
    """Return the origin of a video for its record: bundle, dtype, runtime."""
    return {
        "megadit_record": _RECORD_VERSION,
        "checkpoint_path": str(bundle.path.resolve()),
        "checkpoint": checkpoint_fingerprint(bundle),
        "dtype": dtype,
        "runtime": runtime,
        "cache_measure": cache_measure,
    }


def checkpoint_fingerprint(bundle: Bundle) -> str:
    """A short hash of the weights."""
    return bundle.manifest["files"]["transformer/model.safetensors"]["sha256"][:16]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class GeneratedVideo:
    """A video and everything it was generated from; notebooks show it."""

    video: np.ndarray
    """uint8 THWC, 0..255."""
    prompt: str
    seed: int
    settings: SamplingSettings
    """All other settings of the video, in the standard guidance convention."""
    latents_CTHW: Tensor
    """Latents that the video was decoded from; float32, on the CPU."""
    num_denoiser_calls: int
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the video (`origin_of`); empty for a pipeline that was not opened from a bundle."""
    adapters: Scales = field(default_factory=dict)
    conditioning: Sequence[str] = ()
    """Kinds of its conditioning media."""

    def record(self) -> dict[str, Any]:
        """All fields except frames and latents, for JSON; `megadit generate --repeat` reads it.

        Raises:
            UserError: if an adapter is no longer there.
        """
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            **asdict(self.settings),
            "num_denoiser_calls": self.num_denoiser_calls,
            **self.origin,
            "conditioning": [{"kind": kind} for kind in self.conditioning],
            "adapters": [asdict(kind) for kind in scaled_adapters(self.adapters)],
        }

    def save(self, path: str | Path, *, record: Mapping[str, Any] | None = None, mark: Marker | None = None) -> Path:
        """Writes an mp4, gif or webp (or png, jpg for one frame) atomically, and returns its path.

        The prompt is its title; `record`, by default `self.record()`, is kept inside as a comment. `mark` signs it.

        Raises:
            UserError: as `write_video`.
        """
        about = {"comment": json.dumps(self.record() if record is None else record), "title": self.prompt}
        write_video(path, self.video, self.settings.fps, metadata=about, mark=mark)
        return Path(path)

    def __repr__(self) -> str:
        num_frames, height, width, _ = self.video.shape
        size = f"{num_frames} frames of {width}x{height}" if num_frames > 1 else f"an image of {width}x{height}"
        return f"<GeneratedVideo {self.prompt!r}, seed {self.seed}: {size}>"

    def _repr_html_(self) -> str:
        """The video itself, with its prompt below, for notebooks."""
        caption = html.escape(f"{self.prompt} · seed {self.seed}")
        style = f"min-width: {_NARROWEST}px; max-width: 100%; image-rendering: pixelated"
        if len(self.video) == 1:
            data = base64.b64encode(encode_image(self.video[0], ".png")).decode()
            shown = f'<img src="data:image/png;base64,{data}" style="{style}" alt="{caption}">'
        else:
            data = base64.b64encode(encode_mp4(self.video, self.settings.fps)).decode()
            shown = f'<video src="data:video/mp4;base64,{data}" style="{style}" controls autoplay loop muted></video>'
        return f'<figure style="display: inline-block; margin: 4px">{shown}<figcaption>{caption}</figcaption></figure>'


class GeneratedVideos(list[GeneratedVideo]):
    """Videos in the order of their prompts: a list that notebooks show as a row."""

    def _repr_html_(self) -> str:
        return "\n".join(video._repr_html_() for video in self)
