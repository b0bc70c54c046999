"""The gateway's door: what strangers, slow receivers, other stores and revoked keys cannot do to anybody."""

import contextlib
import logging
import re
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import SQLAlchemyError

from megadit.models.shared.errors import UserError
from megadit.serve.client import Generation
from megadit.serve.contract import VideoRequest
from megadit.serve.events import ServiceError, VideoResult
from megadit.serve.gateway import metrics, service
from megadit.serve.gateway.http import connections, middleware
from megadit.serve.gateway.http.connections import most_connections
from megadit.serve.gateway.jobs import webhooks
from megadit.serve.gateway.jobs.runner import _Run
from megadit.serve.gateway.jobs.webhooks import Webhooks
from megadit.serve.gateway.metrics import serve_metrics
from megadit.serve.gateway.service import Gateway, GatewaySettings
from megadit.serve.gateway.store import database, patience
from megadit.serve.gateway.store.database import Database, holds_password, shown
from megadit.serve.gateway.store.jobs import NewJob
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.gateway.store.results import Results
from megadit.serve.gateway.store.store import JobStore, KeyRevokedError
from megadit.serve.launch.local_server import Ports

MODELS = frozenset({"text_to_video"})
SIZES = {"num_steps": 4, "num_frames": 5, "height": 8, "width": 8, "fps": 8.0}
NEW = NewJob(model="text_to_video", request=VideoRequest(prompt="a secret prompt", **SIZES))
VIDEO = {"prompt": "a secret prompt"}


# ------------------------------------------------------------------------------------------------- connections


def ask(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=60) as answer:
        return answer.status


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1 << 16) == b""
    return True


def test_connections_that_ask_for_nothing_make_room_for_those_that_do(listen, monkeypatch):
    monkeypatch.setattr(connections, "_SECONDS_TO_ASK", 10**6)
    port = listen(8)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        for connection in idle[::2]:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n")  # and never the rest
        assert [ask(port) for _ in range(5)] == [200] * 5
        assert is_closed(idle[0]) and is_closed(idle[1]), "the oldest went"


