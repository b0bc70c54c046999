"""Messages from the service to a client: a stream of events, and the errors that end it.

Nothing here imports torch: a client machine needs none.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

EVENT, DATA = "event", "data"
"""The two outputs of every response: JSON that says what it is, and the bytes of a preview, video or image."""
DEADLINE_MARK, ADAPTER_MARK, GUARDRAIL_MARK = "deadline exceeded", "adapter not found", "held back"
"""Beginnings of the messages of errors for which Triton's backends have no codes of their own; see `MARKS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A denoising step of a request is done."""

    step: int
    num_steps: int
    sigma: float
    """The noise level that remains, in units of the latents."""
    seconds_left: float
    preview: bytes = b""
    """A JPEG of what the video is going to be; empty for most steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoResult:
    """A finished video, or an image where it has one frame."""

    data: bytes
    media_type: str
    """video/mp4 or image/png."""
    index: int
    """Index among the request's videos."""
    prompt: str
    seed: int
    settings: dict[str, Any]
    """Everything else that decides the video."""
    seconds: float
    """Seconds of work on the request so far, without its time in the queue."""
    batch_size: int
    """How many videos the network made at once; the others may be of other requests."""
    scores: dict[str, float] | None = None
    """Scores by a judge; None where none were asked for, empty where the judge failed."""

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
    """The service failed; the message says how. Its subclasses are what a client may want to tell apart."""


class InvalidRequestError(ServiceError):
    """The request can never be served; it must be changed."""

    code = "invalid_request"
    """Error code of a job that failed with it."""


class AdapterNotFoundError(InvalidRequestError):
    """The service has no adapter of a name that the request gives, or no longer."""

    code = "adapter_not_found"


class UnavailableError(ServiceError):
    """The service is full, starting or stopping, or the request waited too long; try again later."""


class CancelledError(ServiceError):
    """The request was cancelled."""


class DeadlineExceededError(ServiceError):
    """The request took longer than its client allowed."""


class HeldBackError(InvalidRequestError):
    """The service's content filter refuses the request, or holds its video back."""

    code = "guardrail"


MARKS: dict[str, type[ServiceError]] = {
    DEADLINE_MARK: DeadlineExceededError,
    ADAPTER_MARK: AdapterNotFoundError,
    GUARDRAIL_MARK: HeldBackError,
}
"""Beginning of an error message -> the error, whose code gets lost on the way."""
