"""A running service as a model that is evaluated: it makes the videos, asked over the video API of `megadit serve up`.

It is asked for as many videos at once as lie in a part, so that it batches them and uses all of its servers. What it
made is fetched, checked and deleted there. A service that is busy or away is asked again for some time.
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
from megadit.models.shared.documents import check_size, parse_json
from megadit.models.shared.errors import UserError

PATIENCE_SECONDS = 120.0
"""Seconds for which a service that is busy or away is asked again."""
MOST_PAUSE_SECONDS = 30.0
"""Longest pause that a service may ask for; a longer one, such as a daily quota's, ends the command."""
_MAX_VIDEO_BYTES = 1 << 30
_SECONDS_OF_AN_ANSWER, _LEAST_BYTES_A_SECOND = 60.0, 1 << 14
"""Beyond its first seconds it comes at least so fast."""
_POLL_SECONDS = (0.05, 0.5)
"""The shortest and the longest pause between two questions for a video."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_BUSY = (429, 502, 503, 504)


def open_service(url: str, key_file: Path | None) -> "ServiceMaker":
    """The service at http://HOST:PORT, which is asked for its defaults.

    Raises:
        UserError: for what is no such address, without a valid key, and if none answers.
    """
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        is_right = False
    if not is_right or parts.path.strip("/") or parts.query:
        raise UserError(f"{url} is no address of a video API; `megadit serve up` has one at http://HOST:PORT")
    if key_file is None:
        raise UserError(f"{url} wants a key: give --key_file FILE; `megadit serve keys add NAME > FILE` writes one")
    try:
        key = key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key_file} cannot be read; `megadit serve keys add NAME > {key_file}` writes one") from error
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise UserError(f"{key_file} holds no key: one line that `megadit serve keys add NAME` shows")
    return ServiceMaker(url.rstrip("/"), key)


class ServiceMaker:
    """Videos that a service makes. It does not say which weights it has: another model wants another address, or folder
    of results."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0)
        self._model, self._says = self._first_model()
        try:
            self.defaults = SamplingSettings(**self._says)
        except (TypeError, UserError) as error:
            raise UserError(f"{url} does not say what {self._model} makes by default: {error}") from None

    def about(self, settings: SamplingSettings) -> dict[str, Any]:
        return {"service": self._url, "model": self._model, "defaults": self._says, "settings": _served(settings)}

    def check(self, settings: SamplingSettings) -> None:
        """Nothing to check here: the service refuses the first request."""

    def videos(self, prompts: Sequence[str], seeds: Sequence[int], settings: SamplingSettings) -> Iterator[np.ndarray]:
        body = _served(settings) | {"model": self._model}
        body["size"] = f"{body.pop('width')}x{body.pop('height')}"
        waiting: list[str] = []
        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                once = {
                    "idempotency-key": uuid.uuid4().hex
                }  # asked again after a broken answer, it makes no second one
                video = self._asked("POST", "/v1/videos", body | {"prompt": prompt, "seed": seed}, once)
                if not _ID.fullmatch(str(video.get("id", ""))):
                    raise UserError(f"{self._url} names no video that could be fetched: is it a video API of megadit?")
                waiting.append(video["id"])
            for video_id, prompt, seed in zip(list(waiting), prompts, seeds, strict=True):
                self._wait(video_id, prompt)
                content = self._answer("GET", f"/v1/videos/{video_id}/content")
                yield received(content, f"the video of seed {seed} from {self._url}", settings)
                waiting.remove(video_id)
                self._delete(video_id)
        finally:
            for video_id in waiting:  # cancelled, where something went wrong
                self._delete(video_id)

    def _first_model(self) -> tuple[str, dict[str, Any]]:
        """The name and the defaults of the model that a request without a name means."""
        listed = self._asked("GET", "/v1/models").get("data")
        model = listed[0] if isinstance(listed, list) and listed else {}
        if not isinstance(model, dict) or not isinstance(model.get("id"), str) or "service" not in model:
            raise UserError(f"{self._url} is no video API of megadit: it lists no model")
        if model["service"] is None:
            raise UserError(f"{self._url} has not seen a server yet: start one, or wait until it has loaded its model")
        says = model["service"].get("defaults") if isinstance(model["service"], dict) else None
        return model["id"], says if isinstance(says, dict) else {}

    def _wait(self, video_id: str, prompt: str) -> None:
        """Wait until a video is there; raises UserError if it is not made."""
        pause, longest = _POLL_SECONDS
        while (video := self._asked("GET", f"/v1/videos/{video_id}")).get("status") != "completed":
            if video.get("status") not in ("queued", "in_progress"):
                error = video.get("error")
                message = error.get("message") if isinstance(error, dict) else video.get("status")
                raise UserError(f"{self._url} made no video of {prompt[:60]!r}: {message}")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def _delete(self, video_id: str) -> None:
        with suppress(httpx.HTTPError):  # it expires anyway
            self._http.delete(f"/v1/videos/{video_id}")

    def _asked(self, method: str, path: str, body: dict | None = None, headers: dict | None = None) -> dict[str, Any]:
        """Return the answer, a JSON object."""
        value = parse_json(self._answer(method, path, body, headers), f"the answer of {self._url}{path}")
        if not isinstance(value, dict):
            raise UserError(f"{self._url}{path} answers with what is no object of a video API")
        return value

    def _answer(self, method: str, path: str, body: dict | None = None, headers: dict | None = None) -> bytes:
        """Return the content of an answer, asked for again while the service is busy or away.

        Raises:
            UserError: for a refusal, or no answer within `PATIENCE_SECONDS`.
        """
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
                    raise UserError(f"{self._url} does not know the key of --key_file: {problem}")
                if answer.status_code not in _BUSY:
                    raise UserError(f"{self._url} refuses: {problem}")
            except httpx.HTTPError as error:
                problem = f"it does not answer ({error or type(error).__name__})"
            if pause > MOST_PAUSE_SECONDS or time.monotonic() + pause > until:
                raise UserError(f"{self._url}: {problem}. Videos that were made are kept: the same command goes on")
            time.sleep(pause)

    def _content(self, answer: httpx.Response, path: str) -> bytes:
        parts, size, began = [], 0, time.monotonic()
        for part in answer.iter_bytes():
            size += len(part)
            if time.monotonic() - began > _SECONDS_OF_AN_ANSWER + size / _LEAST_BYTES_A_SECOND:
                raise UserError(
                    f"the answer of {self._url}{path} drips: {size:,} bytes in {time.monotonic() - began:.0f} s"
                )
            check_size(size, f"the answer of {self._url}{path}", _MAX_VIDEO_BYTES)
            parts.append(part)
        return b"".join(parts)


def _served(settings: SamplingSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SERVED}


def _message_of(content: bytes, status: int) -> str:
    """Message of an error."""
    try:
        return str(parse_json(content[: 1 << 16], "its error")["error"]["message"])[:500]
    except (UserError, KeyError, TypeError):
        return f"it answers {status}; is it the video API of `megadit serve up`?"


def _pause(answer: httpx.Response) -> float:
    """Seconds after which a busy service wants to be asked again."""
    message = answer.headers.get("retry-after", "")
    return float(message) if message.isdecimal() else 1.0
