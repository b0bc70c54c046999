"""Conditioning files of a generation: read from options, written to a record, and read back from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import VIDEO_TO_VIDEO, ConditioningItem
from megadit.infer.conditioning.named import Medium, named_media, white_of
from megadit.infer.generate.options import GenerateOptions
from megadit.infer.media.video_io import read_video
from megadit.models.diffusion.conditioning_settings import KINDS
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import sha256_of

MEDIA = {name: kind for name, kind in KINDS.items() if name != "keyframe"}
"""Options that name one file -> its kind; a `video` with a `mask` is for inpaint. `keyframe` names several."""
OPTIONS = (*MEDIA, "keyframe", "mask", "strength", "keep_frames")
"""All options of conditioning files, and the keys of a .jsonl prompt file's lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningFile:
    """Conditioning file; see `ConditioningItem`."""

    path: str
    sha256: str
    kind: str = ""
    strength: float | None = None
    keep_frames: int | None = None
    frame: int | None = None
    mask: str = ""
    mask_sha256: str = ""

    def load(self) -> ConditioningItem:
        """Decode the file."""
        frames, _ = read_video(self.path)
        mask_THW = white_of(read_video(self.mask)[0]) if self.mask else None
        return ConditioningItem(
            frames=np.ascontiguousarray(frames),
            kind=self.kind,
            strength=self.strength,
            keep_frames=self.keep_frames,
            frame=self.frame,
            mask=mask_THW,
        )


def conditioning_files(
    line: Mapping[str, Any], options: GenerateOptions, num_frames: int
) -> tuple[ConditioningFile, ...]:
    """Return the conditioning files of a video of `num_frames`, from a line of a prompt file or else from the options.

    Raises:
        UserError: for options that exclude each other, a malformed keyframe, and files that cannot be read.
    """
    named = {name: getattr(options, name) for name in OPTIONS}
    has_own = any(name in line for name in (*MEDIA, "keyframe"))
    values = {**dict.fromkeys(OPTIONS), **line} if has_own else {**named, **line}
    return tuple(map(_conditioning_file, named_media(values, num_frames)))


def _conditioning_file(part: Medium) -> ConditioningFile:
    return ConditioningFile(
        path=part.source,
        sha256=sha256_of(part.source),
        kind=part.kind,
        strength=part.strength,
        keep_frames=part.keep_frames,
        frame=part.frame,
        mask=part.mask or "",
        mask_sha256=sha256_of(part.mask) if part.mask else "",
    )


def as_record(files: Sequence[ConditioningFile]) -> list[dict[str, Any]]:
    """Return files in the form of a video's record."""
    return [{name: value for name, value in asdict(file).items() if value not in (None, "")} for file in files]


def options_of(recorded: Any) -> dict[str, Any]:
    """Return the options that name the conditioning files of a record.

    Raises:
        UserError: if one of the files has changed, or the conditioning came from Python and is in no file.
    """
    if not recorded:
        return {}
    kinds = ", ".join(values["kind"] for values in recorded if "path" not in values)
    if kinds:
        raise UserError(f"its {kinds} came from Python and is in no file; pass it as an option, such as --image FILE")
    files = [ConditioningFile(**values) for values in recorded]
    found: dict[str, Any] = {}
    names = {kind: name for name, kind in MEDIA.items()} | {"inpaint": "video"}
    for file in files:
        for path, known in ((file.path, file.sha256), (file.mask, file.mask_sha256)):
            if path and sha256_of(path) != known:
                raise UserError(f"{path}, one of its conditioning files, has changed")
        kind = file.kind or ("prefix" if file.strength is None else VIDEO_TO_VIDEO)
        if kind == "keyframe":
            found["keyframe"] = (*found.get("keyframe", ()), f"{file.frame}:{file.path}")
            continue
        found[names[kind]] = file.path
        settings = {"strength": file.strength, "keep_frames": file.keep_frames, "mask": file.mask or None}
        found |= {name: value for name, value in settings.items() if value is not None}
    return found
