"""Adapters that come and go, and requests of all kinds beside each other, from many clients at once.

`--cases N` is how often adapters are loaded, and the number of mixed requests.
"""

import base64
import io
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.media.animations import encode_image
from megadit.infer.media.video_io import encode_mp4
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from tests.infer.conftest import make_adapter

from ..test_triton import frames_of
from .test_load import NUM_CLIENTS, make, resident_bytes

pytestmark = pytest.mark.slow
ADAPTERS = [f"adapter{number}" for number in range(8)]
COUNTING = '''"""Notes every adapter that is put beside the network, and every one that is taken away."""

from pathlib import Path

from megadit.infer.runtimes.torch import AdaptableDenoiser
from megadit.serve.backend.triton_model import TritonPythonModel


def noted(method):
    def call(*arguments):
        method(*arguments)
        with (Path(__file__).parent / method.__name__).open("a") as file:
            file.write(".")

    return call


for name in ("load_adapter", "remove_adapter"):
    setattr(AdaptableDenoiser, name, noted(getattr(AdaptableDenoiser, name)))
__all__ = ["TritonPythonModel"]
'''


@pytest.fixture(scope="module")
def adapters(able_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(folder / name, able_dir, seed)
    return folder


@pytest.fixture
def mixed_server(tritonserver, able_dir, adapters, kept_running, tmp_path):
    """mixed_server(bytes): a server that keeps so much of adapters that nobody asks for, and where it notes them."""
    with ExitStack() as stack:

        def start(adapter_bytes: int):
            options = {"adapters": adapters, "adapter_bytes": adapter_bytes}
            models = build_repository(able_dir, tmp_path / "models", scheduling=Scheduling(device="cpu"), **options)
            model = models / "text_to_video" / "1" / "model.py"
            model.write_text(COUNTING)
            server = LocalServer(models, log=tmp_path / "triton.log", stop_seconds=3, hang_seconds=1e6)
            return stack.enter_context(kept_running(server)), model.parent

        yield start


@pytest.mark.timeout(900)
def test_adapters_come_and_go_under_sixteen_clients(mixed_server, able, adapters, in_group, request, eventually):
    """None is kept that nobody asks for: each request has its own loaded, or none, and every image is its own's."""
    wanted = request.config.getoption("--cases") or 40
    server, notes = mixed_server(0)
    size = {"num_frames": 1, "num_steps": 2}
    scales = [*({str(adapters / name): 1.0} for name in ADAPTERS), {}]
    expected = [able(["a"], seeds=1, adapters=each, **size)[0].video[0].astype(int) for each in scales]
    assert all(np.abs(one - other).max() > 10 for one, other in itertools.combinations(expected, 2)), "the control"
    pids, memory, numbers = in_group(server.process.pid), {}, itertools.count()
    is_enough = threading.Event()

    def count(what: str) -> int:
        path = notes / what
        return path.stat().st_size if path.exists() else 0

    def work(_: int) -> None:
        client = VideoClient(f"grpc://{server.grpc_url}")
        while not is_enough.is_set():
            number = next(numbers)
            chosen = number % len(expected)
            asked = VideoRequest(prompt="a", seed=1, adapters=tuple(ADAPTERS[chosen : chosen + 1]), **size)
            (image,) = client.generate(asked, timeout=300)
            made = np.asarray(Image.open(io.BytesIO(image.data))).astype(int)
            assert np.abs(made - expected[chosen]).max() <= 1, f"request {number}: another's image"
            loads = count("load_adapter")
            memory[loads] = resident_bytes(pids)
            if loads >= wanted:
                is_enough.set()

    began = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(work, range(NUM_CLIENTS)))
    seconds, loads = time.monotonic() - began, count("load_adapter")
    assert loads >= wanted
    eventually(lambda: count("remove_adapter") == loads, report=lambda: f"{loads} were loaded, all are taken away")
    early = min(loads for loads in memory if loads >= wanted // 5)
    print(
        f"\n{next(numbers)} images of {NUM_CLIENTS} clients in {seconds:.0f} s, none lost or mixed up: {loads} loads "
        f"and unloads of {len(ADAPTERS)} adapters; memory {memory[early] / 2**20:.0f} MiB after {early}, "
        f"{memory[max(memory)] / 2**20:.0f} MiB in the end"
    )
    assert memory[max(memory)] < memory[early] + 2**24, "memory grows with every load"


@dataclass(frozen=True)
class Mixed:
    """Number `number` of the requests: every other one with an image, a quarter with an adapter, some with both."""

    number: int

    @property
    def image(self) -> np.ndarray | None:
        if self.number % 2:
            return None
        return np.random.default_rng(self.number).integers(0, 256, (16, 24, 3), dtype=np.uint8)

    @property
    def adapter(self) -> str | None:
        return None if self.number % 8 not in (2, 5) else ADAPTERS[self.number % len(ADAPTERS)]

    def body(self) -> dict:
        body = {"prompt": f"number {self.number}", "seed": self.number, "size": "24x16", "num_frames": 9}
        if self.image is not None:
            body["image"] = base64.b64encode(encode_image(self.image, ".png")).decode()
        return body | ({"adapters": [{"name": self.adapter}]} if self.adapter else {})

    def expected(self, pipeline, adapters: Path) -> np.ndarray:
        given = None if self.image is None else ConditioningItem(frames=self.image[None], kind="first_frame")
        scales = {str(adapters / self.adapter): 1.0} if self.adapter else {}
        size = {"height": 16, "width": 24, "num_frames": 9}
        made = pipeline([f"number {self.number}"], seeds=self.number, conditioning=given, adapters=scales, **size)[0]
        return frames_of(encode_mp4(made.video, made.settings.fps))


@pytest.mark.timeout(900)
def test_mixed_requests_of_sixteen_clients(mixed_server, able, adapters, start_gateway, request):
    """Each gets the video that one process makes of it."""
    count = request.config.getoption("--cases") or 32
    server, _ = mixed_server(2**30)
    gateway = start_gateway(f"grpc://{server.grpc_url}")
    clients = [gateway.client() for _ in range(NUM_CLIENTS)]
    mixed, began = [Mixed(number) for number in range(count)], time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        results = list(threads.map(make, itertools.cycle(clients), [each.body() for each in mixed]))
    seconds, latencies = time.monotonic() - began, sorted(latency for _, _, latency in results)
    p50, p95 = latencies[count // 2], latencies[int(count * 0.95)]
    print(f"\n{count / seconds:.1f} videos/s, p50 {p50:.2f} s, p95 {p95:.2f} s")
    made = np.stack([frames_of(data) for _, data, _ in results])
    expected = np.stack([each.expected(able, adapters) for each in mixed])
    distance = np.stack([np.abs(expected - video).mean((1, 2, 3, 4)) for video in made])
    assert (distance.argmin(1) == np.arange(count)).all(), "each video is nearest to its own"
    own, others = distance.diagonal().max(), np.sort(distance, axis=1)[:, 1].min()
    print(f"levels from what one process makes: {own:.2f} at most, from another request's: {others:.1f} at least")
    assert own < 4 < 16 < others, "a level of a pixel, rounded in another batch, changes a block of the mp4"
