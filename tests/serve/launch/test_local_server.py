"""A tritonserver's life: whatever happens to it, no process, port or shared memory is left behind."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import pytest

from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import ServiceError
from megadit.serve.launch import local_server, run, triton_binary, up
from megadit.serve.launch.local_server import (
    SECRET_HEADER,
    SHARED_MEMORY,
    LocalServer,
    Ports,
    check_repository,
    secret_in,
)
from megadit.serve.launch.run import docker_command


def processes_of(group: int) -> list[int]:
    """Processes of a group that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def leftovers(server: LocalServer) -> dict:
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    regions = [path.name for place in places for path in place.glob(f"{server._prefix}*")]
    server.ports.check_free("127.0.0.1")
    return {"processes": processes_of(server.process.pid), "shared memory": regions}


NOTHING = {"processes": [], "shared memory": []}


def wait_for(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


@pytest.mark.parametrize("verb", ["run", "up"])
def test_models_that_cannot_fit_are_refused(verb, tmp_path, capsys, monkeypatch):
    """Of a file with a hole no block is on the disk."""
    for name, size in {"small": 1000, "large": 1 << 43}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        config = 'instance_group [ { count: 2 } ]\nparameters { key: "runtime" value { string_value: "torch" } }\n'
        (tmp_path / name / "config.pbtxt").write_text(config)
        with (tmp_path / name / "1" / "model.safetensors").open("wb") as file:
            file.truncate(size)
    monkeypatch.setattr(local_server, "NVIDIA", tmp_path / "none")
    module = {"run": run, "up": up}[verb]
    monkeypatch.setattr(module, "LocalServer", lambda *_, **__: sys.exit("all is checked"))
    assert module.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"what {tmp_path} serves needs about 16,000 GiB of memory" in error
    for more in (["--even_if_too_large"], ["--model", "small"]):
        with pytest.raises(SystemExit, match="all is checked"):
            module.main([str(tmp_path), *more])


@pytest.mark.parametrize("module", [run, up])
def test_a_secret_that_other_people_would_see_is_refused(tmp_path, monkeypatch, capsys, module):
    (tmp_path / "text_to_video").mkdir()
    (tmp_path / "text_to_video" / "config.pbtxt").touch()
    monkeypatch.setattr(module, "LocalServer", lambda *_, **__: sys.exit("all is checked"))
    asked = [str(tmp_path), "--control_secret", str(tmp_path / "secret")]
    with pytest.raises(SystemExit, match="all is checked"):
        module.main(asked)
    monkeypatch.setattr(local_server, "_PEOPLE", range(1 << 32))
    monkeypatch.setattr(local_server.os, "getuid", lambda: -1)
    assert module.main(asked) == 2 and "could read the secret" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="all is checked"):
        module.main([*asked, "--even_if_others_see_it"])


SECRET = "0123456789abcdef" * 2


def control(server: LocalServer, action: str, model: str) -> int:
    url = f"http://{server.http_url}/v2/repository/models/{model}/{action}"
    return httpx.post(url, json={}, headers={SECRET_HEADER: SECRET}, timeout=60).status_code


@pytest.mark.slow
def test_start_load_unload_reload_crash_stop_leave_nothing(tritonserver, repository, tmp_path, request):
    before = set(os.listdir(SHARED_MEMORY))
    for cycle in range(request.config.getoption("--cases") or 1):
        started = {"models": ("text_to_image",), "control_secret": SECRET, "log": tmp_path / f"{cycle}.log"}
        started["stop_seconds"] = 5
        with LocalServer(repository, **started) as server:
            client = VideoClient(f"grpc://{server.grpc_url}")
            assert not client.is_ready()
            for action in ("load", "unload", "load", "load"):
                assert control(server, action, "text_to_video") == 200
            assert len(client.generate(VideoRequest(prompt="a"))) == 1
            generation = client.stream(VideoRequest(prompt="a", num_steps=2500), timeout=30)
            next(iter(generation))
            stubs = [pid for pid in processes_of(server.process.pid) if pid != server.process.pid]
            assert stubs
            for pid in stubs:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(ServiceError):
                list(generation)
        assert leftovers(server) == NOTHING
    regions = set(os.listdir(SHARED_MEMORY)) - before
    assert not {name for name in regions if name.startswith(("triton", server._prefix))}, "of this server"


