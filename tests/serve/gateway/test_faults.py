"""Everything is killed, stopped or filled up while jobs run, and nobody helps: `megadit serve up`, real processes."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from .served_up import num_waiting

VIDEO = {"prompt": "a", "num_steps": 2}
RUNNING = {"prompt": "a", "num_steps": 400}


@pytest.fixture
def service(serve_up, repository):
    return serve_up(repository)


FAULTS = {
    "kill -9 of the Python stub": ("stub", signal.SIGKILL),
    "kill -9 of tritonserver": ("tritonserver", signal.SIGKILL),
    "kill -9 of the gateway": ("gateway", signal.SIGKILL),
    "SIGSTOP of tritonserver": ("tritonserver", signal.SIGSTOP),
    "SIGSTOP of the gateway": ("gateway", signal.SIGSTOP),
    "SIGSTOP of the Python stub": ("stub", signal.SIGSTOP),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_whatever_dies_or_hangs_is_replaced_and_no_job_is_lost(service, eventually, request):
    names = list(FAULTS)[: request.config.getoption("--cases") or 4]
    done = service.create(**VIDEO)
    eventually(lambda: service.status(done) == "completed", report=service.log)
    data = service.content(done)
    for name in names:
        victim, number = FAULTS[name]
        running = [service.create(**RUNNING, seed=seed) for seed in range(2)]
        waiting = [service.create(**VIDEO, seed=seed) for seed in range(2)]
        eventually(lambda running=running: {"in_progress", "completed"} & {*map(service.status, running)})
        os.kill(service.children()[victim], number)
        began = time.monotonic()
        after = service.create(**VIDEO, seed=9, priority=1)
        eventually(lambda after=after: service.status(after) in ("completed", "failed"), report=service.log)
        print(f"{name}: a new job is done after {time.monotonic() - began:.1f} s")
        for video_id in [after, *running, *waiting]:
            eventually(
                lambda video_id=video_id: service.status(video_id) in ("completed", "failed"), report=service.log
            )
            video = service.client.get(f"/v1/videos/{video_id}").json()
            if video["status"] == "failed":  # it was interrupted twice: a machine under load may look hung again
                assert video_id in running and video["error"]["code"] == "server_failed", video
            else:
                assert service.content(video_id)
        assert service.content(done) == data, "what was finished is still there"
    files = sorted(file.name.partition(".")[0] for file in (service.folder / "videos").glob("[!.]*"))
    videos = service.client.get("/v1/videos", params={"limit": 100}).json()["data"]
    completed = [video["id"] for video in videos if video["status"] == "completed"]
    assert files == sorted(completed), "neither half a file nor one of nobody"


POISONED = '''"""Dies of one prompt, and writes down whom it takes along."""

import json
import os
import signal
from pathlib import Path

from megadit.serve.backend import engine
from megadit.serve.backend.triton_model import TritonPythonModel

_end_unwanted = engine._end_unwanted


def deadly(rows, clock):
    prompts = sorted(row.owner.request.prompt for row in rows)
    if "poison" in prompts:
        with (Path(__file__).parent / "deaths").open("a") as file:
            file.write(f"{json.dumps(prompts)}\\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    _end_unwanted(rows, clock)


engine._end_unwanted = deadly
__all__ = ["TritonPythonModel"]
'''


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_prompt_that_kills_its_triton_fails_alone(serve_up, repository, tmp_path, eventually):
    """A batch of four in a real tritonserver, one of which ends the process that computes it."""
    models = tmp_path / "models"
    shutil.copytree(repository, models, ignore=shutil.ignore_patterns("text_to_image"))
    model = models / "text_to_video" / "1" / "model.py"
    model.write_text(POISONED)
    service = serve_up(models, slots=8)
    blocker = service.create(prompt="long", num_steps=5000)
    eventually(lambda: service.status(blocker) == "in_progress", report=service.log)
    ids = {prompt: service.create(prompt=prompt, num_steps=4) for prompt in ("a", "b", "c", "poison")}
    eventually(lambda: num_waiting(service.ports) == 4, report=service.log)  # one batch, for Triton
    service.client.delete(f"/v1/videos/{blocker}")
    for video_id in ids.values():
        eventually(lambda video_id=video_id: service.status(video_id) in ("completed", "failed"), report=service.log)
    deaths = [json.loads(line) for line in (model.parent / "deaths").read_text().splitlines()]
    assert deaths == [["a", "b", "c", "poison"], ["poison"]], "the second time it was alone"
    assert service.client.get(f"/v1/videos/{ids.pop('poison')}").json()["error"]["code"] == "server_failed"
    assert all(service.content(video_id) for video_id in ids.values()), "the others were made"
    after = service.create(**VIDEO)
    eventually(lambda: service.status(after) == "completed", report=service.log)


@pytest.fixture
def triton(server):
    return f"grpc://{server.grpc_url}"


@pytest.mark.slow
def test_clients_that_vanish_or_read_slowly_hold_nothing_up(start_gateway, triton, eventually):
    gateway = start_gateway(triton)
    client = gateway.client()

    def create(**body) -> str:
        return client.post("/v1/videos", json=body).json()["id"]

    def finish(video_id: str) -> None:
        eventually(lambda: client.get(f"/v1/videos/{video_id}").json()["status"] == "completed")

    first = create(**VIDEO)
    finish(first)
    slow = []
    for path in [f"/v1/videos/{first}/content", f"/v1/videos/{first}/events"] * 20:
        connection = socket.create_connection(("127.0.0.1", gateway.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.headers['authorization']}\r\n\r\n"
        connection.sendall(request.encode())
        slow.append(connection)
    half = socket.create_connection(("127.0.0.1", gateway.port))
    half.sendall(b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n")
    long = create(**RUNNING)
    with client.stream("GET", f"/v1/videos/{long}/events") as answer:
        next(answer.iter_lines())  # and is gone
    began = time.monotonic()
    finish(create(**VIDEO))
    print(f"41 clients that do not read, one that is gone: a new job is done after {time.monotonic() - began:.1f} s")
    finish(long)
    for connection in [*slow, half]:
        connection.close()
    eventually(lambda: "megadit_open_streams 0.0" in gateway.metrics())


CLOCK = """
import os, sys, time
_real, _file = time.time, os.environ["MEGADIT_TEST_CLOCK"]
def _moved():
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("megadit"):
        return _real()
    with open(_file) as file:
        return _real() + float(file.read() or 0)
