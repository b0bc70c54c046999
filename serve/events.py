"""Messages from the service to a client: a stream of events, and the errors that end it.

Nothing here imports torch: a client machine does not need it.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

EVENT, DATA = "event", "data"
"""The two outputs of every response: JSON of the event, and the bytes of a preview, video or image."""
DEADLINE_MARK, ADAPTER_MARK, GUARDRAIL_MARK = "deadline exceeded", "adapter not found", "held back"
"""Prefixes of the messages of errors for which Triton's backends have no codes; see `MARKS`."""


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


MARKS: dict[str, type[ServiceError]] = {
    DEADLINE_MARK: DeadlineExceededError,
    ADAPTER_MARK: AdapterNotFoundError,
    GUARDRAIL_MARK: HeldBackError,
}
"""Prefix of an error message -> the error, since its code is not transmitted."""
