"""A store that fails at any moment: no job is left behind, and every gateway ends."""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest
from sqlalchemy.exc import OperationalError

from megadit.serve.contract import VideoRequest
from megadit.serve.gateway import service
from megadit.serve.gateway.http.routes import _stored
from megadit.serve.gateway.http.streams import Streams
from megadit.serve.gateway.jobs.runner import _Run
from megadit.serve.gateway.jobs.servers import Server
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.jobs import IN_PROGRESS, QUEUED, NewJob, Result

MODELS = frozenset({"text_to_video"})
SIZES = {"num_steps": 4, "num_frames": 5, "height": 8, "width": 8, "fps": 8.0}
NEW = NewJob(model="text_to_video", request=VideoRequest(prompt="a", **SIZES))
GONE = OperationalError("UPDATE", {}, Exception("the connection broke"))


@pytest.fixture
def key(new_key):
    return new_key()[1]


@pytest.fixture
def responding(monkeypatch):
    """Servers that are well, and have done no work yet."""

    def probe(server: Server) -> bool:
        server.silent_since, server.is_proven = None, True
        return True

    monkeypatch.setattr(Server, "probe", probe)
    monkeypatch.setattr(Server, "is_responding", probe)


@pytest.fixture
def drained(gateway):
    yield
    gateway.runner.drain(0)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def first_failing(function, error=GONE, *, is_done: bool = False):
    """The function, whose first call raises; `is_done`: after its work."""
    failed = []

    def call(*arguments, **settings):
        if failed:
            return function(*arguments, **settings)
        failed.append(True)
        if is_done:
            function(*arguments, **settings)
        raise error

    return call


def test_a_job_whose_claim_was_not_answered_is_run(gateway, key, responding, drained, eventually, monkeypatch):
    gateway.store.create(key, NEW)
    monkeypatch.setattr(gateway.store, "claim", first_failing(gateway.store.claim, is_done=True))
    begun = threading.Event()
    monkeypatch.setattr(gateway.runner, "_work", lambda run: (gateway.runner._runs.clear(), begun.set()))
    monkeypatch.setattr(Server, "client", lambda *_: gateway.servers.all[0])
    monkeypatch.setattr(Server, "stream", lambda *_, **__: None, raising=False)
    gateway.runner.start()
    eventually(lambda: gateway.runner.recover() or begun.is_set(), seconds=60)


def test_what_runs_or_is_about_to_run_is_not_taken_for_lost(gateway, key):
    job = gateway.store.create(key, NEW)[0]
    claimed, runner = gateway.store.claim(MODELS), gateway.runner
    runner._handing_out.add("a server")
    runner.recover()
    runner._handing_out.clear()
    runner._runs[job.id] = _Run(job=claimed, server=gateway.servers.all[0], generation=None)
    runner.recover()
    assert gateway.store.get(key.id, job.id).status == IN_PROGRESS
    runner._runs.clear()
    runner.recover()
    assert gateway.store.get(key.id, job.id).status == QUEUED


@pytest.mark.parametrize("then", ["deleted", "taken over", "kept"])
@pytest.mark.parametrize("ending", ["video", "failure", "interruption"])
def test_a_job_deleted_as_it_ends_counts_as_cancelled(gateway, key, caplog, ending, then):
    caplog.set_level(logging.INFO)
    job = gateway.store.create(key, NEW)[0]
    run = _Run(job=gateway.store.claim(MODELS), server=gateway.servers.all[0], generation=None)
    if then == "deleted":
        gateway.store.delete(key.id, job.id)
    elif then == "taken over":
        gateway.store.requeue(run.job)
    end = {
        "video": lambda: gateway.runner._keep(run, SimpleNamespace(data=b"mp4", media_type="video/mp4", scores=None)),
        "failure": lambda: gateway.runner._fail(run, "timed_out", "not done"),
        "interruption": lambda: gateway.runner._interrupt(run, "its server hangs"),
    }
    end[ending]()
    is_kept = (ending, then) == ("video", "kept")
    events = [record.getMessage() for record in caplog.records]
    assert events.count("job cancelled") == (then == "deleted") and events.count("job completed") == is_kept
    count = gateway.metrics.videos.labels(key.id, job.model, "cancelled")._value.get()
    assert count == (then == "deleted")
    assert len(gateway.results._names()) == is_kept


def test_a_job_that_cannot_be_read_stops_no_other(gateway, key, responding, drained, monkeypatch):
    gateway.store.create(key, NEW)
    has_gone_on = threading.Event()
    monkeypatch.setattr(gateway.store, "claim", first_failing(lambda _: has_gone_on.set(), TypeError("a field")))
    gateway.runner.start()
    assert has_gone_on.wait(60)


