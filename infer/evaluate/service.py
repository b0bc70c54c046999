"""Evaluates a running service: its videos are generated through the video API of `megadit serve up`.

All videos of a chunk are requested at once, so that the service batches them and uses all of its servers. Videos are
fetched, checked, and then deleted there. Requests to a busy or unreachable service are repeated for some time.
"""

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from megadit.infer.evaluate.generated import received
from megadit.models.diffusion.settings import SERVED, SamplingSettings
from megadit.models.shared.addresses import tls_context
from megadit.models.shared.documents import check_size, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_key

PATIENCE_SECONDS = 120.0
"""Seconds for which requests to a busy or unreachable service are repeated."""
MOST_PAUSE_SECONDS = 30.0
"""Longest Retry-After, in seconds; a longer one, such as a daily quota's, ends the command."""
_MAX_VIDEO_BYTES = 1 << 30
_SECONDS_OF_AN_ANSWER, _LEAST_BYTES_A_SECOND = 60.0, 1 << 14
"""Least rate of a download after its first seconds."""
_POLL_SECONDS = (0.05, 0.5)
"""The shortest and the longest pause between two status requests for a video, in seconds."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_BUSY = (429, 502, 503, 504)


def open_service(url: str, key_file: Path | None) -> "ServiceMaker":
    """Connect to the service at http://HOST:PORT, and read its defaults. Raises UserError for an invalid address or
    key, and if there is no response."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_right = False
    if not is_right or parts.path.strip("/") or parts.query:
        raise UserError(f"{url} is not the address of a video API; `megadit serve up` has one at http://HOST:PORT")
    if key_file is None:
        raise UserError(f"{url} needs a key: give --key_file FILE; `megadit serve keys add NAME > FILE` writes one")
    return ServiceMaker(url.rstrip("/"), read_key(key_file))


class ServiceMaker:
    """Generates videos by a service. The API does not identify its weights: for another model, use another address or
    folder of results."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0, verify=tls_context()
        )
        self._model, self._says = self._first_model()
        try:
            self.defaults = SamplingSettings(**self._says)
        except (TypeError, UserError) as error:
            raise UserError(f"{url} does not give valid defaults of {self._model}: {error}") from None

    def about(self, settings: SamplingSettings) -> dict[str, Any]:
        return {"service": self._url, "model": self._model, "defaults": self._says, "settings": _served(settings)}

    def check(self, settings: SamplingSettings) -> None:
        """Checks nothing: the service itself refuses invalid settings."""

    def videos(self, prompts: Sequence[str], seeds: Sequence[int], settings: SamplingSettings) -> Iterator[np.ndarray]:
        body = _served(settings) | {"model": self._model}
        body["size"] = f"{body.pop('width')}x{body.pop('height')}"
        waiting: list[str] = []
        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                once = {"idempotency-key": uuid.uuid4().hex}  # a repeated request does not create a second video
                video = self._asked("POST", "/v1/videos", body | {"prompt": prompt, "seed": seed}, once)
                if not _ID.fullmatch(str(video.get("id", ""))):
                    raise UserError(f"{self._url} returned no valid video ID: is it a megadit video API?")
                waiting.append(video["id"])
            for video_id, prompt, seed in zip(list(waiting), prompts, seeds, strict=True):
                self._wait(video_id, prompt)
                content = self._answer("GET", f"/v1/videos/{video_id}/content")
                yield received(content, f"the video of seed {seed} from {self._url}", settings)
                waiting.remove(video_id)
                self._delete(video_id)
        finally:
            for video_id in waiting:  # cancelled after an error
                self._delete(video_id)

    def _first_model(self) -> tuple[str, dict[str, Any]]:
        """Name and defaults of the service's default model."""
        listed = self._asked("GET", "/v1/models").get("data")
        model = listed[0] if isinstance(listed, list) and listed else {}
        if not isinstance(model, dict) or not isinstance(model.get("id"), str) or "service" not in model:
            raise UserError(f"{self._url} is not a megadit video API: it lists no model")
        if model["service"] is None:
            raise UserError(f"{self._url} has not seen a server yet: start one, or wait until it has loaded its model")
        says = model["service"].get("defaults") if isinstance(model["service"], dict) else None
        return model["id"], says if isinstance(says, dict) else {}

    def _wait(self, video_id: str, prompt: str) -> None:
        """Wait until a video is complete; raises UserError if it fails."""
        pause, longest = _POLL_SECONDS
        while (video := self._asked("GET", f"/v1/videos/{video_id}")).get("status") != "completed":
            if video.get("status") not in ("queued", "in_progress"):
                error = video.get("error")
                message = error.get("message") if isinstance(error, dict) else video.get("status")
                raise UserError(f"{self._url} failed to generate {prompt[:60]!r}: {message}")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def _delete(self, video_id: str) -> None:
        with suppress(httpx.HTTPError):  # it expires anyway
            self._http.delete(f"/v1/videos/{video_id}")

    def _asked(self, method: str, path: str, body: dict | None = None, headers: dict | None = None) -> dict[str, Any]:
        """Return the response, a JSON object."""
        value = parse_json(self._answer(method, path, body, headers), f"the answer of {self._url}{path}")
        if not isinstance(value, dict):
            raise UserError(f"{self._url}{path} does not respond with an object of a video API")
        return value

    def _answer(self, method: str, path: str, body: dict | None = None, headers: dict | None = None) -> bytes:
        """Return the content of a response; the request is repeated while the service is busy or unreachable. Raises
        UserError for an error response, or no response within `PATIENCE_SECONDS`."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            pause = 1.0
            try:
                with self._http.stream(method, path, json=body, headers=headers) as answer:
                    content = self._content(answer, path)
                if answer.is_success:
                    return content
                problem, pause = _message_of(content, answer.status_code), _pause(answer)
                if answer.status_code == 401:
                    raise UserError(f"{self._url} rejects the key of --key_file: {problem}")
                if answer.status_code not in _BUSY:
                    raise UserError(f"{self._url} refuses: {problem}")
            except httpx.HTTPError as error:
                problem = f"it does not answer ({error or type(error).__name__})"
            if pause > MOST_PAUSE_SECONDS or time.monotonic() + pause > until:
                raise UserError(
                    f"{self._url}: {problem}. Finished videos are kept: run the same command again to continue"
                )
            time.sleep(pause)

    def _content(self, answer: httpx.Response, path: str) -> bytes:
        parts, size, began = [], 0, time.monotonic()
        for part in answer.iter_bytes():
            size += len(part)
            if time.monotonic() - began > _SECONDS_OF_AN_ANSWER + size / _LEAST_BYTES_A_SECOND:
                raise UserError(
                    f"the response of {self._url}{path} is too slow: {size:,} bytes in {time.monotonic() - began:.0f} s"
                )
            check_size(size, f"the answer of {self._url}{path}", _MAX_VIDEO_BYTES)
            parts.append(part)
        return b"".join(parts)


def _served(settings: SamplingSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SERVED}


def _message_of(content: bytes, status: int) -> str:
    """Message of an error response."""
    try:
        return str(parse_json(content[: 1 << 16], "its error")["error"]["message"])[:500]
    except (UserError, KeyError, TypeError):
        return f"it answers {status}; is it the video API of `megadit serve up`?"


def _pause(answer: httpx.Response) -> float:
    """Seconds until the next request, by Retry-After."""
    message = answer.headers.get("retry-after", "")
    return float(message) if message.isdecimal() else 1.0
