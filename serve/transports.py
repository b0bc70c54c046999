"""Transports to a Triton server, gRPC and HTTP: requests of `contract`, responses of `events`."""

import base64
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import grpc
import httpx
import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from megadit.models.diffusion.conditioning_settings import split_keyframe
from megadit.models.shared.addresses import tls_context
from megadit.models.shared.cli.setting import plain
from megadit.models.shared.errors import UserError
from megadit.serve.contract import INPUTS
from megadit.serve.events import (
    DATA,
    DEADLINE_MARK,
    EVENT,
    MARKS,
    CancelledError,
    DeadlineExceededError,
    Event,
    InvalidRequestError,
    ServiceError,
    UnavailableError,
    event_from_wire,
)
from megadit.serve.tracing import TRACEPARENT

GRPC_PORT, HTTP_PORT = 8001, 8000
_CONNECT_SECONDS = 5.0
_INPUTS = {each.name: each for each in INPUTS}
_KINDS = {
    "TYPE_STRING": "text",
    "TYPE_FP32": "finite number",
    "TYPE_INT32": "whole number of 32 bits",
    "TYPE_INT64": "whole number of 64 bits",
    "TYPE_BOOL": "true or false",
}
_NUMPY_TYPES = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}


class Transport(Protocol):
    url: str

    def is_ready(self, model: str) -> bool: ...

    def config(self, model: str) -> dict[str, Any]: ...

    def events(
        self,
        model: str,
        inputs: dict[str, Any],
        *,
        timeout: float | None,
        priority: int,
        traceparent: str | None,
        cancelled: threading.Event,
    ) -> Iterator[Event]: ...


def check_address(url: str) -> SplitResult:
    """Parse a service's address.

    Raises:
        UserError: if it is invalid.
    """
    try:
        parts = urlsplit(url if "://" in url or url.startswith("unix:") else f"//{url}")
        if parts.scheme == "unix" and parts.path.startswith("/"):
            return parts
        is_address = parts.scheme in ("", "grpc", "http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address or parts.path.strip("/"):
        raise UserError(
            f"{url!r} is not the address of a service; use grpc://HOST:PORT, unix:/PATH, http://HOST:PORT or HOST"
        )
    return parts


def connect(url: str) -> Transport:
    parts = check_address(url)
    if parts.scheme == "unix":
        return _Grpc(f"unix:{parts.path}")
    if parts.scheme == "grpc" or (not parts.scheme and parts.port):
        return _Grpc(f"{parts.hostname}:{parts.port or GRPC_PORT}")
    if parts.scheme:
        return _Http(f"{parts.scheme}://{parts.hostname}:{parts.port or HTTP_PORT}")
    try:
        return _Grpc(f"{parts.hostname}:{GRPC_PORT}")
    except UnavailableError:
        return _Http(f"http://{parts.hostname}:{HTTP_PORT}")


# ------------------------------------------------------------------------------------------------------ gRPC


@dataclass(slots=True)
class _Grpc:
    """One connection for queries, and one more for each request, since a Triton client has one stream."""

    url: str

    def __post_init__(self) -> None:
        try:
            with InferenceServerClient(self.url) as client:
                client.is_server_live(client_timeout=_CONNECT_SECONDS)
        except InferenceServerException as error:
            raise UnavailableError(f"no Triton server responds at grpc://{self.url}: {error.message()}") from error

    def is_ready(self, model: str) -> bool:
        try:
            with InferenceServerClient(self.url) as client:
                return client.is_model_ready(model, client_timeout=_CONNECT_SECONDS)
        except InferenceServerException:
            return False

    def config(self, model: str) -> dict[str, Any]:
        try:
            with InferenceServerClient(self.url) as client:
                return client.get_model_config(model, as_json=True, client_timeout=_CONNECT_SECONDS)["config"]
        except InferenceServerException as error:
            raise _grpc_error(error) from error

    def events(
        self,
        model: str,
        inputs: dict[str, Any],
        *,
        timeout: float | None,
        priority: int,
        traceparent: str | None,
        cancelled: threading.Event,
    ) -> Iterator[Event]:
        responses: queue.Queue = queue.Queue()
        is_finished = False
        with InferenceServerClient(self.url) as client:
            client.start_stream(
                lambda result, error: responses.put((result, error)),
                stream_timeout=timeout,
                headers={"triton_grpc_error": "true"},  # errors keep their codes
            )
            tensors = [_tensor(name, value) for name, value in inputs.items()]
            options = {"timeout": _microseconds(timeout), "priority": priority, "parameters": _traced(traceparent)}
            try:
                client.async_stream_infer(model, tensors, enable_empty_final_response=True, **options)
            except InferenceServerException as error:  # the stream has ended already
                raise UnavailableError(f"the connection to grpc://{self.url} is lost: {error.message()}") from error
            try:
                while (result := _next_answer(responses, cancelled)) is not None:
                    response = result.get_response()
                    if response.outputs:
                        yield event_from_wire(result.as_numpy(EVENT).item().decode(), result.as_numpy(DATA).tobytes())
                    if response.parameters["triton_final_response"].bool_param:
                        break
                is_finished = True
            finally:
                client.stop_stream(cancel_requests=not is_finished)


def _next_answer(responses: queue.Queue, cancelled: threading.Event) -> Any:
    while not cancelled.is_set():
        try:
            result, error = responses.get(timeout=0.05)
        except queue.Empty:
            continue
        if error is not None:
            raise _grpc_error(error) from error
        return result
    raise CancelledError("the request was cancelled")


def _tensor(name: str, value: Any) -> InferInput:
    kind = _INPUTS[name].data_type
    if _INPUTS[name].is_media or _INPUTS[name].is_list:
        values = _files(name, value) if _INPUTS[name].is_media else _texts(name, value)
        tensor = InferInput(name, [1, len(values)], "BYTES")
        tensor.set_data_from_numpy(np.array([values], dtype=np.object_))
    elif kind == "TYPE_STRING":
        tensor = InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[_checked(name, value).encode()]], dtype=np.object_))
    else:
        tensor = InferInput(name, [1, 1], kind.removeprefix("TYPE_"))
        tensor.set_data_from_numpy(np.array([[_checked(name, value)]], dtype=_NUMPY_TYPES[kind]))
    return tensor


