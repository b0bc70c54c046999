"""Transports to a Triton server, gRPC and HTTP: requests of `contract`, responses of `events`."""

import base64
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import grpc
import httpx
import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

from megadit.models.diffusion.conditioning_settings import split_keyframe
from megadit.models.shared.addresses import tls_context
from megadit.models.shared.cli.setting import plain
from megadit.models.shared.errors import UserError
from megadit.serve.contract import INPUTS
from megadit.serve.events import (
    DATA,
    EVENT,
    CancelledError,
    DeadlineExceededError,
    Event,
    InvalidRequestError,
    ServiceError,
    UnavailableError,
    error_from_wire,
    event_from_wire,
)
from megadit.serve.tracing import TRACEPARENT

GRPC_PORT, HTTP_PORT = 8001, 8000
_CONNECT_SECONDS = 5.0
_SECONDS_TO_END = 1.0
"""Seconds for the server to close a stream after its last response; then it is cancelled."""
_ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_INPUTS = {each.name: each for each in INPUTS}
_KINDS = {
    "TYPE_STRING": "text",
    "TYPE_FP32": "finite number",
    "TYPE_INT32": "whole number of 32 bits",
    "TYPE_INT64": "whole number of 64 bits",
    "TYPE_BOOL": "true or false",
}
_NUMPY_TYPES = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}


def check_address(url: str) -> SplitResult:
    """Parse a service's address. Raises UserError if it is invalid."""
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


def connect(url: str) -> "_Grpc | _Http":
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
    """One connection for each question and each request.

    tritonclient's streams wait without end for a server that stands still, and leave a thread for each cancelled
    request. Triton itself spins, and may crash, where a stream asks for codes of errors (`triton_grpc_error`), and
    never frees a request whose stream the client ends or cancels just as Triton ends it: so its end is awaited.
    """

    url: str

    def __post_init__(self) -> None:
        try:
            self._ask("ServerLive", service_pb2.ServerLiveRequest())
        except ServiceError as error:
            raise UnavailableError(f"no Triton server responds at grpc://{self.url}: {error}") from error

    def is_ready(self, model: str) -> bool:
        try:
            return self._ask("ModelReady", service_pb2.ModelReadyRequest(name=model)).ready
        except ServiceError:
            return False

    def config(self, model: str) -> dict[str, Any]:
        answer = self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=model))
        return MessageToDict(answer.config, preserving_proto_field_name=True)

    def _ask(self, method: str, question: Any) -> Any:
        try:
            with grpc.insecure_channel(self.url, options=_ANY_SIZE) as channel:
                return getattr(GRPCInferenceServiceStub(channel), method)(question, timeout=_CONNECT_SECONDS)
        except grpc.RpcError as error:
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
        request = _request(model, inputs, timeout=timeout, priority=priority, traceparent=traceparent)
        has_ended = threading.Event()

        def requests() -> Iterator[ModelInferRequest]:
            yield request
            has_ended.wait()

        with grpc.insecure_channel(self.url, options=_ANY_SIZE) as channel:
            call = GRPCInferenceServiceStub(channel).ModelStreamInfer(requests(), timeout=timeout)
            reader = threading.Thread(target=_read, args=[call, responses], daemon=True)
            reader.start()
            try:
                error = None
                for message in _until_final(responses, cancelled):
                    if message.error_message:
                        error = error_from_wire(message.error_message)
                    elif message.infer_response.outputs:
                        yield event_from_wire(*_outputs(message.infer_response))
                has_ended.set()
                reader.join(_SECONDS_TO_END)
                if error is not None:
                    raise error
            finally:
                call.cancel()
                has_ended.set()


def _read(call: Any, responses: queue.Queue) -> None:
    """Puts the messages of a stream into the queue, and at its end None or its error."""
    end = None
    try:
        for message in call:
            responses.put(message)
    except grpc.RpcError as error:
        end = error
    responses.put(end)


def _until_final(responses: queue.Queue, cancelled: threading.Event) -> Iterator[ModelStreamInferResponse]:
    """The responses to a request, up to the final one or an error."""
    is_final = False
    while not is_final:
        if cancelled.is_set():
            raise CancelledError("the request was cancelled")
        try:
            message = responses.get(timeout=0.05)
        except queue.Empty:
            continue
        if isinstance(message, grpc.RpcError):
            raise _grpc_error(message) from message
        if message is None:
            raise UnavailableError("the service ended the stream before the request was done")
        is_final = message.error_message or message.infer_response.parameters["triton_final_response"].bool_param
        yield message


def _outputs(response: ModelInferResponse) -> tuple[str, bytes]:
    """The event, and its data."""
    contents = {each.name: raw for each, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
    return deserialize_bytes_tensor(contents[EVENT]).item().decode(), contents[DATA]


def _request(
    model: str, inputs: dict[str, Any], *, timeout: float | None, priority: int, traceparent: str | None
) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        array = _array(name, value)
        tensor = {"name": name, "datatype": np_to_triton_dtype(array.dtype), "shape": array.shape}
        request.inputs.add(**tensor)
        is_text = array.dtype == np.object_
        request.raw_input_contents.append(serialize_byte_tensor(array).item() if is_text else array.tobytes())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout is not None:
        request.parameters["timeout"].int64_param = _microseconds(timeout)
    if priority:
        request.parameters["priority"].uint64_param = priority
    if traceparent:
        request.parameters[TRACEPARENT].string_param = traceparent
    return request


def _array(name: str, value: Any) -> np.ndarray:
    """The value of an input, [1, number of values]."""
    data_type = _INPUTS[name].data_type
    if _INPUTS[name].is_media or _INPUTS[name].is_list:
        values = _files(name, value) if _INPUTS[name].is_media else _texts(name, value)
        return np.array([values], dtype=np.object_)
    if data_type == "TYPE_STRING":
        return np.array([[_checked(name, value).encode()]], dtype=np.object_)
    return np.array([[_checked(name, value)]], dtype=_NUMPY_TYPES[data_type])


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


def _grpc_error(error: grpc.RpcError) -> ServiceError:
    """The error of a stream that broke, or of a question."""
    errors = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.CANCELLED: CancelledError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    }
    return errors.get(error.code(), ServiceError)(error.details())


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
            body["parameters"] = timing | ({TRACEPARENT: traceparent} if traceparent else {})
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
                        raise DeadlineExceededError(f"not done within {timeout:g} s")
                    if line.startswith("data:"):
                        yield _http_event(json.loads(line.removeprefix("data:")))
        except httpx.ReadTimeout as error:
            raise DeadlineExceededError(f"no response within {timeout:g} s") from error
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
    error = error_from_wire(message)
    if type(error) is not ServiceError:
        return error
    return {400: InvalidRequestError, 499: CancelledError, 503: UnavailableError}.get(status, ServiceError)(message)


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1e6))
