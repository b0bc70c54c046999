"""Engines on a GPU that is not the first, and asked for by two threads: a fake runtime says who does what, where.

What TensorRT itself computes is measured on a GPU (tests/export/test_to_tensorrt.py).
"""

import math
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megadit.infer.runtimes.tensorrt import Engines

PLACE = torch.device("meta", 1)
"""Stands for the second GPU: tensors can be made there."""


class FakeCuda:
    """Whose kernels do nothing, but say on which device, in which stream, and whether in a recording."""

    def __init__(self, *, refuses_capture=False, compute=lambda: time.sleep(0.01)):
        self.here = threading.local()
        self.refuses_capture, self.compute = refuses_capture, compute
        self.launches, self.replays, self.modes, self.running = [], [], [], 0

    def install(self, monkeypatch):
        for name in ("device", "Stream", "current_stream", "stream", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
        return self

    @contextmanager
    def device(self, device):
        before, self.here.device = getattr(self.here, "device", None), device
        yield
        self.here.device = before

    def Stream(self, device):  # noqa: N802
        return SimpleNamespace(device=device, cuda_stream=1, wait_stream=lambda other: None)

    def current_stream(self, device=None):
        return SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream):
        yield

    def CUDAGraph(self):  # noqa: N802
        return SimpleNamespace(replay=lambda: self.replays.append(self.here.device))

    @contextmanager
    def graph(self, graph, stream, capture_error_mode="global"):
        self.modes.append(capture_error_mode)
        if self.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.here.captures = True
        yield
        self.here.captures = False

    def execute(self, stream):
        self.running += 1
        self.compute()
        assert self.running == 1, "two threads use one stream and one memory"
        self.launches.append((self.here.device, getattr(self.here, "captures", False)))
        self.running -= 1
        return True


@pytest.fixture
def exported(tmp_path, monkeypatch):
    tensors = [SimpleNamespace(name="x", dtype="float32")]
    spec = SimpleNamespace(name="denoiser", inputs=tensors, output="y", check=lambda shapes, rebuild: None)
    for name in ("denoiser", "video_decoder"):
        (tmp_path / f"{name}.plan").write_bytes(b"engine")
    settings = {"engine": {"version_compatible": False, "weight_streaming": False}}
    return SimpleNamespace(settings=settings, directory=tmp_path, network=lambda name: spec, rebuild="again")


def engines(exported, cuda, monkeypatch):
    loaded = []

    def context(strategy):
        """Needs a byte for each element of its input."""
        shapes, names = {}, ("set_tensor_address", "set_device_memory")
        return SimpleNamespace(
            execute_async_v3=cuda.execute,
            set_input_shape=shapes.__setitem__,
            update_device_memory_size_for_shapes=lambda: sum(map(math.prod, shapes.values())),
            **{name: lambda *_: None for name in names},
        )

    def load(content):
        loaded.append(cuda.here.device)
        return SimpleNamespace(create_execution_context=context)

    class Logger:
        WARNING = 0

        def __init__(self, level):
            pass

    fake = SimpleNamespace(
        Logger=Logger,
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=load),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0),
    )
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return Engines(exported, PLACE), loaded


def test_all_is_done_on_the_device_that_was_asked_for(exported, monkeypatch):
    cuda = FakeCuda().install(monkeypatch)
    opened, loaded = engines(exported, cuda, monkeypatch)
    x = torch.empty(2, 3, device=PLACE)
    for _ in range(3):
        opened["denoiser"]({"x": x}, (2, 3))
    assert loaded == [PLACE] and opened.stream.device == PLACE
    assert cuda.launches == [(PLACE, False), (PLACE, True)] and cuda.replays == [PLACE, PLACE]
    assert cuda.modes == ["thread_local"]


def test_memory_is_that_of_the_shapes_at_hand(exported, monkeypatch):
    """When it grows, recordings of either engine, which are bound to the memory before, are made anew."""
    cuda = FakeCuda().install(monkeypatch)
    opened, _ = engines(exported, cuda, monkeypatch)
    x, longer = torch.empty(2, 3, device=PLACE), torch.empty(2, 5, device=PLACE)

    def twice(name, given):
        before = len(cuda.launches)
        for _ in range(2):
            opened[name]({"x": given}, tuple(given.shape))
        return len(cuda.launches) - before

    assert len(opened.memory(0)) == 0
    assert twice("denoiser", x) == 2 and len(opened.memory(0)) == 6
    assert twice("video_decoder", x) == 2 and twice("denoiser", x) == 0, "recorded, in the same memory"
    assert twice("video_decoder", longer) == 2 and len(opened.memory(0)) == 10
    assert twice("denoiser", x) == 2 and len(opened.memory(0)) == 10


def test_a_thread_that_decodes_waits_for_one_that_samples(exported, monkeypatch):
    cuda = FakeCuda().install(monkeypatch)
    opened, _ = engines(exported, cuda, monkeypatch)
    x, errors = torch.empty(2, 3, device=PLACE), []

    def work(name):
        try:
            for _ in range(4):
                opened[name]({"x": x}, (2, 3))
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("denoiser", "video_decoder")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(cuda.replays) == 6
    assert sorted(captured for _, captured in cuda.launches) == [False, False, True, True]


def test_what_cannot_be_captured_runs_without(exported, monkeypatch):
    cuda = FakeCuda(refuses_capture=True).install(monkeypatch)
    opened, _ = engines(exported, cuda, monkeypatch)
    x = torch.empty(2, 3, device=PLACE)
    opened["denoiser"]({"x": x}, (2, 3))
    with pytest.warns(UserWarning, match="denoiser runs without a CUDA graph: operation not permitted"):
        opened["denoiser"]({"x": x}, (2, 3))
    opened["denoiser"]({"x": x}, (2, 3))
    assert len(cuda.launches) == 3 and len(cuda.modes) == 1 and not cuda.replays


def test_the_fake_sees_two_threads_at_once(exported, monkeypatch):
    """The control: without its lock."""
    met = threading.Barrier(2, timeout=60)
    cuda = FakeCuda(compute=met.wait).install(monkeypatch)
    opened, _ = engines(exported, cuda, monkeypatch)
    opened.lock = threading.Semaphore(2)
    x, errors = torch.empty(2, 3, device=PLACE), []

    def work(network):
        try:
            network({"x": x}, (2, 3))
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(opened[name],)) for name in ("denoiser", "video_decoder")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors
