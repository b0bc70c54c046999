"""The files that a generation is given: options to files with a use, and back from a record."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megadit.infer.given import REMAKE, GivenVideo
from megadit.infer.options import GenerateOptions, refuse
from megadit.infer.video_io import read_video
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import sha256_of

MEDIA = {
    "input_video": REMAKE,
    "continue_video": "prefix",
    "lead_to_video": "suffix",
    "image": "first_frame",
    "last_image": "last_frame",
    "video": "edit",
}
"""Options that name a file, and its use; a `video` with a `mask` is for inpaint. `keyframe` names several."""
OPTIONS = (*MEDIA, "keyframe", "mask", "strength", "keep_frames")
"""All options of given files, and the keys of a .jsonl prompt file's lines."""
DEFAULT_STRENGTH = 0.6
DARKEST_WHITE = 128
"""Of a mask's pixels, 0..255."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFile:
    """A file that is given; see `GivenVideo`."""

    path: str
    sha256: str
    use: str = ""
    strength: float | None = None
    keep_frames: int | None = None
    frame: int | None = None
    mask: str = ""
    mask_sha256: str = ""

    def load(self) -> GivenVideo:
        """Decodes it."""
        frames, _ = read_video(self.path)
        mask_THW = (read_video(self.mask)[0].max(-1) >= DARKEST_WHITE) if self.mask else None
        return GivenVideo(
            frames=np.ascontiguousarray(frames),
            use=self.use,
            strength=self.strength,
            keep_frames=self.keep_frames,
            frame=self.frame,
            mask=mask_THW,
        )


def given_files(line: Mapping[str, Any], options: GenerateOptions, num_frames: int) -> tuple[GivenFile, ...]:
    """What a line of a prompt file, or else the options, give of a video of `num_frames`.

    Raises:
        UserError: for options that exclude each other, a malformed keyframe, and files that cannot be read.
    """
    named = {name: getattr(options, name) for name in OPTIONS}
    has_own = any(name in line for name in (*MEDIA, "keyframe"))
    values = {**dict.fromkeys(OPTIONS), **line} if has_own else {**named, **line}
    refuse(
        values["input_video"] and any(values[name] for name in (*MEDIA, "keyframe") if name != "input_video"),
        "give input_video, which is made anew as a whole, or other videos and images, not both",
    )
    refuse(
        values["image"] and values["continue_video"], "give image or continue_video, not both: both are the beginning"
    )
    refuse(
        values["last_image"] and values["lead_to_video"], "give last_image or lead_to_video, not both: both are the end"
    )
    files = [_given_file(name, use, values, num_frames) for name, use in MEDIA.items() if values[name]]
    return (*files, *map(_keyframe, values["keyframe"] or ()))


def _given_file(name: str, use: str, values: Mapping[str, Any], num_frames: int) -> GivenFile:
    path, settings = values[name], {}
    if use == REMAKE:
        settings["strength"] = DEFAULT_STRENGTH if values["strength"] is None else values["strength"]
    if use in ("prefix", "suffix"):
        keep_frames = values["keep_frames"]
        settings["keep_frames"] = max(1, num_frames // 2) if keep_frames is None else keep_frames
    if name == "video" and values["mask"]:
        use, settings = "inpaint", {"mask": values["mask"], "mask_sha256": sha256_of(values["mask"])}
    return GivenFile(path=path, sha256=sha256_of(path), use=use, **settings)


def _keyframe(text: str) -> GivenFile:
    number, _, path = text.partition(":")
    if not (number.isdecimal() and path):
        raise UserError(f"keyframe {text!r} must be the number of a frame and a file, such as 24:middle.png")
    return GivenFile(path=path, sha256=sha256_of(path), use="keyframe", frame=int(number))


def as_record(files: Sequence[GivenFile]) -> list[dict[str, Any]]:
    """For the record of a video."""
    return [{name: value for name, value in asdict(file).items() if value not in (None, "")} for file in files]


def options_of(recorded: Any) -> dict[str, Any]:
    """The options that give what a record says.

    Raises:
        UserError: if one of the files was changed since.
    """
    if not recorded:
        return {}
    # records of earlier versions hold one file, whose use its settings say
    files = [GivenFile(**values) for values in ([recorded] if isinstance(recorded, dict) else recorded)]
    found: dict[str, Any] = {}
    names = {use: name for name, use in MEDIA.items()} | {"inpaint": "video"}
    for file in files:
        for path, known in ((file.path, file.sha256), (file.mask, file.mask_sha256)):
            if path and sha256_of(path) != known:
                raise UserError(f"{path}, from which it started, was changed since")
        use = file.use or ("prefix" if file.strength is None else REMAKE)
        if use == "keyframe":
            found["keyframe"] = (*found.get("keyframe", ()), f"{file.frame}:{file.path}")
            continue
        found[names[use]] = file.path
        settings = {"strength": file.strength, "keep_frames": file.keep_frames, "mask": file.mask or None}
        found |= {name: value for name, value in settings.items() if value is not None}
    return found
