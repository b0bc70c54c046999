"""Options for conditioning a video on images and clips, each defined once.

`ConditioningOptions` holds options of `megadit generate` and `serve ask`, keys of a prompt file's lines,
inputs of the Triton model and fields of `POST /v1/videos`. A command takes paths of files, a request holds their bytes.
Nothing here imports torch.
"""

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megadit.models.shared.cli.setting import check_settings, setting, settings_of
from megadit.models.shared.errors import UserError


def _path(help: str, *names: str) -> Any:
    """A path as text, of which "" is none."""
    return setting("", help, metavar="PATH", names=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningOptions:
    """Options for conditioning files; None is the default."""

    input_video: str = _path("video or image for video-to-video (SDEdit), see --strength")
    strength: float | None = setting(
        None, "share of the sampling steps, 0 to 1, to redo on --input_video (default: 0.6)", above=0, high=1
    )
    continue_video: str = _path("video or image to continue: its last frames become the first ones")
    lead_to_video: str = _path("video to lead up to: its first frames become the last ones")
    keep_frames: int | None = setting(
        None,
        "number of frames of --continue_video or --lead_to_video to keep (default: half of the video)",
        above=0,
    )
    image: str = _path("image for the first frame", "--image", "--first_frame", "--conditioned_image_or_video_path")
    last_image: str = _path("image for the last frame", "--last_image", "--last_frame")
    keyframe: Sequence[str] = setting(
        (), "image for a frame, numbered from 0; repeat for several", repeated=True, metavar="NUMBER:PATH"
    )
    video: str = _path("video to inpaint where --mask is white, or to edit as --instruction says")
    mask: str = _path("mask for --video, an image or a video: white is generated, black is kept")
    instruction: str = setting(
        "", "edit to make in --video, in place of a prompt: --instruction 'make it red'", metavar="TEXT"
    )


CONDITIONING = settings_of(ConditioningOptions)
MEDIA = tuple(name for name, about in CONDITIONING.items() if (about.metavar or "").endswith("PATH"))
"""Options that take the path of a file, or several."""
IMAGE_HEADS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""First bytes of images (png, jpg, gif, webp); everything else is tried as a video."""
KINDS = {
    "input_video": "remake",
    "continue_video": "prefix",
    "lead_to_video": "suffix",
    "image": "first_frame",
    "last_image": "last_frame",
    "keyframe": "keyframe",
    "video": "edit",
}
"""Option -> kind of conditioning that its file is for; a `video` with a `mask` is for inpaint."""
NEEDED = {
    "strength": ("input_video",),
    "keep_frames": ("continue_video", "lead_to_video"),
    "mask": ("video",),
    "instruction": ("video",),
}
"""Option -> other options of which it needs at least one."""
_TAUGHT = {"last_image": "last_frame", "keyframe": "keyframes", "video": "edit"}
"""Option -> conditioning that needs a network trained for it; any other can be imposed while sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """Limits on the media of one request, all of them together; larger ones are rejected before decoding."""

    max_media_bytes: int = setting(32 << 20, "maximum bytes of a request's media (default: 32 MiB)", low=1, metavar="N")
    max_media_pixels: int = setting(
        1 << 25, "maximum frames x height x width of these (default: 33,554,432, or more)", low=1, metavar="N"
    )
    max_media_frames: int = setting(1024, "maximum frames of an input video (default: {default})", low=1, metavar="N")
    max_media_side: int = setting(8192, "maximum side of an input frame (default: {default})", low=1, metavar="N")
    max_media_seconds: float = setting(120.0, "maximum duration of an input video (default: 120)", above=0, metavar="S")

    def __post_init__(self) -> None:
        check_settings(self)


def check_conflicts(values: Mapping[str, Any]) -> None:
    """Raises UserError for files that exclude each other."""
    if values.get("input_video") and any(values.get(name) for name in KINDS if name != "input_video"):
        raise UserError("give input_video (video-to-video) or other videos and images, not both")
    for one, other, why in (
        ("image", "continue_video", "both are the beginning"),
        ("last_image", "lead_to_video", "both are the end"),
    ):
        if values.get(one) and values.get(other):
            raise UserError(f"give {one} or {other}, not both: {why}")


def check_combination(values: Mapping[str, Any], prompt: str, conditionings: Collection[str]) -> None:
    """Raises UserError for options of a request that exclude each other, or that the network does not support.

    `conditionings` are the kinds of conditioning that it was trained for.
    """
    check_conflicts(values)
    for name, needed in NEEDED.items():
        if values.get(name) and not any(values.get(one) for one in needed):
            raise UserError(f"{name} needs {' or '.join(needed)}")
    if values.get("instruction") and prompt:
        raise UserError("instruction replaces the prompt: give one of them")
    for name, kind in _TAUGHT.items():
        is_painted = name == "video" and values.get("mask")
        if values.get(name) and not is_painted and kind not in conditionings:
            known = ", ".join(sorted(conditionings)) or "none"
            raise UserError(f"{name} is not supported: this model was not trained for {kind} (supported: {known})")


def plain_bytes(value: bytes) -> bytes:
    """The bytes of a file, decoded if they are a data URL: JSON cannot hold bytes otherwise.

    Raises:
        UserError: for a malformed one.
    """
    if not value.startswith(b"data:"):
        return value
    head, _, text = value.partition(b",")
    return from_base64(text if head.endswith(b";base64") else b"?")


def from_base64(text: str | bytes) -> bytes:
    """Raises:
    UserError: for text that is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError("a file in JSON must be base64, or a data URL with ;base64") from None


def split_keyframe(value: Any) -> tuple[int, Any]:
    """(number, path or bytes) of `24:middle.png`, or of `24:` before the bytes of a file.

    Raises:
        UserError: if it is something else.
    """
    colon = b":" if isinstance(value, bytes) else ":"
    number, _, file = value.partition(colon)
    if not (number.isdigit() and number.isascii() and len(number) < 10 and file):
        shown = repr(value[:40].decode(errors="replace") if isinstance(value, bytes) else value)
        raise UserError(f"keyframe {shown} must be the number of a frame and a file, such as 24:middle.png")
    return int(number), file
