"""Client of a gateway, with the interface of `VideoClient`: code for a service works with a gateway and a key too.

After a broken connection, the request, its progress and its video are requested again.
"""

import base64
import contextlib
import copy
import hashlib
import json
import math
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx

from megadit.models.diffusion.conditioning_settings import split_keyframe
from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.addresses import tls_context
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.serve.client import Generation
from megadit.serve.contract import MODEL, VideoRequest
from megadit.serve.events import (
    AdapterNotFoundError,
    CancelledError,
    Event,
    HeldBackError,
    InvalidRequestError,
    ServiceError,
    StepDone,
    UnavailableError,
    VideoResult,
)
from megadit.serve.service_info import ServiceInfo

GATEWAY = "http://127.0.0.1:8080"
"""Default URL of a gateway."""
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
"""Seconds of silence after which a connection counts as broken; a stream sends a comment every 15 s."""
_SECONDS_TO_DELETE = 10.0
"""The gateway responds once Triton was told; a caller that interrupts does not wait for one that stands still."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_AWAY = (502, 503, 504)
"""Statuses of a gateway that is starting or stopping, or of a proxy without one."""
_Answer = TypeVar("_Answer")


class _AwayError(UnavailableError):
    """No response, or an incomplete one; the same request may succeed later."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _BusyError(_AwayError):
    """This key exceeds its rate or has too many active videos."""


class _NotThereError(ServiceError):
    pass