def test_who_is_being_answered_is_not_sent_away(listen, gateway, new_key):
    port, (text, key) = listen(4), new_key()
    headers = {"authorization": f"Bearer {text}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        video_id = client.post("/v1/videos", json=VIDEO).json()["id"]
        with client.stream("GET", f"/v1/videos/{video_id}/events") as answer, contextlib.ExitStack() as stack:
            lines = answer.iter_lines()
            assert next(lines) == "event: video.queued"
            for _ in range(40):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert ask(port) == 200
            gateway.store.delete(key.id, video_id)
            assert "event: video.deleted" in list(lines)


@pytest.mark.parametrize("seconds", [0, 10**6])
@pytest.mark.parametrize("path", ["/nowhere", "/v1/videos", "/v1/videos/{}/content"])
def test_who_reads_nothing_makes_room(listen, gateway, new_key, visit, monkeypatch, eventually, path, seconds):
    """Of many answers, of a large one, or of a video. A stranger does at once, who has a key after a while."""
    monkeypatch.setattr(connections, "_SECONDS_TO_READ", seconds)
    made, pause, unread = connections.Connection.connection_made, connections.Door.pause, []

    def with_little_room(connection, transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        made(connection, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", with_little_room)
    monkeypatch.setattr(connections.Door, "pause", lambda *each: (pause(*each), unread.append(each[1])))
    port, (text, _) = listen(8), new_key()
    video_id = visit(text).post("/v1/videos", json=VIDEO).json()["id"]
    result = gateway.results.put(video_id, bytes(30_000_000), "video/mp4")
    assert gateway.store.complete(gateway.store.claim(MODELS), result, seconds_to_live=1000)
    key = f"Authorization: Bearer {text}\r\n" if "videos" in path else ""
    request = f"GET {path.format(video_id)} HTTP/1.1\r\nHost: x\r\n{key}\r\n".encode()
    with contextlib.ExitStack() as stack:
        for number in range(8):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(request * 500)
            eventually(lambda number=number: len(unread) > number)
        with pytest.raises(OSError) if key and seconds else contextlib.nullcontext():
            assert [ask(port) for _ in range(3)] == [200] * 3
            sockets = [each.transport.get_extra_info("socket") for each in unread]
            eventually(lambda: any(each.fileno() < 0 for each in sockets))


def test_a_head_that_drips_and_a_kept_connection_have_their_time(listen, monkeypatch):
    monkeypatch.setattr(connections, "_SECONDS_TO_ASK", 10**6)
    port = listen(100)

    def ask_again(connection: socket.socket) -> None:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")

    with socket.create_connection(("127.0.0.1", port)) as kept:
        ask_again(kept)
        monkeypatch.setattr(connections, "_SECONDS_TO_ASK", 0.5)
        ask_again(kept)
        assert is_closed(kept)
    with socket.create_connection(("127.0.0.1", port)) as dripping, pytest.raises(OSError):
        for _ in range(600):
            dripping.sendall(b"x")
            time.sleep(0.1)
    monkeypatch.setattr(connections, "_SECONDS_TO_ASK", 10**6)
    assert ask(port) == 200


def test_a_body_has_its_time_however_it_comes(listen, new_key, monkeypatch):
    monkeypatch.setattr(middleware, "_SECONDS_OF_A_BODY", 0.5)
    port, text = listen(100), new_key()[0]
    head = f"POST /v1/videos HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {text}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
        for _ in range(10):
            with contextlib.suppress(OSError):
                connection.sendall(b" ")
            time.sleep(0.1)
        connection.settimeout(60)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_descriptors_are_kept_back_for_triton(monkeypatch):
    for limit, most in ((1024, 224), (10**6, 1000)):
        monkeypatch.setattr(connections, "raise_descriptor_limit", lambda limit=limit: limit)
        assert most_connections(1000, slots=8) == most
    monkeypatch.setattr(connections, "raise_descriptor_limit", lambda: 256)
    with pytest.raises(UserError, match="ulimit -n"):
        most_connections(1000, slots=8)


def test_the_metrics_are_asked_by_few_at_once(gateway):
    port, before = Ports.free().metrics, threading.active_count()
    serve_metrics(gateway.metrics, "127.0.0.1", port)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert is_closed(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
        assert threading.active_count() <= before + 18, "eight, and a clock of each"


def test_who_asks_for_metrics_byte_by_byte_makes_room(gateway, monkeypatch, eventually):
    monkeypatch.setattr(metrics, "_SECONDS_OF_A_SCRAPE", 0.5)
    port = Ports.free().metrics
    serve_metrics(gateway.metrics, "127.0.0.1", port)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]

        def is_told() -> bool:
            for each in slow:
                with contextlib.suppress(OSError):
                    each.sendall(b"x")
            with contextlib.suppress(httpx.HTTPError):
                return "megadit_has_space 1.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            return False

        eventually(is_told, seconds=20)


# ------------------------------------------------------------------------------------------------------ results


def settle(gateway, job) -> None:
    """The end of a run of a job, with a video of its own."""
    events = iter([video_of("a", f"attempt {job.attempts}".encode())])
    gateway.runner._settle(_Run(job=job, server=gateway.servers.all[0], generation=events))


def video_of(prompt: str, data: bytes) -> VideoResult:
    facts = {"index": 0, "prompt": prompt, "seed": 0, "settings": {}, "seconds": 0.0, "batch_size": 1}
    return VideoResult(data=data, media_type="video/mp4", **facts)


@pytest.mark.parametrize("who_is_last", ["the stale one", "the new one"])
def test_a_gateway_that_comes_back_to_a_job_of_another_touches_no_video(gateway, new_key, visit, who_is_last):
    """A stops after its last step, B takes the job over, and both end it in either order."""
    text, key = new_key()
    other = Gateway(replace(gateway.settings, name="other"))
    with contextlib.closing(other.database):
        gateway.store.create(key, NEW)
        stale = gateway.store.claim(MODELS)
        other.store.interrupt_all(gateway.store.owner)
        taken = other.store.claim(MODELS)
        ends = [lambda: settle(other, taken), lambda: settle(gateway, stale)]
        for end in ends if who_is_last == "the stale one" else ends[::-1]:
            end()
    client = visit(text)
    assert client.get(f"/v1/videos/{taken.id}").json()["status"] == "completed"
    assert client.get(f"/v1/videos/{taken.id}/content").content == b"attempt 2"
    assert len(list(Path(gateway.settings.results).glob("*.mp4"))) == 1, "none is doubled"


def test_a_completion_whose_answer_was_lost_keeps_its_video(gateway, new_key, monkeypatch):
    """The database did complete the job, and the connection broke before it could say so."""
    _, key = new_key()
    gateway.store.create(key, NEW)
    job, complete, told = gateway.store.claim(MODELS), gateway.store.complete, []

    def broken(*arguments, **settings):
        done = complete(*arguments, **settings)
        if not told:
            told.append(done)
            raise SQLAlchemyError("the connection broke")
        return done

    monkeypatch.setattr(gateway.store, "complete", broken)
    settle(gateway, job)
    done = gateway.store.get(key.id, job.id)
    assert told == [True] and gateway.results.open(done).read() == b"attempt 1"


SECRETS = "grpc://10.0.0.5:8001: ipv4:10.0.0.5:8001 /srv/videos/.x.mp4"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", SECRETS), ServiceError(SECRETS), KeyError(SECRETS)]
)
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_failed_job_tells_its_client_no_place_of_ours(gateway, new_key, visit, monkeypatch, caplog, error, is_stored):
    """The log does."""
    text, key = new_key()
    gateway.store.create(key, NEW)

    def failing(*_):
        raise error
        yield

    if is_stored:
        monkeypatch.setattr(gateway.results, "put", lambda *_: next(failing()))
    for _ in range(1 if is_stored else 2):
        job = gateway.store.claim(MODELS)
        if is_stored:
            settle(gateway, job)
        else:
            gateway.runner._settle(_Run(job=job, server=gateway.servers.all[0], generation=failing()))
    told = visit(text).get(f"/v1/videos/{job.id}").json()
    assert told["status"] == "failed" and not re.search(r"10\.0\.0\.5|srv", str(told))
    assert any(SECRETS in f"{each.fields}{each.exc_info and each.exc_info[1]}" for each in caplog.records)


def test_a_folder_is_one_store_s(gateway, new_key, tmp_path):
    _, key = new_key()
    gateway.store.create(key, NEW)
    settle(gateway, gateway.store.claim(MODELS))
    videos = set(Path(gateway.settings.results).glob("*.mp4"))
    foreign = replace(gateway.settings, store=str(tmp_path / "another.sqlite"))
    with pytest.raises(UserError, match="another job store"):
        Gateway(foreign)
    (Path(gateway.settings.results) / ".megadit_store").unlink()
    with pytest.raises(UserError, match="another job store"):  # as an earlier release left it
        Gateway(foreign)
    with contextlib.closing(Gateway(replace(gateway.settings, name="own")).database):
        assert set(Path(gateway.settings.results).glob("*.mp4")) == videos and len(videos) == 1
    with contextlib.closing(Gateway(replace(foreign, results=str(tmp_path / "own"))).database):
        pass


def test_videos_are_read_by_their_owner_alone(tmp_path):
    result = Results(str(tmp_path / "videos")).put("video_1", b"x", "video/mp4")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "videos", tmp_path / "videos" / result.name)]
    assert modes == [0o700, 0o600]