def _files(name: str, value: Any) -> tuple[bytes, ...]:
    files = tuple(value) if _INPUTS[name].is_list and isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(file, bytes) for file in files):
        raise InvalidRequestError(f"{name} must be the bytes of a file" + " or several" * _INPUTS[name].is_list)
    return files or (b"",)


def _texts(name: str, value: Any) -> list[bytes]:
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(f"{name} must be a list of texts")
    return [text.encode() for text in value] or [b""]


def _in_json(name: str, value: Any) -> Any:
    """The value of an input for `/generate_stream`: files as data URLs."""
    if _INPUTS[name].is_list and not _INPUTS[name].is_media:
        return [text.decode() for text in _texts(name, value)]
    if not _INPUTS[name].is_media:
        return _checked(name, value)
    texts = [_data_url(name, file) for file in _files(name, value)]
    return texts if _INPUTS[name].is_list else texts[0]


def _data_url(name: str, file: bytes) -> str:
    if not file:
        return ""
    number, file = split_keyframe(file) if name == "keyframe" else ("", file)
    return f"{number}{':' if number != '' else ''}data:;base64,{base64.b64encode(file).decode()}"


def _checked(name: str, value: Any) -> Any:
    """The value, if it is valid for its input: Triton's JSON would truncate larger numbers silently."""
    kind, value = _INPUTS[name].data_type, plain(value)
    if kind == "TYPE_STRING":
        is_right = isinstance(value, str)
    elif kind == "TYPE_BOOL":
        is_right = isinstance(value, bool)
    elif kind == "TYPE_FP32":
        is_right = isinstance(value, (int, float)) and math.isfinite(value)
    else:
        bounds = np.iinfo(_NUMPY_TYPES[kind])
        is_right = isinstance(value, int) and bounds.min <= value <= bounds.max
    if not is_right:
        raise InvalidRequestError(f"{name}={value!r} is not a {_KINDS[kind]}")
    return value


