"""How long a job may take, a server be silent, and a key read: as the gateway's settings say, and no other number."""

import re
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import generate_latest

from megadit.models.shared.cli.options import every_setting
from megadit.models.shared.cli.setting import check_value
from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.events import DeadlineExceededError, UnavailableError, VideoResult
from megadit.serve.gateway.command import GatewayOptions
from megadit.serve.gateway.jobs import runner
from megadit.serve.gateway.jobs.runner import RunnerSettings, _Run
from megadit.serve.gateway.jobs.servers import Server
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.jobs import NewJob
from megadit.serve.launch.run import RunOptions
from megadit.serve.launch.up import UpOptions

SIZES = {"num_steps": 4, "num_frames": 5, "height": 8, "width": 8, "fps": 8.0}
MODEL = "text_to_video"


@pytest.fixture
def start(gateway, new_key):
    """start(generation): a job of a new key that the gateway has begun."""

    def start(generation):
        _, key = new_key()
        gateway.store.create(key, NewJob(model=MODEL, request=VideoRequest(prompt="a", **SIZES)))
        job = gateway.store.claim(frozenset({MODEL}))
        return key, _Run(job=job, server=gateway.servers.all[0], generation=generation)

    return start


def late():
    raise DeadlineExceededError("not in time")
    yield


@pytest.mark.parametrize(("seconds", "status"), [(0.0, "failed"), (3600.0, "queued")])
def test_a_job_that_takes_too_long_has_failed(gateway, start, seconds, status):
    gateway.runner._settings = RunnerSettings(job_seconds=seconds)
    key, run = start(late())
    gateway.runner._settle(run)
    assert gateway.store.get(key.id, run.job.id).status == status


@pytest.mark.parametrize(("seconds", "is_lost"), [(1.0, True), (1e9, False)])
def test_a_server_that_is_silent_too_long_loses_its_jobs(gateway, start, seconds, is_lost, monkeypatch):
    gateway.runner._settings = RunnerSettings(hang_seconds=seconds)
    cancelled = []
    _, run = start(SimpleNamespace(cancel=lambda: cancelled.append(True)))
    gateway.runner._runs[run.job.id] = run
    rounds = iter([False, True])
    monkeypatch.setattr(gateway.runner, "_ended", SimpleNamespace(wait=lambda _: next(rounds)))
    monkeypatch.setattr(type(run.server), "probe", lambda server: False)
    run.server.silent_since = time.monotonic() - 60
    gateway.runner._watch(run.server)
    assert bool(cancelled) == is_lost


def one_video():
    yield VideoResult(
        data=b"x", media_type="video/mp4", index=0, prompt="a", seed=0, settings={}, seconds=0.0, batch_size=1
    )


def test_what_a_video_took_at_each_stage_is_counted_by_key(gateway, start):
    key, run = start(one_video())
    gateway.runner._settle(run)
    assert gateway.store.get(key.id, run.job.id).status == "completed"
    told = generate_latest(gateway.metrics.registry).decode()
    for stage in ("triton", "store"):
        assert f'megadit_stage_seconds_count{{key="{key.id}",stage="{stage}"}} 1.0' in told
    assert f'megadit_videos_total{{key="{key.id}",model="text_to_video",outcome="completed"}} 1.0' in told


def unreadable():
    raise KeyError("secret internals")
    yield


def test_a_job_whose_answer_cannot_be_read_is_begun_once_more_and_then_fails(gateway, start):
    """Whatever goes wrong, it does not stay in progress for ever."""
    key, run = start(unreadable())
    gateway.runner._settle(run)
    assert gateway.store.get(key.id, run.job.id).status == "queued"
    again = gateway.store.claim(frozenset({MODEL}))
    gateway.runner._settle(replace(run, job=again, generation=unreadable()))
    job = gateway.store.get(key.id, run.job.id)
    assert (job.status, job.error_code) == ("failed", "server_failed") and "secret" not in job.error_message


def test_what_is_no_address_of_a_server_is_told_at_once(gateway):
    for url in ("nonsense://x", "grpc://x:99999", "grpc://x:y", "grpc://x/y", "http://x:8000", ""):
        with pytest.raises(UserError, match=re.escape(repr(url))):
            Gateway(replace(gateway.settings, servers=("grpc://127.0.0.1:1", url)))


def test_a_server_that_does_not_answer_is_named_in_the_log_with_the_reason(gateway, monkeypatch):
    rounds = iter([False, False, True])
    monkeypatch.setattr(gateway.runner, "_ended", SimpleNamespace(wait=lambda _: next(rounds)))
    monkeypatch.setattr(runner, "log", lambda event, **fields: told.append((event, fields)))
    told = []
    monkeypatch.setattr(Server, "client", lambda *_: raise_(UnavailableError("nobody is there\nsecret internals")))
    gateway.runner._watch(gateway.servers.all[0])
    assert told == [("server is unhealthy", {"server": "grpc://127.0.0.1:1", "reason": "nobody is there"})]


def raise_(error):
    raise error


@pytest.mark.parametrize(("kind", "videos"), [("GET events", 1), ("GET content", 0), ("POST sync", 3)])
def test_a_key_reads_so_many_streams(url, gateway, new_key, eventually, kind, videos):
    """Streams, videos and waiting requests, until they have been read; one that is refused makes no video."""
    (text, key), (other, _) = new_key(), new_key()
    gateway.settings = replace(gateway.settings, max_streams=2)
    address, is_open = (urlsplit(url).hostname, urlsplit(url).port), gateway.metrics.streams._value.get
    finished = httpx.post(f"{url}/v1/videos", json={"prompt": "a"}, headers={"authorization": f"Bearer {text}"}).json()
    if kind == "GET content":
        result = gateway.results.put(finished["id"], bytes(30_000_000), "video/mp4")
        gateway.store.complete(gateway.store.claim(frozenset({MODEL})), result, seconds_to_live=1000)
    method, last = kind.split()
    path = "/v1/videos/sync" if last == "sync" else f"/v1/videos/{finished['id']}/{last}"

    def num_queued() -> int:
        return gateway.store.counts().get((key.id, "queued"), 0)

    def ask(text: str) -> socket.socket:
        connection = socket.create_connection(address)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {text}\r\nContent-Length: 14\r\n"
        connection.sendall(f'{head}Content-Type: application/json\r\n\r\n{{"prompt":"a"}}'.encode())
        return connection

    with ask(text) as first, ask(text):
        eventually(lambda: is_open() == 2 and num_queued() == videos)
        with ask(text) as third, ask(other) as stranger:
            assert b" 429 " in third.recv(1 << 16), "its key has two"
            if kind != "POST sync":
                assert b" 404 " in stranger.recv(1 << 16), "another's"
        assert num_queued() == videos
        eventually(lambda: is_open() == 2)
        first.close()
        eventually(lambda: is_open() == 1)
    eventually(lambda: is_open() == 0)


@pytest.mark.parametrize("options", [GatewayOptions, RunOptions, UpOptions])
@pytest.mark.parametrize("number", [-1, 65536])
def test_a_port_is_one_of_tcp(options, number):
    """Python raises an OverflowError for any other."""
    ports = {name: about for name, about in every_setting(options).items() if name.endswith("port")}
    assert len(ports) > 1
    for name, about in ports.items():
        with pytest.raises(UserError, match=f"{name}={number} must lie between 0 and 65535"):
            check_value(about, name, number)
        assert check_value(about, name, 65535) == 65535