class GatewayClient:
    """Client of one gateway with one key.

    `patience` is the number of seconds to retry while the gateway is unreachable.

    Raises:
        UserError: if the key is not valid there.
        UnavailableError: if there is no response.
    """

    def __init__(self, url: str, key: str, *, model: str = MODEL, patience: float = 300.0) -> None:
        self.url, self.model, self._patience = url.rstrip("/"), model, patience
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_CONNECT_SECONDS, read=_SILENT_SECONDS),
            verify=tls_context(),
        )
        self.info()

    def info(self) -> ServiceInfo:
        """Defaults, limits and samplers of the service. Raises UnavailableError if the gateway has not yet seen a
        server."""
        service = self._ask("GET", f"/v1/models/{self.model}")["service"]
        if service is None:
            raise UnavailableError(f"{self.url} has not seen a server yet")
        return ServiceInfo.from_json(json.dumps(service))

    def with_model(self, model: str) -> "GatewayClient":
        """A client for another model of the same gateway, with the same key."""
        other = copy.copy(self)
        other.model = model
        return other

    def adapters(self) -> list[str]:
        """Names of adapters that a request may use: this key's own and the service's."""
        return [each["id"] for each in self._ask("GET", "/v1/adapters")["data"]]

    def stream(self, request: VideoRequest) -> Generation:
        """StepDone and the video; only leaving the iteration early cancels the request."""

        def events(cancelled: threading.Event) -> Iterator[Event]:
            video_id = self._create(self._body(request), cancelled)
            try:
                yield from self._follow(video_id, cancelled)
            except CancelledError:
                self._delete(video_id)
                raise
            except (ServiceError, UserError) as error:
                raise type(error)(f"{error} (video {video_id})") from error
            except BaseException:  # the caller has left
                self._delete(video_id)
                raise
            self._delete(video_id)  # it was fetched

        return Generation(events)

    def generate(self, request: VideoRequest) -> list[VideoResult]:
        """The videos of a request.

        Raises:
            ServiceError: or a subclass. The message has the id of the video, for `GET /v1/videos/ID`.
        """
        return [event for event in self.stream(request) if isinstance(event, VideoResult)]

    # ------------------------------------------------------------------------------------------- one video

    def _body(self, request: VideoRequest) -> dict[str, Any]:
        if (request.num_videos or 1) != 1:
            raise InvalidRequestError(
                f"num_videos={request.num_videos}: a gateway generates one video for each request"
            )
        names = ("prompt", "seed", "preview_every", "evaluate", *SERVED)
        body = {name: value for name in names if (value := getattr(request, name)) is not None}
        body |= {name: _in_json(name, value) for name, value in request.sent().items() if value is not None}
        if scales := request.adapter_scales():
            body["adapters"] = [{"name": name, "scale": scale} for name, scale in scales.items()]
        sizes = (body.pop("width", None), body.pop("height", None))
        if None not in sizes:
            body["size"] = "{}x{}".format(*sizes)
        return body | {"model": self.model}

    def _create(self, body: dict[str, Any], cancelled: threading.Event) -> str:
        """Create a video and return its id; all attempts have one idempotency key, so that only one is created."""
        key, is_first = f"megadit-{uuid.uuid4().hex}", True

        def post(**settings: Any) -> str:
            nonlocal is_first
            was_first, is_first = is_first, False
            try:
                return self._ask("POST", "/v1/videos", json=body, headers={"idempotency-key": key}, **settings)["id"]
            except _BusyError as error:
                if was_first:  # else perhaps by this request itself, whose response was lost
                    raise UnavailableError(str(error)) from error
                raise

        try:
            return self._until_answered(post, cancelled, about=f"the request has Idempotency-Key {key}")
        except (CancelledError, KeyboardInterrupt):
            with contextlib.suppress(ServiceError, UserError):  # it may have been accepted nevertheless
                self._delete(post(timeout=_CONNECT_SECONDS))
            raise

    def _follow(self, video_id: str, cancelled: threading.Event) -> Iterator[Event]:
        began, last_step, preview = time.monotonic(), 0, b""
        for kind, data in self._events_of(video_id, cancelled):
            if kind == "video.preview":
                preview = base64.b64decode(data["data"])
                continue
            video = data
            if video["status"] == "in_progress" and video["step"] > last_step:
                last_step, steps = video["step"], video["settings"]["num_steps"]
                left = (time.monotonic() - began) / last_step * (steps - last_step)
                yield StepDone(step=last_step, num_steps=steps, sigma=math.nan, seconds_left=left, preview=preview)
                preview = b""
        if video["status"] == "failed":
            kinds = {kind.code: kind for kind in (InvalidRequestError, AdapterNotFoundError, HeldBackError)}
            raise kinds.get(video["error"]["code"], ServiceError)(video["error"]["message"])
        yield VideoResult(
            data=self._until_answered(lambda: self._content(video), cancelled),
            media_type=video["media_type"],
            index=0,
            prompt=video["prompt"],
            seed=video["settings"]["seed"],
            settings={name: value for name, value in video["settings"].items() if name in (*SERVED, "adapters")},
            seconds=time.monotonic() - began,
            batch_size=1,
            scores=video["scores"],
        )

    def _events_of(self, video_id: str, cancelled: threading.Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, data) of a video's events until it has ended, over as many streams as needed.

        After each stream the video itself is requested, which gives progress where no stream gets through.
        """
        kind, pause = "", _FIRST_PAUSE
        while kind not in ("video.completed", "video.failed"):
            events: queue.Queue = queue.Queue()
            threading.Thread(target=self._read, args=[video_id, events], daemon=True).start()
            while (event := _next(events, cancelled)) is not None:
                kind, pause = event[0], _FIRST_PAUSE
                if kind != "video.deleted":  # requested below
                    yield event
            if kind in ("video.completed", "video.failed"):
                return
            _wait(pause, cancelled)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                video = self._until_answered(lambda: self._ask("GET", f"/v1/videos/{video_id}"), cancelled)
            except _NotThereError:
                raise CancelledError(f"the video {video_id} was deleted") from None
            kind = f"video.{video['status']}"
            yield kind, video

    def _read(self, video_id: str, events: queue.Queue) -> None:
        """Puts the events of one stream into the queue, and at its end None, or a permanent error."""
        kind, end = "", None
        try:
            with self._http.stream("GET", f"/v1/videos/{video_id}/events") as answer:
                self._check(answer)
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        with contextlib.suppress(UserError):  # half a line
                            events.put((kind, parse_json(value, "an event")))
        except (httpx.HTTPError, _AwayError, _NotThereError):
            pass
        except (ServiceError, UserError) as error:
            end = error
        events.put(end)

    def _content(self, video: dict[str, Any]) -> bytes:
        data = self._answer("GET", f"/v1/videos/{video['id']}/content").content
        if video["sha256"] not in (None, hashlib.sha256(data).hexdigest()):
            raise _AwayError(f"{self.url} sent {len(data):,} bytes that are not the whole video")
        return data

    def _delete(self, video_id: str) -> None:
        with contextlib.suppress(ServiceError, UserError):  # or is not there any more, or its gateway is not
            self._ask("DELETE", f"/v1/videos/{video_id}", timeout=_SECONDS_TO_DELETE)

    # ------------------------------------------------------------------------------------------ one question

    def _until_answered(self, ask: Callable[[], _Answer], cancelled: threading.Event, about: str = "") -> _Answer:
        """Return the result of `ask`, repeated until the gateway responds. Raises UnavailableError if it is unreachable
        for longer than `patience`; `about` is added to the message."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                return ask()
            except _AwayError as error:
                pause = max(pause, error.retry_after)
                if time.monotonic() + pause > deadline:
                    raise UnavailableError("; ".join(filter(None, [str(error), about]))) from error
            _wait(pause * random.uniform(0.5, 1.0), cancelled)  # spreads the clients of a gateway
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask(self, method: str, path: str, **settings: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **settings)
        try:
            return parse_json(answer.content, "an answer")
        except UserError as error:
            raise _AwayError(f"{self.url} does not respond in JSON; is it a gateway?") from error

    def _answer(self, method: str, path: str, **settings: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **settings)
        except httpx.HTTPError as error:
            raise _AwayError(f"no gateway responds at {self.url}: {error}") from error
        self._check(answer)
        return answer

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            error = parse_json(answer.read(), "an error")["error"]
            code, message = error["code"], error["message"]
        except (UserError, KeyError, TypeError):
            code, message = "", f"{self.url} responds with {answer.status_code}; is it a gateway?"
        if answer.status_code == 401:
            raise UserError(message)
        if code == "storage_full":
            raise UnavailableError(message)
        seconds = answer.headers.get("retry-after", "")
        retry_after = min(float(seconds), _LONGEST_PAUSE) if seconds.isdecimal() else 0.0
        if answer.status_code == 429:
            raise _BusyError(message, retry_after=retry_after)
        if answer.status_code in _AWAY:
            raise _AwayError(message, retry_after=retry_after)
        raise {400: InvalidRequestError, 404: _NotThereError}.get(answer.status_code, ServiceError)(message)


def _in_json(name: str, value: Any) -> Any:
    """Encode the value of a conditioning option for JSON, files in base64."""
    if name == "keyframe":
        return [f"{number}:{base64.b64encode(file).decode()}" for number, file in map(split_keyframe, value)]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _wait(seconds: float, cancelled: threading.Event) -> None:
    if cancelled.wait(seconds):
        raise CancelledError("the request was cancelled")


def _next(events: queue.Queue, cancelled: threading.Event) -> Any:
    while not cancelled.is_set():
        try:
            event = events.get(timeout=0.05)
        except queue.Empty:
            continue
        if isinstance(event, Exception):
            raise event
        return event
    raise CancelledError("the request was cancelled")
