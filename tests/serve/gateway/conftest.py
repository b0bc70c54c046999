import contextlib
import functools
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from megadit.models.shared.addresses import tls_context
from megadit.serve.gateway import service
from megadit.serve.gateway.http.app import create_app
from megadit.serve.gateway.http.connections import BACKLOG, Connection, Door
from megadit.serve.gateway.service import Gateway, GatewaySettings
from megadit.serve.gateway.store import patience
from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.launch.local_server import SHARED_MEMORY, Ports
from megadit.serve.service_info import Limits, ServiceInfo
from megadit.serve.supervise import responds

from .served_up import Service, processes

INFO = ServiceInfo(
    defaults={
        "negative_prompt": "",
        "guidance": 2.0,
        "num_steps": 4,
        "sampler": "euler",
        "num_frames": 5,
        "height": 16,
        "width": 24,
        "fps": 8.0,
        "eta": 0.0,
    },
    limits=Limits(max_frames=20, max_pixels=4 * 16 * 24 * 5, max_work=16 * 24 * 5 * 5000),
    samplers=("euler", "heun"),
    size_multiple=4,
)


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    """A gateway that runs nothing: what is asked of it stays in the queue. A busy machine's store is waited for."""
    monkeypatch.setattr(service, "_SECONDS_FOR_READINESS", 60.0)
    monkeypatch.setattr(patience, "SECONDS", 60.0)
    settings = GatewaySettings(
        servers=("grpc://127.0.0.1:1",),
        store=str(tmp_path / "jobs.sqlite"),
        results=str(tmp_path / "videos"),
        min_free_bytes=0,
    )
    gateway = Gateway(settings)
    gateway.servers.all[0].infos["text_to_video"] = INFO
    yield gateway
    gateway.database.close()


@pytest.fixture
def new_key(gateway):
    """Makes a key: its text, and what is kept of it."""

    def make(name: str = "somebody", **limits):
        return gateway.keys.add(name, limits=KeyLimits(**{"requests_per_minute": 10**6} | limits))

    return make


@pytest.fixture
def visit(gateway, new_key):
    """A client of the application, in this process, with a key unless it is told otherwise."""
    from starlette.testclient import TestClient

    app = create_app(gateway)

    def client(key: str | None = None, *, anonymous: bool = False) -> TestClient:
        headers = {} if anonymous else {"authorization": f"Bearer {key or new_key()[0]}"}
        return TestClient(app, headers=headers, raise_server_exceptions=False)

    return client


@pytest.fixture
def listen(gateway):
    """listen(most): the gateway behind a real web server that keeps so many connections; gives its port."""
    running = []

    def start(most: int) -> int:
        config = uvicorn.Config(
            create_app(gateway),
            http=functools.partial(Connection, door=Door(most)),
            ws="none",
            lifespan="off",
            log_config=None,
            backlog=BACKLOG,
        )
        server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.append((server, thread))
        return listening.getsockname()[1]

    yield start
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture
def url(listen):
    """Where the gateway listens, in a thread of this process."""
    return f"http://127.0.0.1:{listen(1000)}"


@pytest.fixture(scope="session")
def postgres_server():
    """The folder of a PostgreSQL of our own, which listens on a socket in it alone."""
    debian = sorted(str(path) for path in Path("/usr/lib/postgresql").glob("*/bin"))
    path = os.pathsep.join([os.environ["PATH"], *debian])
    programs = {name: shutil.which(name, path=path) for name in ("initdb", "pg_ctl")}
    if None in programs.values() or importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL (initdb and pg_ctl; Debian's package postgresql) or no psycopg (megadit[postgres])")
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # not pytest's: its path is too long for a socket, and ours alone
    user = None
    if os.getuid() == 0:  # which PostgreSQL refuses
        user = "nobody"
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout

    data = str(folder / "data")
    run(programs["initdb"], "-D", data, "-U", "postgres", "-A", "trust", "--no-sync")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    run(programs["pg_ctl"], "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "-t", "300", "start")
    yield folder
    run(programs["pg_ctl"], "-D", data, "-m", "immediate", "stop")
    shutil.rmtree(folder)


@pytest.fixture
def postgres(postgres_server):
    """The URL of an empty database."""
    import psycopg

    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(f"user=postgres dbname=postgres host={postgres_server}", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg://postgres@/{name}?host={postgres_server}"


@dataclass(kw_only=True)
class RunningGateway:
    """A gateway in a process of its own."""

    process: subprocess.Popen
    folder: Path
    store: str
    log: Path
    port: int
    metrics_port: int
    command: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None, **limits) -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.new_key(**limits)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, verify=tls_context())

    def new_key(self, *, webhook_url: str | None = None, **limits) -> str:
        with contextlib.closing(Database(self.store)) as database:
            limits = KeyLimits(**{"requests_per_minute": 10**6, "max_active": 1000} | limits)
            return KeyRing(database).add("somebody", limits=limits, webhook_url=webhook_url)[0]

    def is_ready(self) -> bool:
        return responds(f"{self.url}/health/ready")

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60, verify=tls_context()).text

    def restart(self) -> "RunningGateway":
        with self.log.open("ab") as log:
            return replace(self, process=subprocess.Popen(self.command, stdout=log, stderr=log))


@pytest.fixture
def start_gateway(tmp_path):
    """Starts gateways in front of Triton servers; all are killed in the end."""
    started: list[subprocess.Popen] = []

    def start(
        *servers: str,
        folder: Path = tmp_path,
        store: str | None = None,
        log: Path = tmp_path / "log",
        arguments: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> RunningGateway:
        ports, store = Ports.free(), store or str(folder / "jobs.sqlite")
        command = [sys.executable, "-m", "megadit.models.shared.cli.verbs"]
        command += ["serve", "gateway"]
        command += [f"--server={server}" for server in servers]
        command += [f"--port={ports.http}", f"--metrics_port={ports.metrics}", f"--store={store}"]
        command += [f"--results={folder / 'videos'}", "--min_free_bytes=0", *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen([*prefix, *command], stdout=output, stderr=output)
        started.append(process)
        gateway = RunningGateway(
            process=process,
            folder=folder,
            store=store,
            log=log,
            port=ports.http,
            metrics_port=ports.metrics,
            command=command,
        )
        wait_for(gateway.is_ready, lambda: process.poll() is None, log.read_text)
        return gateway

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition, may_go_on=lambda: True, report=lambda: "", *, seconds: float = 300) -> None:
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        assert may_go_on() and time.monotonic() < deadline, f"did not happen: {report()}"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)


@pytest.fixture
def eventually():
    """Waits for a state, for as long as it takes on a slow machine."""
    return wait_for


@pytest.fixture
def serve_up(tritonserver, tmp_path, eventually):
    """serve_up(repository): a service that is ready; it ends with the test and leaves nothing behind."""
    services: list[Service] = []

    def start(repository: Path, **settings) -> Service:
        services.append(service := Service(repository, tmp_path, **settings))
        eventually(service.is_ready, lambda: service.process.poll() is None, service.log)
        return service

    try:
        yield start
        for service in services:
            service.children()
            service.process.terminate()
            assert service.process.wait(timeout=120) == 0
            assert not [each for each in processes() if each.group in service.groups], "no orphan is left"
            assert not list(SHARED_MEMORY.glob(f"megadit_{service.process.pid}_*")), "no shared memory is left"
    finally:
        for service in services:
            if service.process.poll() is None:
                service.process.kill()
            for group in service.groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            service.process.wait()