def _grpc_error(error: InferenceServerException) -> ServiceError:
    message, status = error.message(), error.status() or ""
    if (kind := _error_of_text(message)) is not None:
        return kind(message)
    kinds = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.CANCELLED: CancelledError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    }
    return {str(code): kind for code, kind in kinds.items()}.get(status, ServiceError)(message)


# ------------------------------------------------------------------------------------------------------ HTTP


@dataclass(slots=True)
class _Http:
    """Triton's `/generate_stream`: server-sent events, for networks without gRPC; bytes are sent as numbers."""

    url: str

    def __post_init__(self) -> None:
        self._get("/v2/health/live")

    def is_ready(self, model: str) -> bool:
        try:
            self._get(f"/v2/models/{model}/ready")
        except ServiceError:
            return False
        return True

    def config(self, model: str) -> dict[str, Any]:
        return self._get(f"/v2/models/{model}/config").json()

    def _get(self, path: str) -> httpx.Response:
        try:
            answer = httpx.get(self.url + path, timeout=_CONNECT_SECONDS, verify=tls_context())
        except httpx.HTTPError as error:
            raise UnavailableError(f"no Triton server responds at {self.url}: {error}") from error
        if answer.is_error:
            raise _http_error(answer.status_code, answer.text)
        return answer

    def events(
        self,
        model: str,
        inputs: dict[str, Any],
        *,
        timeout: float | None,
        priority: int,
        traceparent: str | None,
        cancelled: threading.Event,
    ) -> Iterator[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        body: dict[str, Any] = {name: _in_json(name, value) for name, value in inputs.items()}
        if timeout is not None or priority or traceparent:
            timing = {"timeout": _microseconds(timeout) or 0, "priority": priority}
            body["parameters"] = timing | (_traced(traceparent) or {})
        try:
            with httpx.stream(
                "POST",
                f"{self.url}/v2/models/{model}/generate_stream",
                json=body,
                timeout=httpx.Timeout(_CONNECT_SECONDS, read=timeout),
                verify=tls_context(),
            ) as answer:
                if answer.is_error:
                    raise _http_error(answer.status_code, answer.read().decode(errors="replace"))
                for line in answer.iter_lines():
                    if cancelled.is_set():
                        raise CancelledError("the request was cancelled")
                    if deadline is not None and time.monotonic() > deadline:
                        raise DeadlineExceededError(f"{DEADLINE_MARK}: not done within {timeout:g} s")
                    if line.startswith("data:"):
                        yield _http_event(json.loads(line.removeprefix("data:")))
        except httpx.ReadTimeout as error:
            raise DeadlineExceededError(f"{DEADLINE_MARK}: no response within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection to {self.url} broke: {error}") from error


def _http_event(values: dict[str, Any]) -> Event:
    if "error" in values:
        raise _http_error(200, json.dumps(values))
    return event_from_wire(values[EVENT], bytes(values[DATA]))


def _http_error(status: int, text: str) -> ServiceError:
    try:
        message = json.loads(text.strip().removeprefix("data:"))["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text.strip() or f"HTTP status {status}"
    if (kind := _error_of_text(message)) is not None:
        return kind(message)
    return {400: InvalidRequestError, 499: CancelledError, 503: UnavailableError}.get(status, ServiceError)(message)


def _error_of_text(message: str) -> type[ServiceError] | None:
    """Return the class of an error by its message, since its code is not transmitted."""
    for mark, kind in MARKS.items():
        if mark in message:
            return kind
    if "Exceeds maximum queue size" in message or "Request timeout expired" in message:
        return UnavailableError
    return None


def _traced(traceparent: str | None) -> dict[str, str] | None:
    """Parameters of a request with its trace context."""
    return {TRACEPARENT: traceparent} if traceparent else None


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1e6))
