"""docs/deploy.md: its services run as they stand there, on free ports, with the real tritonserver, gateway and page."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from megadit.infer.media.video_io import read_video
from megadit.serve.launch.local_server import Ports
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from tests.documents import ROOT, Block, blocks

SECONDS_TO_START = 180


def services() -> list[Block]:
    """The blocks of the page that need a service and nothing else."""
    return [block for block in blocks(ROOT / "docs" / "deploy.md") if block.needs == ("service",)]


class Terminals:
    """Lines of a shell, some of which stay while others are typed."""

    def __init__(self) -> None:
        self._triton, self._others = Ports.free(), Ports.free()
        self._stays: list[subprocess.Popen] = []
        triton, others, grpc = self._triton, self._others, f"grpc://127.0.0.1:{self._triton.grpc}"
        ports = f"--http_port={triton.http} --grpc_port={triton.grpc}"
        self.gateway, self.page = f"http://127.0.0.1:{others.http}", f"http://127.0.0.1:{others.grpc}"
        self._here = {
            "megadit serve run models": f"megadit serve run models {ports} --metrics_port={triton.metrics}",
            "megadit serve up models": f"megadit serve up models {ports} --triton_metrics_port={triton.metrics} "
            f"--port={others.http} -- --metrics_port={others.metrics} --min_free_bytes=0",
            "megadit serve ask": f"megadit serve ask --url {grpc}",
            "megadit serve demo": f"megadit serve demo --url {grpc} --port {others.grpc}",
            "http://127.0.0.1:8080": self.gateway,
        }
        """What the page says -> the same on ports that are free."""
        self._ready = {
            "megadit serve run": f"http://127.0.0.1:{triton.http}/v2/health/ready",
            "megadit serve up": f"{self.gateway}/health/ready",
            "megadit serve demo": self.page,
        }
        """What stays -> where it answers once it is there."""

    def type(self, line: str) -> str:
        """What a line says; of one that stays, nothing, once it answers."""
        here = line
        for said, run in self._here.items():
            here = here.replace(said, run)
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        address = next((url for start, url in self._ready.items() if line.startswith(start)), None)
        if address is None:
            done = subprocess.run(["bash", "-c", here], env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{here}\n{done.stdout}{done.stderr}"
            return done.stdout
        log = Path(f"{len(self._stays)}.log")
        with log.open("w") as file:
            self._stays.append(
                subprocess.Popen(["bash", "-c", f"exec {here}"], env=environment, stdout=file, stderr=file)
            )
        wait_until(lambda: httpx.get(address, timeout=5).status_code == 200, self._stays[-1], log)
        return ""

    def __enter__(self) -> "Terminals":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._stays):
            process.terminate()
            process.wait(300)


def wait_until(is_so, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if is_so():
                return
        time.sleep(0.2)
    raise AssertionError(f"not there after {SECONDS_TO_START} s: {log.read_text()[-3000:]}")


@pytest.fixture
def models(tritonserver, bundle_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_repository(bundle_dir, "models", scheduling=Scheduling(device="cpu"))


@pytest.mark.slow
def test_the_service_on_this_machine(models):
    (block, _) = services()
    with Terminals() as terminals:
        for line in block.text.splitlines():
            terminals.type(line)
        assert read_video("seven.mp4")[0].shape == (5, 16, 24, 3)
        assert "gradio" in httpx.get(terminals.page).text


@pytest.mark.slow
def test_the_service_for_others(models):
    (_, block) = services()
    with Terminals() as terminals:
        *_, answer = [terminals.type(line) for line in block.text.splitlines()]
        headers = {"authorization": f"Bearer {Path('alice.key').read_text().strip()}"}
        video = f"{terminals.gateway}/v1/videos/{json.loads(answer)['id']}"
        deadline = time.monotonic() + SECONDS_TO_START
        while httpx.get(video, headers=headers).json()["status"] != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        Path("made.mp4").write_bytes(httpx.get(f"{video}/content", headers=headers).content)
        assert read_video("made.mp4")[0].shape == (5, 16, 24, 3)
