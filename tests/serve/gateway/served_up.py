"""`megadit serve up` in a process of its own, and what of it lives."""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import httpx

from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.launch.local_server import Ports


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    name: str
    parent: int
    group: int


def processes() -> list[Process]:
    """All that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, values = stat.read_text().partition("(")[2].rpartition(")")
            state, parent, group = values.split()[:3]
            if state != "Z":
                found.append(Process(pid=int(stat.parent.name), name=name, parent=int(parent), group=int(group)))
    return found


def num_waiting(ports: Ports) -> int:
    """Requests that wait at Triton for text_to_video."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports.metrics}/metrics") as answer:
        told = answer.read().decode()
    return int(re.search(r'^nv_inference_pending_request_count{model="text_to_video".*} (\d+)$', told, re.MULTILINE)[1])


class Service:
    """`megadit serve up` on ports and a folder of its own."""

    def __init__(self, repository: Path, folder: Path, *, slots: int = 2) -> None:
        self.folder, self.ports, others = folder, Ports.free(), Ports.free()
        ports = self.ports
        self.port, self.url = others.http, f"http://127.0.0.1:{others.http}"
        store = folder / "jobs.sqlite"
        command = [
            sys.executable,
            "-m",
            "megadit.models.shared.cli.verbs",
            "serve",
            "up",
            str(repository),
            "--model=text_to_video",
        ]
        command += [f"--http_port={ports.http}", f"--grpc_port={ports.grpc}", f"--triton_metrics_port={ports.metrics}"]
        command += [f"--port={others.http}", "--", f"--metrics_port={others.metrics}", f"--store={store}"]
        command += [f"--results={folder / 'videos'}", "--min_free_bytes=0", f"--slots={slots}", "--result_seconds=3000"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        with contextlib.closing(Database(str(store))) as database:
            limits = KeyLimits(requests_per_minute=10**6)
            text = KeyRing(database).add("somebody", limits=limits)[0]
        self.client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {text}"},
            timeout=60,
            transport=httpx.HTTPTransport(retries=3),
        )
        self.groups: set[int] = set()
        """Of all tritonservers and gateways that were seen."""

    def children(self) -> dict[str, int]:
        """tritonserver, gateway and stub: their process ids, of those that live."""
        found = {}
        for each in processes():
            if each.parent == self.process.pid:
                found["tritonserver" if each.name == "tritonserver" else "gateway"] = each.pid
                self.groups.add(each.pid)
        for each in processes():
            if each.name.startswith("triton_python") and each.group in found.values():
                found["stub"] = each.pid
        return found

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/health/ready").status_code == 200
        return False

    def create(self, **body) -> str:
        """Asks until it is taken, as clients do while a gateway is away; the idempotency key keeps it at one."""
        key, deadline = os.urandom(8).hex(), time.monotonic() + 300
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                answer = self.client.post("/v1/videos", json=body, headers={"idempotency-key": key})
                if answer.status_code == 200:
                    return answer.json()["id"]
                assert answer.status_code == 503, answer.text
            time.sleep(0.1)
        raise AssertionError(f"no job was taken: {self.log()}")

    def status(self, video_id: str) -> str | None:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get(f"/v1/videos/{video_id}").json()["status"]
        return None

    def content(self, video_id: str) -> bytes:
        """The whole video."""
        answer = self.client.get(f"/v1/videos/{video_id}/content")
        assert answer.status_code == 200, answer.text
        assert hashlib.sha256(answer.content).hexdigest() == self.client.get(f"/v1/videos/{video_id}").json()["sha256"]
        return answer.content

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]
