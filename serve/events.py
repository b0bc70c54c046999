"""Messages from the service to a client: a stream of events, and the errors that end it.

Nothing here imports torch: a client machine does not need it.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

EVENT, DATA = "event", "data"
"""The two outputs of every response: JSON of the event, and the bytes of a preview, video or image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A denoising step of a request is done."""

    step: int
    num_steps: int
    sigma: float
    """Remaining noise level, in units of the latents."""
    seconds_left: float
    preview: bytes = b""
    """A JPEG preview of the video; empty for most steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoResult:
    """A finished video, or an image if it has one frame."""

    data: bytes
    media_type: str
    """video/mp4 or image/png."""
    index: int
    """Index among the request's videos."""
    prompt: str
    seed: int
    settings: dict[str, Any]
    """All other settings of the video."""
    seconds: float
    """Seconds of work on the request so far, excluding its time in the queue."""
    batch_size: int
    """Number of videos in its batch, which may belong to other requests."""
    scores: dict[str, float] | None = None
    """Scores by a scorer; None if not requested, empty if the scorer failed."""

    @property
    def suffix(self) -> str:
        return {"video/mp4": ".mp4", "image/png": ".png"}[self.media_type]


Event = StepDone | VideoResult
_PAYLOADS = {"progress": (StepDone, "preview"), "video": (VideoResult, "data")}


def event_to_wire(event: Event) -> tuple[str, bytes]:
    """(JSON, bytes) of an event."""
    kind = "video" if isinstance(event, VideoResult) else "progress"
    values = dataclasses.asdict(event)
    data = values.pop(_PAYLOADS[kind][1])
    return json.dumps({"type": kind, **values}), data


def event_from_wire(text: str, data: bytes) -> Event:
    """The inverse of `event_to_wire`."""
    values = json.loads(text)
    event, payload = _PAYLOADS[values.pop("type")]
    return event(**values, **{payload: data})


class ServiceError(Exception):
    """The service failed, as the message says. Subclasses are errors that a client may want to distinguish."""


class InvalidRequestError(ServiceError):
    """The request is invalid, and must be changed."""

    code = "invalid_request"
    """Error code of a job that failed with it."""


class AdapterNotFoundError(InvalidRequestError):
    """The service has no adapter (or no longer) of a name in the request."""

    code = "adapter_not_found"


class UnavailableError(ServiceError):
    """The service is full, starting or stopping, or the request waited too long; try again later."""


class CancelledError(ServiceError):
    """The request was cancelled."""


class DeadlineExceededError(ServiceError):
    """The request took longer than its client allowed."""


class HeldBackError(InvalidRequestError):
    """The service's content filter refuses the request or its video."""

    code = "guardrail"


_MARKS = {
    InvalidRequestError: "invalid request: ",
    AdapterNotFoundError: "adapter not found: ",
    HeldBackError: "held back: ",
    DeadlineExceededError: "deadline exceeded: ",
    CancelledError: "cancelled: ",
}
"""Error -> prefix of its message, since streams of Triton have no codes of errors."""
_OF_TRITON = {
    "Exceeds maximum queue size": UnavailableError,
    "Request timeout expired": UnavailableError,
    "has stopped accepting new": UnavailableError,
    "is not at ready state": UnavailableError,
    "unexpected inference input": InvalidRequestError,
}
"""Part of a message of Triton's own -> its error."""


def error_to_wire(error: ServiceError) -> str:
    """The message that a Triton backend sends."""
    return f"{_MARKS.get(type(error), '')}{error}"


def error_from_wire(message: str) -> ServiceError:
    """The inverse of `error_to_wire`, and errors of Triton itself."""
    for error, mark in _MARKS.items():
        if message.startswith(mark):
            return error(message.removeprefix(mark))
    return next((error for part, error in _OF_TRITON.items() if part in message), ServiceError)(message)
