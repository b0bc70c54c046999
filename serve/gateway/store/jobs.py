"""Jobs of the gateway.

States: queued -> in_progress -> completed | failed        (and from any of them: deleted)
"""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from megadit.serve.contract import VideoRequest
from megadit.serve.gateway.store.database import JOBS

QUEUED, IN_PROGRESS, COMPLETED, FAILED, DELETED = "queued", "in_progress", "completed", "failed", "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row of the job table."""

    number: int
    id: str
    key_id: str
    model: str
    request: VideoRequest
    priority: int
    status: str
    step: int
    attempts: int
    owner: str | None
    error_code: str | None
    """Code of its failure; for a job that has not ended, of a server failure that it may have caused."""
    error_message: str | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    expires_at: float | None
    """When the result expires, in wall-clock time, for display; the store's own clock decides."""
    media_type: str | None
    num_bytes: int | None
    sha256: str | None
    scores: dict[str, float] | None
    """Scores by a scorer, if they were requested."""
    result_name: str | None
    """File name of its video."""
    conditioning_name: str | None
    """File name of its conditioning media, until the job has ended."""
    remixed_from: str | None
    """The id of the video that it edits."""
    traceparent: str | None
    """Trace context of the request that created it, if traces are recorded (`serve/tracing.py`)."""
    queued_at: float | None
    """When it last entered the queue; None for a job of an older release."""

    @property
    def progress(self) -> int:
        """Percent of the steps; 100 only when the video is stored."""
        if self.status == COMPLETED:
            return 100
        return min(99, 100 * self.step // max(1, self.request.num_steps or 1))

    @property
    def is_suspected(self) -> bool:
        """Whether a server has failed while running it, and it has not ended."""
        return self.error_code is not None and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self.status not in (QUEUED, IN_PROGRESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """Job that a client requests."""

    model: str
    request: VideoRequest
    """The request, without its files, which are stored as `conditioning`."""
    id: str | None = None
    """Id of a job for which files are stored already."""
    conditioning: "Result | None" = None
    remixed_from: str | None = None
    priority: int = 2
    """Order among the jobs of its key: 1 is first, then 2 and 3."""
    idempotency_key: str | None = None
    fingerprint: str = ""
    """Hash of the request's body; the same idempotency key with another body is an error."""
    traceparent: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Video, or conditioning media of one, in the store."""

    name: str
    """Unique file name of this write."""
    media_type: str
    num_bytes: int
    sha256: str


def new_id() -> str:
    return f"video_{secrets.token_hex(16)}"


def failure(now: float, code: str, message: str) -> dict[str, Any]:
    """The columns of a job that has failed; `now` is of the store's clock."""
    return {
        "status": FAILED,
        "error_code": code,
        "error_message": message.encode(errors="replace").decode().replace("\0", " ")[:1000],
        "completed_at": time.time(),
        "ended_tick": now,
    }


_IN_JSON = ("request", "scores")


def job_of(row: Row) -> Job:
    """The job that a row of the table is."""
    plain = {name: getattr(row, name) for name in Job.__dataclass_fields__ if name in JOBS.c and name not in _IN_JSON}
    return Job(
        **plain,
        request=VideoRequest(**json.loads(row.request, object_hook=_with_tuples)),
        scores=None if row.scores is None else json.loads(row.scores),
        expires_at=None if row.expires_tick is None else row.completed_at + row.expires_tick - row.ended_tick,
    )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
