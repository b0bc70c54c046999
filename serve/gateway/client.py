"""Asking a gateway for videos, with the face of `VideoClient`: what is written for a service works with a key too."""

import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from megadit.models.support import UserError
from megadit.serve.client import Generation
from megadit.serve.contract import (
    MODEL,
    SETTINGS,
    CancelledError,
    Event,
    InvalidRequestError,
    Progress,
    ServiceError,
    ServiceInfo,
    UnavailableError,
    VideoRequest,
    VideoResult,
)

_CONNECT_SECONDS = 5.0


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

    def stream(self, request: VideoRequest) -> Generation:
        """Progress (without previews) and the video; leaving the iteration early cancels the request."""

        def events(cancelled: threading.Event) -> Iterator[Event]:
            if (request.num_videos or 1) != 1:
                raise InvalidRequestError(
                    f"num_videos={request.num_videos}: a gateway makes one video for each request"
                )
            names = ("prompt", "seed", *SETTINGS)
            body = {name: value for name in names if (value := getattr(request, name)) is not None}
            sizes = (body.pop("width", None), body.pop("height", None))
            if None not in sizes:
                body["size"] = "{}x{}".format(*sizes)
            video = self._ask("POST", "/v1/videos", body | {"model": self.model})
            try:
                yield from self._follow(video, cancelled)
            finally:  # a video that was fetched is not needed any more, and one that was not is cancelled
                self._ask("DELETE", f"/v1/videos/{video['id']}")

        return Generation(events)

    def generate(self, request: VideoRequest) -> list[VideoResult]:
        """The videos of a request.

        Raises:
            ServiceError: or the subclass that says more.
        """
        return [event for event in self.stream(request) if isinstance(event, VideoResult)]

    def _follow(self, video: dict[str, Any], cancelled: threading.Event) -> Iterator[Event]:
        began, last_step = time.monotonic(), 0
        while video["status"] in ("queued", "in_progress"):
            if cancelled.wait(0.2):
                raise CancelledError("the request was cancelled")
            video = self._ask("GET", f"/v1/videos/{video['id']}")
            if video["step"] > last_step:
                last_step, steps = video["step"], video["settings"]["num_steps"]
                left = (time.monotonic() - began) / last_step * (steps - last_step)
                yield Progress(step=last_step, num_steps=steps, sigma=math.nan, seconds_left=left)
        if video["status"] == "failed":
            kind = InvalidRequestError if video["error"]["code"] == "invalid_request" else ServiceError
            raise kind(video["error"]["message"])
        yield VideoResult(
            data=self._answer("GET", f"/v1/videos/{video['id']}/content").content,
            media_type=video["media_type"],
            index=0,
            prompt=video["prompt"],
            seed=video["settings"]["seed"],
            settings={name: video["settings"][name] for name in SETTINGS},
            seconds=time.monotonic() - began,
            batch_size=1,
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._answer(method, path, body).json()

    def _answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnavailableError(f"no gateway answers at {self.url}: {error}") from error
        if answer.is_success:
            return answer
        try:
            message = answer.json()["error"]["message"]
        except (json.JSONDecodeError, KeyError, TypeError):
            message = f"{self.url} answers {answer.status_code}; is it a gateway?"
        if answer.status_code == 401:
            raise UserError(message)
        kinds = {400: InvalidRequestError, 429: UnavailableError, 503: UnavailableError}
        raise kinds.get(answer.status_code, ServiceError)(message)
