"""Conditioning files of a generation: read from options, written to a record, and read back from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import VIDEO_TO_VIDEO, ConditioningItem
from megadit.infer.conditioning.named import ConditioningFile, named_media
from megadit.infer.generate.options import GenerateOptions
from megadit.infer.media.video_io import read_video
from megadit.models.diffusion.conditioning_settings import KINDS
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MAX_MEDIA_BYTES, sha256_of

MEDIA = {name: kind for name, kind in KINDS.items() if name != "keyframe"}
"""Options that name one file -> its kind; a `video` with a `mask` is for inpaint. `keyframe` names several."""
OPTIONS = (*MEDIA, "keyframe", "mask", "strength", "keep_frames")
"""All options of conditioning files, and the keys of a .jsonl prompt file's lines."""


def load_file(file: ConditioningFile) -> ConditioningItem:
    """Decode a file of a command."""
    return file.load(lambda path: np.ascontiguousarray(read_video(path)[0]))


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
    return tuple(
        replace(file, sha256=_checksum(file.source), mask_sha256=_checksum(file.mask) if file.mask else "")
        for file in named_media(values, num_frames)
    )


def as_record(files: Sequence[ConditioningFile]) -> list[dict[str, Any]]:
    """Return files in the form of a video's record."""
    rows = ({"path" if name == "source" else name: value for name, value in asdict(file).items()} for file in files)
    return [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]


def recorded_files(recorded: Any) -> list[ConditioningFile]:
    """Return the conditioning files of a record, which are not opened.

    Raises:
        UserError: if the conditioning came from Python and is in no file.
        KeyError, TypeError: if this is no record.
    """
    kinds = ", ".join(values["kind"] for values in recorded if "path" not in values)
    if kinds:
        raise UserError(f"its {kinds} came from Python and is in no file; pass it as an option, such as --image FILE")
    return [
        ConditioningFile(source=values["path"], **{name: values[name] for name in values.keys() - {"path"}})
        for values in recorded
    ]


def check_unchanged(files: Sequence[ConditioningFile]) -> None:
    """Raises UserError if one of the files is not what it was when it was recorded."""
    for file in files:
        for path, known in ((file.source, file.sha256), (file.mask, file.mask_sha256)):
            if path and _checksum(path) != known:
                raise UserError(f"{path}, one of its conditioning files, has changed")


def options_of(files: Sequence[ConditioningFile]) -> dict[str, Any]:
    """Return the options that name these conditioning files."""
    found: dict[str, Any] = {}
    names = {kind: name for name, kind in MEDIA.items()} | {"inpaint": "video"}
    for file in files:
        kind = file.kind or ("prefix" if file.strength is None else VIDEO_TO_VIDEO)
        if kind == "keyframe":
            found["keyframe"] = (*found.get("keyframe", ()), f"{file.frame}:{file.source}")
            continue
        found[names[kind]] = file.source
        settings = {"strength": file.strength, "keep_frames": file.keep_frames, "mask": file.mask or None}
        found |= {name: value for name, value in settings.items() if value is not None}
    return found


def _checksum(path: str) -> str:
    return sha256_of(path, MAX_MEDIA_BYTES)
