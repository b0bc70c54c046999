"""Many clients at once, and cancels at any moment; `--cases N` is the number of requests, or of cancels."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megadit.serve.launch.local_server import LocalServer

NUM_CLIENTS = 16
SHAPES = [{}, {"num_frames": 1}, {"size": "8x8"}, {"num_steps": 2, "guidance": 1.0}]


def resident_bytes(pids: list[int]) -> int:
    with contextlib.suppress(OSError):
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096
    return 0


def make(client: httpx.Client, body: dict) -> tuple[dict, bytes, float]:
    """The finished video, its data, and how long it took; whoever is told to come again does so, as clients do."""
    began = time.monotonic()
    while (response := client.post("/v1/videos", json=body)).status_code == 503:
        time.sleep(float(response.headers["retry-after"]))
    video = response.json()
    while video["status"] not in ("completed", "failed"):
        time.sleep(0.25)
        video = client.get(f"/v1/videos/{video['id']}").json()
    assert video["status"] == "completed", video
    return video, client.get(f"/v1/videos/{video['id']}/content").content, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_requests_of_sixteen_clients(start_gateway, server, in_group, request, eventually):
    """None lost, none mixed up, every key its turn, memory flat."""
    count = request.config.getoption("--cases") or 32
    gateway = start_gateway(f"grpc://{server.grpc_url}")
    pids = [gateway.process.pid, *in_group(server.process.pid)]
    clients = [gateway.client() for _ in range(NUM_CLIENTS)]
    bodies = [
        {"prompt": f"number {index}", "seed": index, "priority": 1 + index % 3, **SHAPES[index % len(SHAPES)]}
        for index in range(count)
    ]
    done, memory = itertools.count(1), {}

    def work(client: httpx.Client, body: dict) -> tuple[dict, bytes, float]:
        result = make(client, body)
        memory[next(done)] = resident_bytes(pids)
        return result

    began = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        results = list(threads.map(work, itertools.cycle(clients), bodies))
    seconds = time.monotonic() - began
    for body, (video, data, _) in zip(bodies, results, strict=True):
        assert (video["prompt"], video["settings"]["seed"]) == (body["prompt"], body["seed"])
        record = json.dumps({"prompt": body["prompt"], "seed": body["seed"]})[:-1]
        assert record.encode() in data, "the file itself says what made it"
        assert hashlib.sha256(data).hexdigest() == video["sha256"]
    latencies = sorted(latency for _, _, latency in results)
    p50, p95 = latencies[count // 2], latencies[int(count * 0.95)]
    print(
        f"\n{count} requests of {NUM_CLIENTS} clients: {count / seconds:.1f} videos/s, p50 {p50:.2f} s, p95 {p95:.2f} s"
    )
    first, last = memory[min(50, count // 2)], memory[count]
    print(f"memory: {first / 2**20:.0f} MiB after {min(50, count // 2)}, {last / 2**20:.0f} MiB in the end")
    assert last < 1.1 * first + 2**26, "memory grows with every request"
    every_key_has_its_turn(gateway, clients, eventually)


def every_key_has_its_turn(gateway, clients: list[httpx.Client], eventually) -> None:
    """A key that asked for twenty videos is served no more often than those who ask for two each after it."""
    blocking, (greedy, *others) = gateway.client(), clients

    def create(client: httpx.Client, **body) -> str:
        return client.post("/v1/videos", json={"prompt": "a"} | body).json()["id"]

    def status(client: httpx.Client, video_id: str) -> str:
        return client.get(f"/v1/videos/{video_id}").json()["status"]

    blockers = [create(blocking, num_steps=5000) for _ in range(8)]
    for video_id in blockers:
        eventually(lambda video_id=video_id: status(blocking, video_id) == "in_progress")
    short = {"num_steps": 1, "num_frames": 1}
    many = [create(greedy, **short) for _ in range(20)]
    few = [create(client, **short) for client in others * 2]
    for video_id in blockers:
        blocking.delete(f"/v1/videos/{video_id}")
    for client, video_id in [*zip([greedy] * 20, many, strict=True), *zip(others * 2, few, strict=True)]:
        eventually(lambda client=client, video_id=video_id: status(client, video_id) == "completed")
    started = re.findall(r'"job started", "job": "(\w+)"', gateway.log.read_text())
    until_the_last = started[: max(started.index(video_id) for video_id in few)]
    taken = sum(video_id in many for video_id in until_the_last)
    print(f"of a key's 20 videos, {taken} were begun before the last of 30 that 15 others asked for later")
    assert taken <= 10


COUNTING = '''"""Counts the steps that are computed, each of which takes a while."""

import time
from pathlib import Path

from megadit.serve.backend import engine
from megadit.serve.backend.triton_model import TritonPythonModel

_end_unwanted = engine._end_unwanted


def counted(rows, clock):
    with (Path(__file__).parent / "steps").open("a") as file:
        file.write("".join(f"{row.owner.request.prompt}\\n" for row in rows))
    time.sleep(STEP_SECONDS)
    _end_unwanted(rows, clock)


engine._end_unwanted = counted
__all__ = ["TritonPythonModel"]
'''
STEP_SECONDS = 2.0


@pytest.fixture
def slow_server(tritonserver, repository, kept_running, tmp_path):
    """A server that says how many steps it has computed for each prompt, with `STEP_SECONDS` for each."""
    copy = tmp_path / "models"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("text_to_image"))
    model = copy / "text_to_video" / "1" / "model.py"
    model.write_text(COUNTING.replace("STEP_SECONDS", str(STEP_SECONDS)))
    slow = LocalServer(copy, log=tmp_path / "triton.log", stop_seconds=3, hang_seconds=1e6)
    with kept_running(slow) as server:
        yield server, lambda prompt: (model.parent / "steps").read_text().splitlines().count(prompt)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_cancel_is_the_end_of_its_steps(start_gateway, slow_server, request, eventually):
    """At a random moment of a step; the one that is under way may be finished, and no other is begun.

    Once the server crashes just then, as Triton 2.51 may when a client leaves: it is started again and goes on.
    """
    server, steps = slow_server
    gateway, chance = start_gateway(f"grpc://{server.grpc_url}"), random.Random(0)
    client, after_each = gateway.client(), []
    for index in range(request.config.getoption("--cases") or 4):
        prompt = f"cancelled {index}"
        video_id = client.post("/v1/videos", json={"prompt": prompt, "num_steps": 200}).json()["id"]
        eventually(lambda prompt=prompt: steps(prompt) >= 1)
        threading.Event().wait(chance.random() * 2 * STEP_SECONDS)
        client.delete(f"/v1/videos/{video_id}")
        when_deleted = steps(prompt)
        if index == 1:
            os.kill(server.process.pid, signal.SIGSEGV)
        last = client.post("/v1/videos", json={"prompt": f"after {index}", "num_steps": 1, "num_frames": 1}).json()
        eventually(lambda last=last: client.get(f"/v1/videos/{last['id']}").json()["status"] == "completed")
        after_each.append(steps(prompt) - when_deleted)
    print(f"\nsteps begun after each of {len(after_each)} cancels: {sorted(after_each)}")
    assert max(after_each) <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_aiperf_drives_the_service(start_gateway, server, request, tmp_path):
    """NVIDIA's load generator as it is: what it posts, polls and downloads, this gateway has."""
    aiperf = shutil.which(os.environ.get("MEGADIT_AIPERF", "aiperf"))
    if aiperf is None:
        pytest.skip("no aiperf: install it into an environment of its own and name it in MEGADIT_AIPERF")
    count = request.config.getoption("--cases") or 8
    gateway = start_gateway(f"grpc://{server.grpc_url}")
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # its own would be fetched
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"text": "number {index}"}}\n' for index in range(count)))
    command = [aiperf, "profile", "--url", gateway.url, "--api-key", gateway.new_key(), "--model", "text_to_video"]
    command += ["--endpoint-type", "video_generation", "--download-video-content"]
    command += ["--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn", "--ui", "none"]
    command += ["--extra-inputs", "size:24x16", "num_frames:5", "num_inference_steps:2", "seed:7"]
    command += ["--concurrency", "4", "--request-count", str(count), "--artifact-dir", "aiperf"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    print(f"\n{count} requests, 4 at once: {told['request_throughput']}, {told['request_latency']}")
    assert told["request_count"]["avg"] == count and not told.get("error_summary")
