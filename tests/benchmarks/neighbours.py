"""What a neighbour of a hostile key gets from the gateway: answers, videos, and no restart.

    python tests/benchmarks/neighbours.py runs/demo/bundle [--attack forms --attack images] [--seconds 10]

`megadit serve up` runs on this machine, with two keys. One sends what the attack is; the other asks how far its videos
are, again and again, and has some made. All of it stays on the loopback interface. Exit code 1: a neighbour waited for
more than 250 ms in 5 % of his requests or 2 s in one, lost a job, or the gateway was started again.
"""

import asyncio
import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from PIL import Image

from megadit.models.bundle import open_bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import write_adapter
from megadit.models.lora.adapters import chosen_targets
from megadit.models.shared.addresses import free_ports
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling

_MOST_P95, _MOST = 0.25, 2.0
"""Seconds that a neighbour waits."""
_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"
_MIB = 1 << 20
_NUM_ADAPTERS, _RANKS = 16, (16, 512)
"""Of which a request takes four of one rank: a usual one, and the highest that a service takes."""


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourOptions:
    bundle: str = setting(positional=True, metavar="BUNDLE")
    attack: tuple[str, ...] = setting((), "name in the table below (default: all); may be repeated", repeated=True)
    seconds: float = setting(10.0, "duration of each attack (default: {default})", above=0, metavar="S")
    requests_per_minute: int = setting(
        KeyLimits().requests_per_minute, "limit of each attacking key (default: {default}, that of any key)", low=1
    )
    jobs: int = setting(6, "videos of the neighbour during each (default: {default})", low=1, metavar="N")


# ------------------------------------------------------------------------------------------------------ attacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    connections: int
    payloads: Callable[[str], list[bytes]] = field(default=lambda key: [])
    """Of a key: what each connection sends, one after the other in turn."""
    pause: float = 0.0
    """Seconds between the bytes of a payload; 0 sends all at once."""
    num_keys: int = 1
    """That attack together."""
    reads: bool = True
    """Whether an answer is waited for before the connection is closed and the next one opened."""


def _post(key: str, kind: str, body: bytes, path: str = "/v1/videos") -> bytes:
    return _head(key, f"POST {path}", kind, f"Content-Length: {len(body)}") + body


def _head(key: str, line: str, kind: str = _JSON, *more: str) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Type: {kind}", *more]
    return ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode()


