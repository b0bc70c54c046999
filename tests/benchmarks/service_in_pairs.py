"""The video API of two trees beside each other: a gateway before a tritonserver of each, asked in turn.

    git worktree add /tmp/old 82933d8
    python tests/benchmarks/service_in_pairs.py /tmp/old

Both serve one bundle that both can open, on their own code and nothing else of it: no adapters, no traces, a thread for
each process. Sixteen clients, each with a key, ask for videos of four shapes. Processor time counts all processes of a
service, and is what other work on the machine changes least.
"""

import contextlib
import hashlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import cache_folder
from megadit.serve.launch.local_server import Ports

ROOT = Path(__file__).parents[2]
SHAPES = [{}, {"num_frames": 1}, {"size": "8x8"}, {"num_steps": 2, "guidance": 1.0}]
_SECONDS_TO_START = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class PairOptions:
    tree: Path = setting(help="the other tree of this project", positional=True, metavar="OLD_TREE")
    bundle: Path | None = setting(None, "of a video model (default: a tiny one that 0.1.0 wrote)", metavar="BUNDLE")
    pairs: int = setting(3, "(default: {default})", low=1, metavar="N")
    requests: int = setting(200, "of each measurement (default: {default})", low=16, metavar="N")
    clients: int = setting(16, "that ask at once (default: {default})", low=1, metavar="N")


class Figures(NamedTuple):
    """Of one measurement."""

    videos_a_second: float
    p50: float
    """Seconds until a client holds its video."""
    p95: float
    processor_ms: float
    """Of all processes of the service, for a video."""
    mebibytes: float
    """That these hold in the end."""


class Service(NamedTuple):
    """A gateway and a tritonserver of a tree, and clients of them."""

    process: psutil.Process
    clients: list[httpx.Client]

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def measure(self, count: int) -> Figures:
        """Of `count` videos, shared among the clients."""
        bodies = [{"prompt": f"number {n}", "seed": n} | SHAPES[n % len(SHAPES)] for n in range(count)]
        spent, began = self._processor_seconds(), time.monotonic()
        with ThreadPoolExecutor(len(self.clients)) as threads:
            latencies = sorted(threads.map(_make, itertools.cycle(self.clients), bodies))
        seconds = time.monotonic() - began
        return Figures(
            videos_a_second=count / seconds,
            p50=latencies[count // 2],
            p95=latencies[int(count * 0.95)],
            processor_ms=1000 * (self._processor_seconds() - spent) / count,
            mebibytes=sum(each.memory_info().rss for each in self.processes()) / 2**20,
        )

    def _processor_seconds(self) -> float:
        return sum(sum(each.cpu_times()[:4]) for each in self.processes())


def _make(client: httpx.Client, body: dict) -> float:
    """Seconds until the client holds the video."""
    began = time.monotonic()
    video = client.post("/v1/videos", json=body).raise_for_status().json()
    while video["status"] not in ("completed", "failed"):
        time.sleep(0.1)
        video = client.get(f"/v1/videos/{video['id']}").raise_for_status().json()
    client.get(f"/v1/videos/{video['id']}/content").raise_for_status()
    return time.monotonic() - began


def _program(tree: Path) -> tuple[list[str], dict[str, str]]:
    """The `megadit` of a tree: the beginning of its commands, and their environment.

    A folder in which `megadit` is the tree stands first among those of packages, and is kept: Triton's interpreter is
    prepared once for it.
    """
    module, _, function = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"][
        "megadit"
    ].partition(":")
    folder = cache_folder() / "trees" / hashlib.sha256(str(tree).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "megadit").is_symlink():
        (folder / "megadit").symlink_to(tree)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-c", f"from {module} import {function}; raise SystemExit({function}())"], environment


@contextlib.contextmanager
def serving(tree: Path, bundle: Path, folder: Path, num_clients: int) -> Iterator[Service]:
    """A service of a tree on a bundle, as long as the context lasts."""
    program, environment = _program(tree)
    folder.mkdir()

    def run(*words: object) -> str:
        done = subprocess.run([*program, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{tree}: megadit {words[0]} {words[1]} failed: {done.stderr.strip()}")
        return done.stdout

    run("serve", "build-repository", bundle, "models", "--device", "cpu")
    store, ports, triton = folder / "jobs.sqlite", Ports.free(), Ports.free()
    limits = ("--requests_per_minute", 10**6, "--max_active", 1000)
    keys = [
        run("serve", "keys", "add", f"client{n}", "--store", store, *limits).split()[-1] for n in range(num_clients)
    ]
    words = [
        "serve",
        "up",
        "models",
        f"--port={ports.http}",
        f"--http_port={triton.http}",
        f"--grpc_port={triton.grpc}",
    ]
    words += [f"--triton_metrics_port={triton.metrics}", "--", f"--metrics_port={ports.metrics}", f"--store={store}"]
    words += [f"--results={folder / 'videos'}", "--min_free_bytes=0"]
    url = f"http://127.0.0.1:{ports.http}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*program, *words], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_ready(url, process, folder / "log")
        clients = [httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300) for key in keys]
        yield Service(psutil.Process(process.pid), clients)
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=10).status_code == 200:
                return
        time.sleep(0.2)
    raise UserError(f"the service did not start: {log.read_text()[-2000:]}")


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> None:
    prog = "python tests/benchmarks/service_in_pairs.py"
    options = read_options(PairOptions, argv, prog=prog, description=__doc__.partition("\n")[0])
    trees = {"there": options.tree.resolve(), "here": ROOT}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bundle = options.bundle.resolve() if options.bundle else _bundle_of_format_1(folder)
        services = {
            name: stack.enter_context(serving(tree, bundle, folder / name, options.clients))
            for name, tree in trees.items()
        }
        for service in services.values():
            service.measure(options.requests)  # the first ones are slower
        found: dict[str, list[Figures]] = {name: [] for name in services}
        for pair in range(options.pairs):
            for name in sorted(services, reverse=bool(pair % 2)):
                found[name].append(services[name].measure(options.requests))
                print(name, found[name][-1], file=sys.stderr)
    _tell(found)


def _bundle_of_format_1(folder: Path) -> Path:
    zipfile.ZipFile(ROOT / "tests" / "serve" / "bundle_of_format_1.zip").extractall(folder)
    return folder / "bundle"


def _tell(found: dict[str, list[Figures]]) -> None:
    """Prints medians, and the median of the ratios within pairs."""
    titles = ("videos/s", "p50, s", "p95, s", "processor time of a video, ms", "memory, MiB")
    print("| median of pairs | there | here | here / there |\n|---|---|---|---|")
    for title, there, here in zip(titles, *(zip(*found[name], strict=True) for name in ("there", "here")), strict=True):
        ratio = statistics.median(ours / theirs for ours, theirs in zip(here, there, strict=True))
        print(f"| {title} | {statistics.median(there):.3g} | {statistics.median(here):.3g} | {ratio:.3f} |")


if __name__ == "__main__":
    raise SystemExit(main())
