"""`GatewayClient` and the gateway as a process, with no Triton: the test makes the videos itself."""

import contextlib
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.events import CancelledError, InvalidRequestError, ServiceError, StepDone
from megadit.serve.gateway import command
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.launch.local_server import Ports
from megadit.serve.launch.up import gateway_process

MODELS = frozenset({"text_to_video"})
REQUEST = VideoRequest(prompt="a", num_steps=4, preview_every=2)


@pytest.fixture
def client(url, new_key):
    """A client of a gateway that listens in a thread of this process."""
    return GatewayClient(url, new_key()[0])


@pytest.fixture
def claim(gateway, eventually):
    """Takes the job that a client asked for, once it has."""

    def claim():
        eventually(gateway.store.has_queued)
        return gateway.store.claim(MODELS)

    return claim


def test_steps_previews_and_the_video_come_as_they_are_made(client, gateway, claim):
    def make() -> None:
        job = claim()
        assert job.request.preview_every == 2
        gateway.store.note_step(job, 1, b"a first look")
        seen.wait(300)
        gateway.store.note_step(job, 3, b"a second look")
        seen_again.wait(300)
        gateway.store.complete(job, gateway.results.put(job.id, b"the video", "video/mp4"), seconds_to_live=1000)

    seen, seen_again = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        events = iter(client.stream(REQUEST))
        first = next(events)
        assert isinstance(first, StepDone) and (first.step, first.preview) == (1, b"a first look")
        seen.set()
        second = next(events)
        assert (second.step, second.num_steps, second.preview) == (3, 4, b"a second look")
        seen_again.set()
        (video,) = events
        made.result()
    assert (video.data, video.media_type, video.prompt) == (b"the video", "video/mp4", "a")
    assert client._ask("GET", "/v1/videos")["data"] == [], "what was fetched is not kept there"


def test_a_failure_a_cancel_and_a_deletion_are_told_apart(client, gateway, claim):
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.generate, REQUEST)
        gateway.store.fail(claim(), "invalid_request", "too wild")
        with pytest.raises(InvalidRequestError, match="too wild"):
            asked.result(300)

        generation = client.stream(REQUEST)
        asked = threads.submit(list, generation)
        job = claim()
        generation.cancel()
        with pytest.raises(CancelledError, match="cancelled"):
            asked.result(300)
        assert gateway.store.get(job.key_id, job.id) is None

        asked = threads.submit(client.generate, REQUEST)
        job = claim()
        gateway.store.delete(job.key_id, job.id)
        with pytest.raises(CancelledError, match="deleted"):
            asked.result(300)
    with pytest.raises(UserError, match="valid key"):
        GatewayClient(client.url, "wrong")


def owned(tmp_path, *arguments: str, port: int, hang_seconds: float = 600.0):
    settings = [f"--store={tmp_path / 'jobs.sqlite'}", f"--results={tmp_path / 'videos'}", "--metrics_port=0"]
    return gateway_process(
        ["--server=grpc://127.0.0.1:1", "--drain_seconds=1", *settings, *arguments],
        host="127.0.0.1",
        port=port,
        log=tmp_path / "log",
        stop_seconds=300,
        hang_seconds=hang_seconds,
    )


def test_a_gateway_drains_and_may_be_started_again_and_is_ended_where_it_hangs(tmp_path):
    """While it lives, a second one of its name cannot start, and says so."""
    process = owned(tmp_path, "--name=one", port=Ports.free().http, hang_seconds=1.0)
    with process:
        assert process.is_alive() and process.stop() == 0, "it drains"
    with process:
        with pytest.raises(UserError, match="gateway ended with code 2"):
            owned(tmp_path, "--name=one", port=Ports.free().http).__enter__()
        assert "a gateway with the name one is running" in (tmp_path / "log").read_text()
        assert process.is_alive() and process.killed_because is None
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait() == -signal.SIGKILL and process.killed_because == "it answers nothing"
    assert not process.is_alive()


def test_another_s_gateway_is_not_taken_for_the_own_one(tmp_path):
    """It answers at the port as ours would."""
    port = Ports.free().http
    with owned(tmp_path, "--name=one", port=port):
        with pytest.raises(UserError, match=f"--port takes another, and `ss -ltnp sport = :{port}` says who"):
            owned(tmp_path, "--name=two", port=port).__enter__()


def test_a_client_that_is_gone_without_a_word_is_noticed(monkeypatch):
    monkeypatch.setattr(command, "_SECONDS_UNTIL_GONE", 7.5)
    with contextlib.closing(command._listen("127.0.0.1", 0)) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"id": NaN}', b"<html>", b'{"error": ' + b"[" * 100_000])
def test_an_answer_that_is_no_gateways_is_a_line(answer):
    transport = httpx.MockTransport(lambda request: httpx.Response(200 + 300 * (b"error" in answer), content=answer))
    client = object.__new__(GatewayClient)
    client.url, client._patience = "http://nobody", 0.01
    client._http = httpx.Client(transport=transport, base_url=client.url)
    with pytest.raises(ServiceError, match="is it a gateway|does not respond in JSON"):
        client._until_answered(lambda: client._ask("GET", "/v1/videos/1"), threading.Event())