def _forms(key: str) -> list[bytes]:
    return [_post(key, _FORM, b"&" * _MIB), _post(key, _FORM, b"a=%41&" * (_MIB // 6))]


def _images(key: str) -> list[bytes]:
    """A png of 5,792 x 5,792 pixels, and an animation of a thousand frames: some kilobytes each."""
    files = []
    for size, frames, kind in (((5792, 5792), 1, "PNG"), ((180, 180), 1000, "GIF")):
        pictures = [Image.new("P", size, number % 256) for number in range(frames)]
        pictures[0].save(buffer := io.BytesIO(), kind, save_all=frames > 1, append_images=pictures[1:])
        files.append(base64.b64encode(buffer.getvalue()).decode())
    return [_post(key, _JSON, json.dumps({"prompt": "a", "image": file}).encode()) for file in files]


def _large_json(key: str) -> list[bytes]:
    """Deep, of many values, of one huge key, and in base64 that is none."""
    bodies = [b"[" * _MIB, b"[" + b"[]," * 150_000 + b"1]", b'{"' + b"k" * (_MIB - 9) + b'":1}', b"{" * (_MIB // 2)]
    bodies.append(b'{"prompt":"a","image":"' + b"A" * (40 * _MIB) + b'"}')
    bodies.append(b'{"' + b"k" * (8 * _MIB) + b'":1}')
    return [_post(key, _JSON, body) for body in bodies]


def _tiny_chunks(key: str) -> list[bytes]:
    return [_head(key, "POST /v1/videos", _JSON, "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n"]


def _dripped(key: str) -> list[bytes]:
    return [_head(key, "POST /v1/videos", _JSON, "Content-Length: 1000")]


def _streams(key: str) -> list[bytes]:
    made = httpx.post(f"http://127.0.0.1:{_port}/v1/videos", json={"prompt": "a"}, headers=_with(key), timeout=60)
    return [_head(key, f"GET /v1/videos/{made.json()['id']}/events")] if made.status_code == 200 else []


def _adapters(key: str) -> list[bytes]:
    """Requests of four adapters each, of a usual rank or of the highest, no two of the same."""
    names = list(map(str, range(_NUM_ADAPTERS)))
    fours = [names[first : first + 4] for first in range(0, _NUM_ADAPTERS, 4)]
    return [_post(key, _JSON, json.dumps({"prompt": "a", "adapters": four}).encode()) for four in fours]


ATTACKS = {
    "nothing": Attack(connections=0),
    "forms": Attack(connections=64, payloads=_forms),
    "images": Attack(connections=48, payloads=_images),
    "large JSON": Attack(connections=32, payloads=_large_json),
    "tiny chunks": Attack(connections=32, payloads=_tiny_chunks),
    "adapters": Attack(connections=16, payloads=_adapters),
    "idle connections": Attack(connections=1100),
    "drips": Attack(connections=200, payloads=_dripped, pause=0.5),
    "slow readers": Attack(connections=200, payloads=lambda key: [_head(key, "GET /v1/videos?limit=100")], reads=False),
    "streams": Attack(connections=1000, payloads=_streams, num_keys=32),
}
_port = 0
"""Of the gateway that is attacked; set once in the process that attacks."""


async def _attack(name: str, port: int, keys: list[str], seconds: float) -> int:
    """How many payloads were sent."""
    attack, sent = ATTACKS[name], 0
    payloads = [attack.payloads(key) or [b""] for key in keys[: attack.num_keys]]
    end = time.monotonic() + seconds

    async def connect(number: int) -> None:
        nonlocal sent
        own, turn = payloads[number % len(payloads)], number
        while time.monotonic() < end:
            with suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + end - time.monotonic()):
                        await _send(writer, own[turn % len(own)], attack.pause)
                        sent += 1
                        await (reader.read() if attack.reads else asyncio.sleep(seconds))
                finally:
                    writer.transport.abort()
            turn += 1
            await asyncio.sleep(0.01)

    await asyncio.gather(asyncio.sleep(seconds), *map(connect, range(attack.connections)))
    return sent


async def _send(writer: asyncio.StreamWriter, payload: bytes, pause: float) -> None:
    if not pause:
        writer.write(payload)
        await writer.drain()
        return
    for place in range(len(payload) + 1000):
        writer.write(payload[place : place + 1] or b" ")
        await writer.drain()
        await asyncio.sleep(pause)


# ---------------------------------------------------------------------------------------------------- neighbour


@dataclass(kw_only=True, slots=True)
class Seen:
    seconds: list[float]
    """Of each of the neighbour's requests."""
    num_completed: int
    num_restarts: int
    mebibytes: float
    """The most that the gateway had in memory."""
    sent: str


def _with(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _measure(name: str, service: "_Service", options: NeighbourOptions) -> Seen:
    before, peak, seconds = service.gateway(), 0.0, []
    keys = service.new_keys(ATTACKS[name].num_keys, requests_per_minute=options.requests_per_minute)
    command = [sys.executable, __file__, "--hostile", name, str(service.port), str(options.seconds), *keys]
    with httpx.Client(base_url=service.url, headers=_with(service.mine), timeout=60) as client:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
            ids: list[str] = []
            while hostile.poll() is None:
                began = time.monotonic()
                with suppress(httpx.HTTPError):
                    client.get("/v1/videos", params={"limit": 5})
                seconds.append(time.monotonic() - began)
                if len(ids) < options.jobs and len(seconds) % 10 == 0:
                    with suppress(httpx.HTTPError, KeyError):
                        ids.append(client.post("/v1/videos", json={"prompt": "a"}).json()["id"])
                peak = max(peak, service.mebibytes())
                time.sleep(0.05)
            sent = hostile.stdout.read().strip()
        states = []
        for each in ids:
            while (state := client.get(f"/v1/videos/{each}").json()["status"]) not in ("completed", "failed"):
                time.sleep(0.1)
            states.append(state)
    lost = options.jobs - states.count("completed")
    restarts = int(service.gateway() != before)
    return Seen(seconds=seconds, num_completed=options.jobs - lost, num_restarts=restarts, mebibytes=peak, sent=sent)


class _Service:
    """`megadit serve up`, with the keys of a neighbour and of who attacks."""

    def __init__(self, process: subprocess.Popen, port: int, store: Path) -> None:
        self.process, self.port, self.url = process, port, f"http://127.0.0.1:{port}"
        self._store = str(store)
        (self.mine,) = self.new_keys(1, requests_per_minute=10**6)

    def new_keys(self, count: int, **limits: int) -> list[str]:
        with closing(Database(self._store)) as database:
            ring = KeyRing(database)
            return [ring.add("somebody", limits=KeyLimits(**limits))[0] for _ in range(count)]

    def gateway(self) -> int:
        """Its process."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                name, _, values = stat.read_text().partition("(")[2].rpartition(")")
                if int(values.split()[1]) == self.process.pid and name != "tritonserver":
                    return int(stat.parent.name)
        return 0

    def mebibytes(self) -> float:
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{self.gateway()}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return 0.0


def _write_adapters(bundle: str, folder: Path) -> None:
    opened = open_bundle(bundle)
    targets = chosen_targets(opened.config, ("blocks.*",))
    for number in range(_NUM_ADAPTERS):
        rank, state, generator = _RANKS[number // 4 % 2], {}, torch.Generator().manual_seed(number)
        for name, target in targets.items():
            state[f"{name}.down"] = 1e-3 * torch.randn(rank, target.in_features, generator=generator)
            state[f"{name}.up"] = 1e-3 * torch.randn(target.out_features, rank, generator=generator)
        config = AdapterConfig(rank=rank, alpha=1.0, targets=("blocks.*",))
        write_adapter(folder / str(number), Adapter.from_state(state, config, opened.config))


@contextmanager
def _serving(bundle: str, folder: Path) -> Iterator[_Service]:
    _write_adapters(bundle, folder / "adapters")
    adapters = {"adapters": folder / "adapters"}
    repository = build_repository(bundle, folder / "models", scheduling=Scheduling(device="cpu"), **adapters)
    port, metrics, of_triton = free_ports(3)
    command = [
        sys.executable,
        "-m",
        "megadit.models.shared.cli.verbs",
        "serve",
        "up",
        str(repository),
        f"--port={port}",
    ]
    command += [f"--triton_metrics_port={of_triton}", "--", f"--metrics_port={metrics}", "--min_free_bytes=0"]
    command += [f"--store={folder / 'jobs.sqlite'}", f"--results={folder / 'videos'}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            service = _Service(process, port, folder / "jobs.sqlite")
            while not _is_ready(service.url):
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
            yield service
        finally:
            process.terminate()
            process.wait(120)


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/ready", timeout=10).status_code == 200
    return False


def _run(argv: list[str]) -> int:
    prog = "python tests/benchmarks/neighbours.py"
    options = read_options(NeighbourOptions, argv, prog=prog, description=__doc__.partition("\n")[0])
    print("| attack | sent | GET, median | p95 | most | jobs completed | restarts | gateway's memory |")
    print("|---" * 8 + "|")
    is_well = True
    with tempfile.TemporaryDirectory() as folder, _serving(options.bundle, Path(folder)) as service:
        for name in options.attack or ATTACKS:
            seen = _measure(name, service, options)
            p95 = statistics.quantiles(seen.seconds, n=20)[-1]
            most = max(seen.seconds)
            is_well &= p95 <= _MOST_P95 and most <= _MOST and not seen.num_restarts
            is_well &= seen.num_completed == options.jobs
            times = " | ".join(f"{1000 * each:.0f} ms" for each in (statistics.median(seen.seconds), p95, most))
            jobs = f"{seen.num_completed} of {options.jobs}"
            print(
                f"| {name} | {seen.sent} | {times} | {jobs} | {seen.num_restarts} | {seen.mebibytes:.0f} MiB |",
                flush=True,
            )
    return 0 if is_well else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hostile"]:
        of, _port = sys.argv[2], int(sys.argv[3])
        print(asyncio.run(_attack(of, _port, sys.argv[5:], float(sys.argv[4]))))
    else:
        sys.exit(main())
