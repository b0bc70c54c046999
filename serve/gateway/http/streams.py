"""Progress of a video as server-sent events, and waiting for its end."""

import asyncio
import base64
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from megadit.serve.gateway.errors import ApiError, unavailable
from megadit.serve.gateway.http.schemas import Video, VideoPreview
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.database import in_a_line
from megadit.serve.gateway.store.jobs import QUEUED, Job
from megadit.serve.gateway.store.keys import Key
from megadit.serve.gateway.store.patience import patient

_SECONDS_BETWEEN_LOOKS = 0.2
_LOOKS_AT_ONCE = 2
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 15.0


class Streams:
    """Streams, downloads and waiting requests, limited for each key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._looks = CapacityLimiter(_LOOKS_AT_ONCE)

    async def look(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that asks the store, in a thread: few at once, so that other requests do not wait for many
        streams."""
        return await to_thread.run_sync(function, *arguments, limiter=self._looks)

    @contextmanager
    def of(self, key: Key) -> Iterator[None]:
        """Context of a request of this key until its response has been read. Raises ApiError if it has too many."""
        with self._lock:
            if self._open[key.id] >= self._gateway.settings.max_streams:
                message = f"this key may read {self._gateway.settings.max_streams} streams and videos at once"
                raise ApiError(429, "too_many_streams", message, retry_after=5)
            self._count(key, 1)
        try:
            yield
        finally:
            with self._lock:
                self._count(key, -1)

    async def end_of(self, key: Key, video_id: str, request: Request) -> Job | None:
        """Wait for a job's end; None if it was deleted. Raises ApiError if the gateway ends before the video is
        started; ClientDisconnect if the client disconnects."""
        while True:
            with patient():  # each look by itself
                job = await self.look(self._gateway.store.get, key.id, video_id)
            if job is None or job.has_ended:
                return job
            if self._gateway.runner.is_draining and job.status == QUEUED:
                raise unavailable("draining", f"this gateway is about to end; ask for {video_id} again")
            if await request.is_disconnected():
                raise ClientDisconnect
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    async def events(self, key: Key, video_id: str) -> AsyncIterator[str]:
        last, shown, reported_at = None, 0, time.monotonic()
        while not self._gateway.runner.is_draining:
            try:
                with patient():  # each look by itself
                    job, preview = await self.look(self._poll, key, video_id, shown)
            except SQLAlchemyError as error:
                log("store failed", reason=in_a_line(error))
                return  # the client asks again
            if job is None:
                yield "event: video.deleted\ndata: {}\n\n"
                return
            if preview is not None:
                shown = preview.step
                yield _event("video.preview", preview)
            if (job.status, job.step) != last:
                last, reported_at = (job.status, job.step), time.monotonic()
                yield _event(f"video.{job.status}", Video.of(job))
            elif time.monotonic() - reported_at > _SECONDS_BETWEEN_SIGNS_OF_LIFE:
                reported_at = time.monotonic()
                yield ": still here\n\n"
            if job.has_ended:
                return
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    def _poll(self, key: Key, video_id: str, shown: int) -> tuple[Job | None, VideoPreview | None]:
        """A video's job, and its preview if it is newer than step `shown`."""
        job = self._gateway.store.get(key.id, video_id)
        found = self._gateway.store.preview(job, but=shown) if job is not None and job.request.preview_every else None
        if found is None:
            return job, None
        return job, VideoPreview(id=video_id, step=found[0], data=base64.b64encode(found[1]).decode())

    def _count(self, key: Key, change: int) -> None:
        self._open[key.id] += change
        self._gateway.metrics.streams.inc(change)


def _event(kind: str, data: BaseModel) -> str:
    return f"event: {kind}\ndata: {data.model_dump_json()}\n\n"