def test_a_key_keeps_no_more_bytes_than_it_may(gateway, new_key, visit):
    text, key = new_key(max_stored_bytes=15)
    client = visit(text)
    for _ in range(2):
        client.post("/v1/videos", json=VIDEO)
        settle(gateway, gateway.store.claim(MODELS))
    refused = client.post("/v1/videos", json=VIDEO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert visit().post("/v1/videos", json=VIDEO).status_code == 200, "another key has its own"
    client.delete(f"/v1/videos/{client.get('/v1/videos').json()['first_id']}")
    assert client.post("/v1/videos", json=VIDEO).status_code == 200


# ----------------------------------------------------------------------------------------------------- webhooks


@pytest.fixture
def dripping():
    """An address that sends a byte of its answer now and then, and never the last."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            with contextlib.suppress(OSError):
                while not server.is_over.wait(0.05):
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.is_over = threading.Event()
    threading.Thread(target=server.serve_forever, args=[0.02]).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.is_over.set()
    server.shutdown()
    server.server_close()


def test_an_address_that_drips_holds_neither_others_nor_a_drain_up(gateway, dripping, eventually, monkeypatch):
    monkeypatch.setattr(webhooks, "_SECONDS_TO_ANSWER", 0.3)
    monkeypatch.setattr(webhooks, "_AT_ONCE", 1)
    monkeypatch.setattr(webhooks, "_SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(webhooks, "_PAUSES", (0.0,) * 1000)  # where an answer came late, it comes again

    def answer(receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with receiver.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as receiver:
        threading.Thread(target=answer, args=(receiver,), daemon=True).start()
        for url in (dripping, f"http://127.0.0.1:{receiver.getsockname()[1]}/"):
            _, key = gateway.keys.add("somebody", webhook_url=url)
            gateway.store.create(key, NEW)
            gateway.store.fail(gateway.store.claim(MODELS), "timed_out", "x")
        sender = Webhooks(gateway.store, gateway.keys, gateway.metrics)
        sender.start()
        eventually(lambda: len(gateway.store.keys_to_call()) == 1)
        sender.stop()
        receiver.shutdown(socket.SHUT_RDWR)
    assert gateway.metrics.webhooks.labels("delivered")._value.get() == 1


# --------------------------------------------------------------------------------------------------------- keys


def test_revoking_a_key_ends_its_jobs_and_streams(gateway, new_key, visit, eventually):
    text, key = new_key()
    client = visit(text)
    running, waiting = (client.post("/v1/videos", json=VIDEO).json()["id"] for _ in range(2))
    job = gateway.store.claim(MODELS)
    other = visit()
    theirs = other.post("/v1/videos", json=VIDEO).json()["id"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.get, f"/v1/videos/{job.id}/events")
        eventually(lambda: gateway.metrics.streams._value.get() == 1)
        gateway.keys.revoke(key.id)
        lines = [line for line in answer.result().text.splitlines() if line]
    assert lines[-2] == "event: video.failed" and "key_revoked" in lines[-1]
    assert not gateway.store.note_step(job, 1), "who runs it stops"
    assert [gateway.store.get(key.id, each).status for each in (running, waiting)] == ["failed"] * 2
    assert gateway.store.claim(MODELS).id == theirs, "another key's goes on"
    assert client.post("/v1/videos", json=VIDEO).status_code == 401
    with pytest.raises(KeyRevokedError):  # one that was checked before the key was revoked
        gateway.store.create(key, NEW)


# ------------------------------------------------------------------------------------------------------- bodies


def test_a_body_of_a_hundred_thousand_names_is_refused_at_once(visit):
    client = visit()
    body = b"{" + b",".join(b'"%d":1' % index for index in range(90_000)) + b"}"
    began = time.process_time()
    answer = client.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, time.process_time() - began < 5) == (400, True)
    assert "more than 1,000 values" in answer.json()["error"]["message"]
    for text in (b"[" * 100_000, b'{"prompt": ' + b"[" * 5000, b'{"seed": 1' + b"0" * 5000 + b"}", b'{"fps": NaN}'):
        answer = client.post("/v1/videos", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, text[:20]


# --------------------------------------------------------------------------------------------- what nobody reads


@pytest.mark.parametrize(
    "url",
    [
        "postgres://user:hunter2@host/x",
        "postgresql+psycopg://user:hunter2@host:port/x",
        "postgresql+psycopg://user:hun@ter2/hunter2@127.0.0.1:1/x",
        "postgresql+psycopg://user@127.0.0.1:1/x?password=hunter2",
        "postgresql+nonsense:/user:hunter2@host/x\0",
    ],
)
def test_no_error_tells_the_password_of_a_store(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what looks like a file's name is one
    with pytest.raises(UserError) as told:
        Database(url).close()
    assert "hunter2" not in str(told.value) and "hunter2" not in shown(url)


def test_a_password_does_not_stand_in_the_process_list():
    for url in ("postgresql+psycopg://user:hunter2@host/x", "postgresql+psycopg://user@host/x?password=hunter2"):
        assert holds_password(url)
        with pytest.raises(UserError, match="passfile=FILE") as told:
            GatewaySettings(store=url)
        assert "hunter2" not in str(told.value)
    GatewaySettings(store="postgresql+psycopg://user@host/x?passfile=/run/secrets/pgpass")


def test_no_error_tells_the_secret_of_a_place():
    with pytest.raises(UserError) as told:
        Results("nonsense://key:hunter2@bucket/x?secret=hunter2")
    assert "hunter2" not in str(told.value)


def test_no_log_tells_a_prompt_whose_job_was_refused(gateway, new_key, visit, caplog, monkeypatch):
    text, key = new_key()
    client = visit(text)
    with gateway.database.writing() as connection:
        connection.exec_driver_sql("CREATE TRIGGER no BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'no room'); END")
    monkeypatch.setattr(logging.getLogger("megadit.gateway"), "propagate", True)
    with caplog.at_level(logging.INFO):
        answer = client.post("/v1/videos", json=VIDEO)
    assert answer.status_code == 503
    with pytest.raises(SQLAlchemyError) as error:
        gateway.store.create(key, NEW)
    assert "secret prompt" not in str(error.value)
    told = [record.getMessage() + str(record.__dict__) + str(record.exc_text) for record in caplog.records]
    assert any("no room" in line for line in told) and not any("secret prompt" in line for line in told)


# ------------------------------------------------------------------------------------------------ a silent store


def test_readiness_does_not_wait_for_a_store(gateway, visit, monkeypatch):
    gateway.servers.all[0].silent_since, gateway.servers.all[0].is_proven = None, True
    client, asked, answer = visit(anonymous=True), [], threading.Event()

    def silent() -> bool:
        asked.append(1)
        answer.wait(60)
        return False

    assert client.get("/health/ready").status_code == 200
    monkeypatch.setattr(gateway.store, "has_queued", silent)
    with monkeypatch.context() as patch:
        patch.setattr(service, "_SECONDS_FOR_READINESS", 0.5)
        assert [client.get("/health/ready").status_code for _ in range(2)] == [503] * 2
    assert len(asked) == 1, "a store that does not answer is asked once"
    answer.set()
    gateway._asked.result(60)
    assert client.get("/health/ready").status_code == 200


class SilentProxy:
    """Passes bytes on to a socket of PostgreSQL's until it is told to be silent, and takes everything."""

    def __init__(self, path: Path) -> None:
        self._path, self.is_silent = path, threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._path))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_silent.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def proxied(postgres, postgres_server):
    """A proxy before PostgreSQL, and the URL of an empty database behind it."""
    name = postgres.partition("@/")[2].partition("?")[0]
    with contextlib.closing(SilentProxy(postgres_server / ".s.PGSQL.5432")) as proxy:
        yield proxy, f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/{name}"


