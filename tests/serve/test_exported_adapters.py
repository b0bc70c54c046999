"""Adapters as inputs of exported graphs, through a real tritonserver: the base, one after another, three at once."""

import io
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json, write_manifest
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from tests.exports import RANK, TARGETS
from tests.infer.conftest import make_adapter

REQUEST = VideoRequest(prompt="a red seven", seed=5, num_frames=1)
"""Images, which are sent without loss."""
CASES = {"none": (), "one": ("one",), "two": ("two:0.5",), "both": ("one:0.7", "two:-1"), "less": ("one:0.4",)}


@pytest.fixture(scope="module")
def folder(slotted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", slotted.path, 1)
    make_adapter(folder / "two.safetensors", slotted.path, 2)
    make_adapter(folder / "dora.safetensors", slotted.path, 3, kind="dora")
    make_adapter(folder / "large.safetensors", slotted.path, 4, rank=RANK + 1)
    return folder


@pytest.fixture(scope="module")
def server(tritonserver, slotted, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("service")
    repository = build_repository(
        slotted.path,
        path / "models",
        scheduling=Scheduling(device="cpu"),
        runtime="onnx",
        adapters=folder,
        limits={"max_work": 16 * 24 * 5 * 5000},
    )
    with LocalServer(repository, log=path / "triton.log", stop_seconds=3) as running:
        yield running


@pytest.mark.slow
def test_requests_get_their_adapters_and_no_other(server, slotted, folder):
    client = VideoClient(f"grpc://{server.grpc_url}")

    def ask(name: str):
        return client.generate(replace(REQUEST, adapters=CASES[name]), timeout=300)[0]

    alone = {name: ask(name).data for name in CASES}
    assert (alone["one"], alone["none"]) == (ask("one").data, ask("none").data), "A, B, A"
    torch = TextToVideo.from_pretrained(slotted, device="cpu")
    paths = {"one": str(folder / "one"), "two": str(folder / "two.safetensors")}
    for name, texts in CASES.items():
        scales = VideoRequest(prompt="", adapters=texts).adapter_scales()
        scales = {paths[each]: scale for each, scale in scales.items()}
        expected = torch(["a red seven"], seeds=5, adapters=scales, num_frames=1)[0].video[0]
        assert np.abs(image_of(alone[name]) - expected).max() <= 1, name
    assert np.abs(image_of(alone["one"]) - image_of(alone["none"])).max() > 10, "negative control"

    together = ("none", "both", "less")  # none, two and one
    for name, videos in _in_one_batch(client, together).items():
        assert videos.batch_size == 3
        assert np.abs(image_of(videos.data) - image_of(alone[name])).max() <= 1, name
    for one, other in combinations(together, 2):
        assert np.abs(image_of(alone[one]) - image_of(alone[other])).max() > 10, "rows that change places are seen"

    for name, reason in {
        "dora": "a DoRA scales the output of its base",
        "large": f"rank {RANK + 1} together, the exported networks at most {RANK}",
    }.items():
        with pytest.raises(InvalidRequestError, match=f"the adapter '{name}' cannot be used: .*{reason}"):
            client.generate(replace(REQUEST, adapters=(name,)), timeout=300)
    assert client.info().adapters.slots == {"rank": RANK, "targets": list(TARGETS)}
    assert ask("none").data == alone["none"]


def _set(event: threading.Event, step) -> None:
    event.set()


def image_of(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def _in_one_batch(client: VideoClient, names):
    """Asked while another request keeps the model busy, so that they wait together."""
    asked = [replace(REQUEST, adapters=CASES[name]) for name in names]
    for _ in range(5):
        is_busy = threading.Event()
        report = partial(_set, is_busy)
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(client.generate, replace(REQUEST, num_steps=2000), on_progress=report, timeout=300)
            assert is_busy.wait(300)
            made = list(threads.map(lambda request: client.generate(request, timeout=300)[0], asked))
            first.result()
        if {video.batch_size for video in made} == {len(names)}:
            break
    return dict(zip(names, made, strict=True))


@pytest.mark.slow
def test_a_repository_of_graphs_without_such_inputs_is_refused(slotted, folder, tmp_path):
    plain = shutil.copytree(slotted.path, tmp_path / "plain")
    settings = read_json(plain / "onnx/settings.json")
    write_json(plain / "onnx/settings.json", settings | {"adapters": None})
    write_manifest(plain, slotted.manifest)
    with pytest.raises(UserError, match="exported without inputs for adapters: export again with --adapter_rank"):
        build_repository(plain, tmp_path / "models", runtime="onnx", adapters=folder)
    assert not (tmp_path / "models").exists()
