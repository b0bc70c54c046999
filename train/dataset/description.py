"""Metadata of a sample beside its pixels or latents: the JSON in its shard, which anybody may have written."""

from dataclasses import dataclass
from typing import Any

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError

MAX_DESCRIPTION_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 16
"""Maximum size of the header of a sample's safetensors: some hundred tensors."""
SLOWEST_FPS, FASTEST_FPS = 0.01, 10_000.0
"""Frame rates accepted for videos: the time between frames is a divisor."""
LARGEST_SIDE = 1 << 20
MOST_CAPTIONS = 64
MOST_FRAMES = 64
"""Maximum number of frames of one clip encoded as images."""


class UnreadableSampleError(ValueError):
    """Error of a sample whose members are missing, broken or out of range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    caption: str
    captions: tuple[str, ...]
    """All of them, where a sample has several; each pass over the data reads one."""
    num_frames: int
    """Number of frames; 0 where unknown, like height and width."""
    height: int
    width: int
    """Size of the decoded video, in pixels."""
    fps: float
    """0 for images."""
    aesthetic_score: float | None
    is_prior: bool = False
    """Whether a model made it (`megadit prepare prior`)."""
    seed: int | None = None
    """Seed of a generated video."""
    frame_times: tuple[float, ...] = ()
    """Times of the frames that were encoded as images, in latent frames."""
    keyframes: tuple[int, ...] = ()
    """Indices of a clip's frames that are to be encoded as images, where pixels are stored."""


def read_description(content: bytes) -> Description:
    """The description in the `.json` of a sample.

    Raises:
        UnreadableSampleError: naming what is missing or wrong.
    """
    try:
        values = parse_json(content, "its description", max_bytes=MAX_DESCRIPTION_BYTES)
    except UserError as error:
        raise UnreadableSampleError(str(error)) from None
    if not isinstance(values, dict):
        raise UnreadableSampleError("its description is not one of names and values")
    fps = _number(values, "fps")
    if fps is None or fps and not SLOWEST_FPS <= fps <= FASTEST_FPS:
        raise UnreadableSampleError(f"its fps is {fps}, not 0 or {SLOWEST_FPS:g} to {FASTEST_FPS:g}")
    return Description(
        caption=str(values.get("caption") or ""),
        captions=_captions(values),
        num_frames=_count(values, "num_frames"),
        height=_count(values, "height"),
        width=_count(values, "width"),
        fps=fps,
        aesthetic_score=_number(values, "aesthetic_score"),
        is_prior=_truth(values, "prior"),
        seed=_seed(values),
        frame_times=_times(values, "frame_times"),
        keyframes=tuple(map(int, _times(values, "keyframes"))),
    )


def _captions(values: dict[str, Any]) -> tuple[str, ...]:
    found = values.get("captions") or []
    if not isinstance(found, list) or len(found) > MOST_CAPTIONS or not all(isinstance(each, str) for each in found):
        raise UnreadableSampleError(f"its captions are not a list of at most {MOST_CAPTIONS} texts")
    return tuple(found)


def _truth(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise UnreadableSampleError(f"its {name} is {str(value)[:20]!r}, not true or false")
    return value


def _seed(values: dict[str, Any]) -> int | None:
    value = values.get("seed")
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
        raise UnreadableSampleError(f"its seed is {str(value)[:20]!r}, not a whole number from 0")
    return value


def _times(values: dict[str, Any], name: str) -> tuple[float, ...]:
    found = values.get(name) or []
    is_list = isinstance(found, list) and len(found) <= MOST_FRAMES
    if not is_list or not all(isinstance(time, int | float) and 0 <= time <= LARGEST_SIDE for time in found):
        raise UnreadableSampleError(f"its {name} is not a list of at most {MOST_FRAMES} times from 0")
    return tuple(map(float, found))


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise UnreadableSampleError(f"its {name} is no number") from None


def _count(values: dict[str, Any], name: str) -> int:
    number = _number(values, name) or 0
    if not 0 <= number <= LARGEST_SIDE:
        raise UnreadableSampleError(f"its {name} is {number:g}, not 0 to {LARGEST_SIDE}")
    return int(number)