@pytest.mark.slow
def test_a_postgresql_behind_a_silent_network_is_given_up(proxied, monkeypatch):
    for name, seconds in (("_SECONDS_TO_ANSWER", 1.0), ("_SECONDS_TO_CONNECT", 2)):
        monkeypatch.setattr(database, name, seconds)
    database._impatient_connection.cache_clear()
    proxy, url = proxied
    with contextlib.closing(Database(url)) as store:
        key = KeyRing(store).add("a", limits=KeyLimits())[1]
        jobs = JobStore(store, owner="here")
        job = jobs.create(key, NEW)[0]
        proxy.is_silent.set()
        for ask_store in (jobs.has_queued, lambda: jobs.get(key.id, job.id)):  # a known connection, and a new one
            began = time.monotonic()
            with pytest.raises(SQLAlchemyError):
                ask_store()
            assert time.monotonic() - began < 30
        for name, seconds in (("_SECONDS_TO_ANSWER", 1000.0), ("_SECONDS_TO_CONNECT", 1000)):
            monkeypatch.setattr(database, name, seconds)
        monkeypatch.setattr(patience, "SECONDS", 0.5)
        for _ in range(2):
            began = time.monotonic()
            with patience.patient(), pytest.raises(SQLAlchemyError):  # a request, which waits for less
                jobs.get(key.id, job.id)
            assert time.monotonic() - began < 60
        proxy.is_silent.clear()
        assert jobs.get(key.id, job.id).id == job.id, "it is asked again once it answers"


