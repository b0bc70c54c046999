"""Adapters as inputs of exported graphs, through a real tritonserver: the base, one after the other, and three at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.pipeline import TextToVideo
from megadit.infer.video_io import encode_mp4
from megadit.models.shared.errors import UserError
from megadit.serve.build_repository import build_repository
from megadit.serve.client import VideoClient
from megadit.serve.contract import InvalidRequestError, VideoRequest
from megadit.serve.local_server import LocalServer
from megadit.serve.model_config import Scheduling
from tests.infer.conftest import make_adapter

from .test_triton import frames_of

PATTERNS = ("blocks.*", "final_layer.*")
REQUEST = VideoRequest(prompt="a red seven", seed=5)
CASES = {"none": (), "one": ("one",), "two": ("two:0.5",), "both": ("one:0.7", "two:-1")}
ENCODED = 3
"""Most that two encodings of frames differ which differ by 1."""


@pytest.fixture(scope="module")
def folder(bundle_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", bundle_dir, 1)
    make_adapter(folder / "two.safetensors", bundle_dir, 2)
    make_adapter(folder / "dora.safetensors", bundle_dir, 3, kind="dora")
    make_adapter(folder / "large.safetensors", bundle_dir, 4, rank=5)
    return folder


@pytest.fixture(scope="module")
def plain_dir(bundle_dir, tmp_path_factory):
    """Exported without inputs for adapters."""
    out = tmp_path_factory.mktemp("plain") / "exported"
    export_bundle(bundle_dir, out, ExportSettings(profiles=("batch=1,1,3",), video_steps=1))
    return out


@pytest.fixture(scope="module")
def server(tritonserver, bundle_dir, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("service")
    room = {"adapter_rank": 4, "adapter_targets": PATTERNS}
    export_bundle(bundle_dir, path / "exported", ExportSettings(profiles=("batch=1,1,3",), video_steps=1, **room))
    repository = build_repository(
        path / "exported",
        path / "models",
        scheduling=Scheduling(device="cpu"),
        runtime="onnx",
        adapters=folder,
        limits={"max_work": 16 * 24 * 5 * 5000},
    )
    with LocalServer(repository, log=path / "triton.log", stop_seconds=3) as running:
        yield running


@pytest.mark.slow
def test_requests_get_their_adapters_and_no_other(server, bundle_dir, plain_dir, folder):
    client = VideoClient(f"grpc://{server.grpc_url}")

    def ask(name: str):
        return client.generate(replace(REQUEST, adapters=CASES[name]), timeout=300)[0]

    alone = {name: ask(name).data for name in ("none", "one", "two", "both")}
    assert (alone["one"], alone["none"]) == (ask("one").data, ask("none").data), "A, B, A"
    base = TextToVideo.load(plain_dir, device="cpu", runtime="onnx").generate(["a red seven"], seeds=5)[0].video
    assert np.array_equal(frames_of(alone["none"]), frames_of(encode_mp4(base, 8))), "the base, bit for bit"
    torch = TextToVideo.load(bundle_dir, device="cpu")
    paths = {"one": str(folder / "one"), "two": str(folder / "two.safetensors")}
    for name, texts in CASES.items():
        scales = VideoRequest(prompt="", adapters=texts).adapter_scales()
        scales = {paths[each]: scale for each, scale in scales.items()}
        expected = encode_mp4(torch.generate(["a red seven"], seeds=5, adapters=scales)[0].video, 8)
        assert np.abs(frames_of(alone[name]) - frames_of(expected)).max() <= ENCODED, name
    assert np.abs(frames_of(alone["one"]) - frames_of(alone["none"])).max() > 2 * ENCODED, "negative control"

    for name, videos in _in_one_batch(client, ("one", "two", "both")).items():
        assert videos.batch_size == 3
        assert np.abs(frames_of(videos.data) - frames_of(alone[name])).max() <= ENCODED, name

    for name, reason in {
        "dora": "a DoRA scales what its base gives",
        "large": "rank 5 together, of which exported networks take 4",
    }.items():
        with pytest.raises(InvalidRequestError, match=f"the adapter '{name}' cannot be used: .*{reason}"):
            client.generate(replace(REQUEST, adapters=(name,)), timeout=300)
    assert client.info().adapters.slots == {"rank": 4, "targets": list(PATTERNS)}
    assert ask("none").data == alone["none"]


def _in_one_batch(client: VideoClient, names):
    """Asked while another request keeps the model busy, so that they wait together."""
    for _ in range(5):
        is_busy = threading.Event()
        with ThreadPoolExecutor(4) as threads:
            busy = replace(REQUEST, num_steps=400)
            first = threads.submit(client.generate, busy, on_progress=lambda step: is_busy.set(), timeout=300)
            assert is_busy.wait(300)
            asked = [replace(REQUEST, adapters=CASES[name]) for name in names]
            made = list(threads.map(lambda request: client.generate(request, timeout=300)[0], asked))
            first.result()
        if {video.batch_size for video in made} == {len(names)}:
            break
    return dict(zip(names, made, strict=True))


def test_a_repository_of_graphs_without_such_inputs_is_refused(plain_dir, folder, tmp_path):
    with pytest.raises(UserError, match="exported without inputs for adapters: export again with --adapter_rank"):
        build_repository(plain_dir, tmp_path / "models", runtime="onnx", adapters=folder)
    assert not (tmp_path / "models").exists()
