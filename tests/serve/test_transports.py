"""gRPC to a server that misbehaves as Triton does once in a thousand requests."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadit.serve.contract import VideoRequest
from megadit.serve.events import (
    DATA,
    EVENT,
    AdapterNotFoundError,
    CancelledError,
    DeadlineExceededError,
    HeldBackError,
    InvalidRequestError,
    ServiceError,
    StepDone,
    UnavailableError,
    error_from_wire,
    error_to_wire,
    event_to_wire,
)
from megadit.serve.transports import connect

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("tritonclient.grpc").service_pb2
service_grpc = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
serialize = pytest.importorskip("tritonclient.utils").serialize_byte_tensor

STEP = StepDone(step=1, num_steps=2, sigma=0.5, seconds_left=1.0, preview=b"jpeg")


class Faulty(service_grpc.GRPCInferenceServiceServicer):
    """Answers each stream with `messages`, and then stands still unless it `ends`."""

    def __init__(self) -> None:
        self.messages, self.ends, self.requests = [], True, []
        self.goes_on, self.was_left = threading.Event(), threading.Event()

    def ServerLive(self, request, context):  # noqa: N802
        return service.ServerLiveResponse(live=True)

    def ModelStreamInfer(self, requests, context):  # noqa: N802
        context.add_callback(self.was_left.set)
        self.requests.append(next(requests))
        yield from self.messages
        if not self.ends:
            self.goes_on.wait()


@pytest.fixture
def faulty():
    servicer, server = Faulty(), grpc.server(ThreadPoolExecutor(1))
    service_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.goes_on.set()
    server.stop(None).wait()


def answer(event=None, *, is_final=False, error=""):
    response = service.ModelInferResponse()
    if event is not None:
        text, data = event_to_wire(event)
        response.outputs.add(name=EVENT), response.outputs.add(name=DATA)
        response.raw_output_contents.append(serialize(np.array([[text.encode()]], dtype=np.object_)).item())
        response.raw_output_contents.append(data)
    response.parameters["triton_final_response"].bool_param = is_final
    return service.ModelStreamInferResponse(infer_response=response, error_message=error)


def ask(servicer, cancelled=None, timeout=None, priority=0, **inputs):
    request = VideoRequest(prompt="a", **inputs).to_inputs()
    waits = {"timeout": timeout, "priority": priority, "traceparent": "00-1-2-3"}
    return connect(servicer.url).events("model", request, cancelled=cancelled or threading.Event(), **waits)


@pytest.mark.parametrize("ends", [True, False])
def test_a_server_that_stands_still_after_its_last_response_keeps_nobody(faulty, ends):
    faulty.messages, faulty.ends = [answer(STEP), answer(is_final=True)], ends
    assert list(ask(faulty)) == [STEP]
    assert faulty.was_left.wait(60), "the stream is ended by the client, if not by the server"


def test_an_error_ends_a_request_whose_stream_stays_open(faulty):
    faulty.messages, faulty.ends = [answer(STEP), answer(error="invalid request: too many")], False
    events = ask(faulty)
    assert next(events) == STEP
    with pytest.raises(InvalidRequestError, match="^too many$"):
        next(events)
    assert faulty.was_left.wait(60)


def test_a_stream_that_ends_too_early_is_an_error(faulty):
    faulty.messages = [answer(STEP)]
    events = ask(faulty)
    next(events)
    with pytest.raises(UnavailableError, match="before the request was done"):
        next(events)


@pytest.mark.parametrize("how", ["cancelled", "left", "late"])
def test_who_does_not_wait_leaves_neither_stream_nor_thread(faulty, how):
    faulty.messages, faulty.ends, cancelled = [answer(STEP)], False, threading.Event()
    connect(faulty.url)  # the server's thread is there
    before = threading.active_count()
    events = ask(faulty, cancelled, timeout=0.5 if how == "late" else None)
    assert next(events) == STEP
    if how == "left":
        events.close()
    else:
        if how == "cancelled":
            cancelled.set()
        with pytest.raises(CancelledError if how == "cancelled" else DeadlineExceededError):
            next(events)
    assert faulty.was_left.wait(60)
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_a_request_is_that_of_the_contract(faulty):
    faulty.messages = [answer(is_final=True)]
    assert not list(ask(faulty, timeout=3, priority=2, seed=5, negative_prompt="grey", adapters=("one:0.5",)))
    (request,) = faulty.requests
    contents = dict(zip([each.name for each in request.inputs], request.raw_input_contents, strict=True))
    assert contents["prompt"] == b"\x01\0\0\0a" and contents["seed"] == (5).to_bytes(8, "little")
    assert contents["adapters"] == b"\x07\0\0\0one:0.5"
    assert {each.name: (each.datatype, list(each.shape)) for each in request.inputs}["seed"] == ("INT64", [1, 1])
    assert request.parameters["timeout"].int64_param == 3_000_000 and request.parameters["priority"].uint64_param == 2
    assert request.parameters["traceparent"].string_param == "00-1-2-3"


@given(
    st.sampled_from([InvalidRequestError, AdapterNotFoundError, HeldBackError, DeadlineExceededError, CancelledError]),
    st.text(),
)
def test_errors_keep_their_kind_and_message(kind, message):
    error = error_from_wire(error_to_wire(kind(message)))
    assert type(error) is kind and str(error) == message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Exceeds maximum queue size", UnavailableError),
        ("Request timeout expired", UnavailableError),
        ("the network said: invalid request: x", ServiceError),
        ("", ServiceError),
    ],
)
def test_errors_of_triton_itself(message, kind):
    assert type(error_from_wire(message)) is kind