@pytest.mark.slow
def test_a_gateway_whose_postgresql_is_silent_says_so_at_once(proxied, start_gateway, server, eventually):
    """Known connections are silent, new ones are taken and never answered, until after the first are given up."""
    proxy, url = proxied
    gateway = start_gateway(f"grpc://{server.grpc_url}", store=url)

    def ready() -> tuple[int, float]:
        began = time.monotonic()
        code = httpx.get(f"{gateway.url}/health/ready", timeout=300).status_code
        return code, time.monotonic() - began

    proxy.is_silent.set()
    eventually(lambda: ready()[0] == 503)
    codes, seconds = zip(*(ready() for _ in range(25)), strict=True)
    assert set(codes) == {503}
    assert min(seconds) < 2 and max(seconds) < database._SECONDS_TO_ANSWER, "none waited for the store"
    proxy.is_silent.clear()
    eventually(gateway.is_ready)


# ------------------------------------------------------------------------------------- a job that kills its server


class Deadly:
    """A server that dies of one prompt, and with it everything that it runs."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.deaths: list[set[str]] = []
        """What ran at each."""
        self.has_died = threading.Event()

    def stream(self, request: VideoRequest, *, timeout: float, traceparent: str | None) -> Generation:
        def events(_cancelled):
            self.running.add(request.prompt)
            died = self.has_died
            try:
                if request.prompt == "poison":
                    deadline = time.monotonic() + (0.5 if self.deaths else 60)
                    while len(self.running) < 4 and time.monotonic() < deadline:  # the others come, if they may
                        time.sleep(0.01)
                    self.deaths.append(set(self.running))
                    self.has_died = threading.Event()
                    died.set()
                if died.wait(60 if not self.deaths else 0.2):
                    raise ServiceError("the server died")
                yield video_of(request.prompt, b"x")
            finally:
                self.running.discard(request.prompt)

        return Generation(events)


def test_a_job_that_kills_its_server_does_so_to_others_once(gateway, new_key, eventually, monkeypatch):
    """Four jobs run together, and one of them kills; the second time each has the server for itself."""
    deadly, server = Deadly(), gateway.servers.all[0]
    server.silent_since, server.is_proven = None, True
    monkeypatch.setattr(type(server), "client", lambda *_: deadly)

    def probe(self) -> bool:
        self.silent_since, self.is_proven = None, True
        return True

    for name in ("probe", "is_responding"):
        monkeypatch.setattr(type(server), name, probe)
    _, key = new_key()
    prompts = ["poison", "a", "b", "c"]
    ids = [
        gateway.store.create(key, replace(NEW, request=VideoRequest(prompt=prompt, **SIZES)))[0].id
        for prompt in prompts
    ]
    gateway.runner.start()
    eventually(lambda: all(gateway.store.get(key.id, each).has_ended for each in ids))
    gateway.runner.drain(60)
    ended = [gateway.store.get(key.id, each) for each in ids]
    assert [job.status for job in ended] == ["failed"] + ["completed"] * 3
    assert deadly.deaths == [set(prompts), {"poison"}], "at first they ran together, the second time it was alone"
    assert ended[0].error_code == "server_failed" and all(job.attempts <= 2 for job in ended)