@pytest.mark.parametrize("fault", ["files", "client"])
def test_a_suspected_job_that_cannot_start_keeps_no_slot(gateway, key, responding, monkeypatch, fault):
    lost = Result(name="video_0.0.given", media_type="application/zip", num_bytes=3, sha256="0" * 64)
    gateway.store.create(key, replace(NEW, conditioning=lost if fault == "files" else None))
    gateway.store.interrupt(gateway.store.claim(MODELS), suspicion="server_failed")
    monkeypatch.setattr(Server, "client", raising(ConnectionError("it died again")))
    server = gateway.servers.all[0]
    server.free.acquire()
    with contextlib.suppress(ConnectionError):
        assert not gateway.runner._begin_next(server)
    assert all(server.free.acquire(blocking=False) for _ in range(server.slots - 1))


def test_a_drain_ends_though_the_store_does_not_answer(gateway, key, responding, monkeypatch):
    """The files of the job are missing, which cannot be stored."""
    lost = Result(name="video_0.0.given", media_type="application/zip", num_bytes=3, sha256="0" * 64)
    gateway.store.create(key, replace(NEW, conditioning=lost))
    has_failed = threading.Event()
    monkeypatch.setattr(gateway.store, "fail", lambda *_: has_failed.set() or raising(GONE)())
    gateway.runner.start()
    assert has_failed.wait(60)
    drain = threading.Thread(target=gateway.runner.drain, args=[0], daemon=True)
    drain.start()
    drain.join(60)
    has_ended = not drain.is_alive()
    gateway.runner._ended.set()
    assert has_ended


@pytest.mark.parametrize("how", ["it ended", "it was killed, and the store failed again"])
def test_what_a_gateway_could_not_put_back_another_runs(gateway, key, eventually, monkeypatch, how):
    monkeypatch.setattr(service, "_SECONDS_BETWEEN_BEATS", 0.01)
    job = gateway.store.create(key, NEW)[0]
    gateway.start()
    assert gateway.store.claim(MODELS) is not None
    monkeypatch.setattr(gateway.runner, "recover", lambda: None)
    other = Gateway(replace(gateway.settings, name="other"))
    with contextlib.closing(other.database):
        other._heart._patience = 1.0
        if how != "it ended":
            monkeypatch.setattr(gateway._heart, "leave", lambda: None)
            monkeypatch.setattr(other.store, "interrupt_all", first_failing(other.store.interrupt_all))
        gateway.stop(0)
        other._housekeeper.start()
        try:
            eventually(lambda: other.store.get(key.id, job.id).status == QUEUED, seconds=60)
            eventually(lambda: other._heart.beat() == [], seconds=60)
        finally:
            other._stopping.set()
            other._housekeeper.join()


def test_a_gateway_that_left_nothing_is_not_waited_for(gateway, key):
    gateway.start()
    gateway.store.create(key, NEW)
    gateway.stop(0)
    assert gateway._heart._beats() is None, "nor are jobs that wait anybody's"


@pytest.mark.parametrize("is_done", [True, False])
def test_files_of_a_job_that_may_be_stored_are_kept(gateway, key, monkeypatch, is_done):
    new = replace(NEW, request=replace(NEW.request, image=b"a picture"))
    monkeypatch.setattr(gateway.store, "create", first_failing(gateway.store.create, is_done=is_done))
    with pytest.raises(OperationalError):
        _stored(gateway, key, new)
    assert len(gateway.results._names()) == 1
    gateway.clean_up()
    assert len(gateway.results._names()) == is_done
    gateway.clean_up()
    if is_done:
        assert gateway.results.conditioning(gateway.store.claim(MODELS))


async def read(events) -> list[str]:
    return [event async for event in events]


def test_a_stream_ends_in_one_line_with_its_store(gateway, key, monkeypatch, caplog):
    job = gateway.store.create(key, NEW)[0]
    monkeypatch.setattr(gateway.store, "get", raising(GONE))
    assert anyio.run(read, Streams(gateway).events(key, job.id)) == []
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [("store failed", None)]


ENDING = """
import socket, sys, time
from megadit.serve.gateway.command import serve
from megadit.serve.gateway.http.connections import Door
from megadit.serve.gateway.logs import log_as_json
from megadit.serve.gateway.service import Gateway, GatewaySettings
log_as_json()
folder = sys.argv[1]
gateway = Gateway(GatewaySettings(servers=("grpc://127.0.0.1:1",), store=folder + "/s.sqlite", results=folder + "/v"))
gateway.start()
gateway.runner._pool.submit(time.sleep, 10**6)
serve(gateway, socket.create_server(("127.0.0.1", 0)), Door(10), drain_seconds=0)
"""


def test_a_second_signal_ends_a_gateway_that_waits_for_a_job(tmp_path):
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("Started server" in line for line in process.stderr)
            process.send_signal(signal.SIGHUP)
            assert any("drains" in line for line in process.stderr)
            process.send_signal(signal.SIGHUP)  # a closed terminal sends several, which count as one
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
        finally:
            process.kill()
