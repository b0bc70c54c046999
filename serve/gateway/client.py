"""Asking a gateway for videos, with the face of `VideoClient`: what is written for a service works with a key too."""

import base64
import contextlib
import copy
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from megadit.models.given_settings import split_keyframe
from megadit.models.settings import SERVED
from megadit.models.shared.errors import UserError
from megadit.serve.answers import (
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
from megadit.serve.client import Generation
from megadit.serve.contract import MODEL, ServiceInfo, VideoRequest

_CONNECT_SECONDS = 5.0
_SECONDS_BETWEEN_STREAMS = 0.2


class GatewayClient:
    """Talks to one gateway with one key.

    Raises:
        UserError: if the key is not valid there.
        UnavailableError: if nothing answers.
    """

    def __init__(self, url: str, key: str, *, model: str = MODEL) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_CONNECT_SECONDS, read=60),
        )
        self.info()

    def info(self) -> ServiceInfo:
        """Defaults, limits and samplers of the service.

        Raises:
            UnavailableError: if the gateway has not yet seen a server.
        """
        service = self._ask("GET", f"/v1/models/{self.model}")["service"]
        if service is None:
            raise UnavailableError(f"{self.url} has not seen a server yet")
        return ServiceInfo.from_json(json.dumps(service))

    def beside(self, model: str) -> "GatewayClient":
        """A client of another model of the same gateway, with the same key."""
        other = copy.copy(self)
        other.model = model
        return other

    def adapters(self) -> list[str]:
        """Names of adapters that a request may give: this key's own and the service's."""
        return [each["id"] for each in self._ask("GET", "/v1/adapters")["data"]]

    def stream(self, request: VideoRequest) -> Generation:
        """StepDone and the video; leaving the iteration early cancels the request."""

        def events(cancelled: threading.Event) -> Iterator[Event]:
            if (request.num_videos or 1) != 1:
                raise InvalidRequestError(
                    f"num_videos={request.num_videos}: a gateway makes one video for each request"
                )
            names = ("prompt", "seed", "preview_every", "evaluate", *SERVED)
            body = {name: value for name in names if (value := getattr(request, name)) is not None}
            body |= {name: _in_json(name, value) for name, value in request.given().items() if value is not None}
            if scales := request.adapter_scales():
                body["adapters"] = [{"name": name, "scale": scale} for name, scale in scales.items()]
            sizes = (body.pop("width", None), body.pop("height", None))
            if None not in sizes:
                body["size"] = "{}x{}".format(*sizes)
            video = self._ask("POST", "/v1/videos", body | {"model": self.model})
            try:
                yield from self._follow(video, cancelled)
            finally:  # a video that was fetched is not needed any more, and one that was not is cancelled
                with contextlib.suppress(ServiceError):  # or is not there any more, or its gateway is not
                    self._ask("DELETE", f"/v1/videos/{video['id']}")

        return Generation(events)

    def generate(self, request: VideoRequest) -> list[VideoResult]:
        """The videos of a request.

        Raises:
            ServiceError: or the subclass that says more.
        """
        return [event for event in self.stream(request) if isinstance(event, VideoResult)]

    def _follow(self, video: dict[str, Any], cancelled: threading.Event) -> Iterator[Event]:
        began, last_step, preview = time.monotonic(), 0, b""
        for kind, data in self._told(video["id"], cancelled):
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
            data=self._answer("GET", f"/v1/videos/{video['id']}/content").content,
            media_type=video["media_type"],
            index=0,
            prompt=video["prompt"],
            seed=video["settings"]["seed"],
            settings={name: value for name, value in video["settings"].items() if name in (*SERVED, "adapters")},
            seconds=time.monotonic() - began,
            batch_size=1,
            scores=video["scores"],
        )

    def _told(self, video_id: str, cancelled: threading.Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, data) of a video's events until it has ended, from as many streams as that takes."""
        while True:
            events: queue.Queue = queue.Queue()
            threading.Thread(target=self._read, args=[video_id, events], daemon=True).start()
            while (event := _next(events, cancelled)) is not None:
                kind, data = event
                if kind == "video.deleted":
                    raise CancelledError("somebody deleted the video")
                yield event
                if kind in ("video.completed", "video.failed"):
                    return
            cancelled.wait(_SECONDS_BETWEEN_STREAMS)  # the gateway is about to end; another may follow it

    def _read(self, video_id: str, events: queue.Queue) -> None:
        """Puts the events of one stream into the queue, and in the end None, or what went wrong."""
        kind, end = "", None
        try:
            with self._http.stream("GET", f"/v1/videos/{video_id}/events") as answer:
                if answer.status_code == 404:  # it was there when it was asked for
                    events.put(("video.deleted", {}))
                    return
                self._check(answer)
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        events.put((kind, json.loads(value)))
        except httpx.HTTPError as error:
            end = UnavailableError(f"the stream from {self.url} broke: {error}")
        except (ServiceError, UserError) as error:
            end = error
        events.put(end)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._answer(method, path, body).json()

    def _answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnavailableError(f"no gateway answers at {self.url}: {error}") from error
        self._check(answer)
        return answer

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            message = json.loads(answer.read())["error"]["message"]
        except (json.JSONDecodeError, KeyError, TypeError):
            message = f"{self.url} answers {answer.status_code}; is it a gateway?"
        if answer.status_code == 401:
            raise UserError(message)
        kinds = {400: InvalidRequestError, 429: UnavailableError, 503: UnavailableError}
        raise kinds.get(answer.status_code, ServiceError)(message)


def _in_json(name: str, value: Any) -> Any:
    """What is given of a video, files in base64."""
    if name == "keyframe":
        return [f"{number}:{base64.b64encode(file).decode()}" for number, file in map(split_keyframe, value)]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


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