@pytest.mark.slow
def test_a_server_whose_owner_is_killed_goes_too(tritonserver, repository, tmp_path):
    program = f"""
import time
from pathlib import Path
from megadit.serve.launch.local_server import LocalServer
with LocalServer({str(repository)!r}, log=Path({str(tmp_path / "log")!r}), stop_seconds=5) as server:
    print(server.process.pid, server._prefix, flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    group, prefix = owner.stdout.readline().split()
    assert processes_of(int(group))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not processes_of(int(group)))
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


@pytest.mark.slow
def test_the_command_restarts_what_dies_and_ends_when_told(tritonserver, repository, tmp_path):
    ports = Ports.free()
    command = [
        sys.executable,
        "-m",
        "megadit.models.shared.cli.verbs",
        "serve",
        "run",
        str(repository),
        "--model",
        "text_to_image",
    ]
    command += [f"--{name}_port={getattr(ports, name)}" for name in ("http", "grpc", "metrics")]
    with (tmp_path / "out").open("w") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out)

    def is_ready() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{ports.http}/v2/health/ready", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    try:
        # until the command has seen it too: a server that ends before is one that cannot start
        wait_for(lambda: "is ready" in (tmp_path / "out").read_text() and is_ready())
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        wait_for(lambda: not is_ready())
        wait_for(is_ready)
        assert "starting it again in 1 s" in (tmp_path / "out").read_text()
        second = int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0])
    finally:
        running.terminate()
        code = running.wait(timeout=60)
    assert code == 0
    assert not processes_of(int(children[0])) and not processes_of(second)
    ports.check_free("127.0.0.1")


def test_a_taken_port_is_told(tritonserver, repository):
    """Before Triton is looked for, and again where it was taken since."""
    ports = Ports.free()
    prepared = LocalServer(repository, ports=ports)
    with socket.create_server(("127.0.0.1", ports.http)):
        for begin in (prepared.__enter__, lambda: LocalServer(repository, ports=ports)):
            with pytest.raises(UserError, match="cannot be used: .*; --http_port takes another"):
                begin()


def test_a_model_that_cannot_be_loaded_is_told_with_its_reason(tritonserver, repository, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken, ignore=shutil.ignore_patterns("text_to_image"))
    (broken / "text_to_video" / "1" / "bundle" / "megadit.json").unlink()
    server = LocalServer(broken, log=tmp_path / "log")
    with pytest.raises(UserError, match=r"ended with code 1: .*megadit\.json"), server:
        pass
    assert leftovers(server) == NOTHING


def test_an_unknown_field_is_refused_by_triton_s_own_parser(tritonserver, repository, tmp_path):
    """The negative control of every other test here, which show that the generated file is accepted."""
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken, ignore=shutil.ignore_patterns("text_to_image"))
    config = broken / "text_to_video" / "config.pbtxt"
    config.write_text(config.read_text() + "no_such_field: 1\n")
    with pytest.raises(UserError, match="failed to read text proto"), LocalServer(broken, log=tmp_path / "log"):
        pass


def test_without_a_repository_it_says_so(tmp_path, capsys):
    assert verbs.main(["serve", "run", str(tmp_path / "nothing")]) == 2
    assert "build-repository" in capsys.readouterr().err


def test_without_any_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(triton_binary.shutil, "which", lambda _: None)
    monkeypatch.setattr(triton_binary.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install --no-deps nvidia-pytriton"):
        triton_binary.find_triton()


def test_the_vendor_s_server_comes_first(monkeypatch):
    monkeypatch.setattr(triton_binary.shutil, "which", lambda _: "/opt/tritonserver/bin/tritonserver")
    found = triton_binary.find_triton()
    assert found.path == Path("/opt/tritonserver/bin/tritonserver") and not found.arguments


def test_without_a_network_it_says_how_to_bring_numpy(tritonserver, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if shutil.which("tritonserver"):
        pytest.skip("the vendor's server needs no environment of its own")
    with pytest.raises(UserError, match="PIP_FIND_LINKS"):
        triton_binary.find_triton()
    left = [path for path in (tmp_path / "megadit").iterdir() if path.suffix != ".lock"]
    assert not left, "nothing half made is kept"


def test_the_docker_command_is_what_production_needs(repository, capsys):
    assert verbs.main(["serve", "run", str(repository), "--docker", "print", "--http_port", "9000"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command == docker_command(repository, Ports(http=9000))
    assert {"--shm-size=1g", "127.0.0.1:9000:8000", f"{repository}:/models:ro"} <= set(command)
    assert command[-6:] == ["megadit", "serve", "run", "/models", "--host", "0.0.0.0"]
    assert "0.0.0.0:8001:8001" in docker_command(repository, Ports(), host="0.0.0.0"), "as it was asked to"
    assert "--gpus" not in docker_command(repository, Ports(), gpus="none")


def test_a_model_that_is_not_there_is_told(tritonserver, repository):
    with pytest.raises(UserError, match="has no model 'text_to_song', only text_to_image, text_to_video"):
        LocalServer(repository, models=("text_to_song",))


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "secret"
    first = secret_in(path)
    assert len(first) == 64 and secret_in(path) == first and path.stat().st_mode & 0o777 == 0o600
    path.write_text("short")
    for bad in (path, tmp_path / "no" / "such" / "folder", tmp_path):
        with pytest.raises(UserError):
            secret_in(bad)


def test_what_is_no_repository_is_told_with_what_to_do(bundle_dir, tmp_path):
    for path, said in ((bundle_dir, "is a bundle; .*build-repository"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(UserError, match=said):
            check_repository(path)
    with pytest.raises(UserError, match="is not a model repository"):
        check_repository(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").touch()
    check_repository(tmp_path)