time.time = _moved
"""


@pytest.mark.slow
def test_a_wall_clock_that_jumps_changes_nothing(start_gateway, triton, eventually, tmp_path, monkeypatch):
    """The wall clock that our code sees jumps by years while jobs wait, run and are kept.

    Not gRPC's, whose Python part asks for the time that its C part then compares with the machine's clock.
    """
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "offset").write_text("0")
    monkeypatch.setenv("MEGADIT_TEST_CLOCK", str(tmp_path / "offset"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    gateway = start_gateway(triton, arguments=("--slots=1", "--result_seconds=3600"))
    client = gateway.client()

    def create(**body) -> str:
        return client.post("/v1/videos", json=body).json()["id"]

    def status(video_id: str) -> str:
        return client.get(f"/v1/videos/{video_id}").json()["status"]

    done = create(**VIDEO)
    eventually(lambda: status(done) == "completed")
    created = client.get(f"/v1/videos/{done}").json()["created_at"]
    for years in (5, -5, 0):
        jobs = [create(**RUNNING), create(**VIDEO)]
        eventually(lambda jobs=jobs: status(jobs[0]) != "queued")
        (tmp_path / "offset").write_text(str(years * 3.15e7))
        began = time.monotonic()
        for video_id in jobs:
            eventually(lambda video_id=video_id: status(video_id) == "completed")
        print(f"clock at {years} years: what ran and what waited is done after {time.monotonic() - began:.1f} s")
        assert client.get(f"/v1/videos/{done}/content").status_code == 200
    (tmp_path / "offset").write_text(str(5 * 3.15e7))
    later = create(**VIDEO)
    assert client.get(f"/v1/videos/{later}").json()["created_at"] - created > 1e8, "the clock did jump"


def can_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_full_disk_ends_jobs_honestly_and_passes(triton, start_gateway, eventually, tmp_path, monkeypatch):
    """Store and results on a disk of 12 MB of their own, which is filled to the last byte while jobs run."""
    if not can_mount():
        pytest.skip("a disk of its own needs the right to mount one")
    disk = tmp_path / "disk"
    disk.mkdir()
    prepare = 'mount -t tmpfs -o size=12m tmpfs "$0" && $KEYS --store="$0/jobs.sqlite" > "$0.key" && exec "$@"'
    monkeypatch.setenv(
        "KEYS", f"{sys.executable} -m megadit.models.shared.cli.verbs serve keys add a --requests_per_minute=1000000"
    )
    mount = ("unshare", "-rm", "sh", "-c", prepare, str(disk))
    gateway = start_gateway(triton, folder=disk, log=tmp_path / "log", prefix=mount)
    inside = Path(f"/proc/{gateway.process.pid}/root{disk}")
    key = (tmp_path / "disk.key").read_text().strip()
    client = httpx.Client(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def create(**body) -> httpx.Response:
        return client.post("/v1/videos", json=VIDEO | body)

    def status(video_id: str) -> str:
        return client.get(f"/v1/videos/{video_id}").json()["status"]

    done = create().json()["id"]
    eventually(lambda: status(done) == "completed")
    running = create(**RUNNING).json()["id"]
    eventually(lambda: status(running) != "queued")
    with (inside / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while filling.write(b"x" * 4096):
            pass
    assert client.get(f"/v1/videos/{done}/content").status_code == 200, "what is finished is still served"
    responds = [create() for _ in range(20)]
    assert 503 in {answer.status_code for answer in responds}, "the store is full"
    assert {answer.status_code for answer in responds} <= {200, 503}
    assert client.get("/health/live").status_code == 200
    (inside / "filling").unlink()
    began = time.monotonic()
    jobs = [running, *(answer.json()["id"] for answer in responds if answer.status_code == 200), create().json()["id"]]
    for video_id in jobs:
        eventually(lambda video_id=video_id: status(video_id) in ("completed", "failed"))
        video = client.get(f"/v1/videos/{video_id}").json()
        assert video["status"] == "completed" or video["error"]["code"] == "storage_failed", video
    assert status(jobs[-1]) == "completed"
    print(f"a disk that was full: {len(jobs)} jobs, a new one among them, ended {time.monotonic() - began:.1f} s after")
    stored = {file.name.partition(".")[0] for file in (inside / "videos").glob("*.mp4")}
    assert stored == {done, *(video_id for video_id in jobs if status(video_id) == "completed")}
