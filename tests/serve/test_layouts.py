"""Layouts that people have, a row of each kind, through every command: convert, generate, merge, export and serve."""

import functools
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands import convert
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.text_encoders import HashedWordEncoder
from megadit.serve.backend.engine import Engine
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository, service_info
from megadit.serve.repository.model_config import Scheduling
from tests.infer.conftest import make_adapter
from tests.models.convert.test_layouts import READ

from .backend.test_engine import Asker, run

ASKED = {"num_frames": 1, "height": 16, "width": 16, "num_steps": 2, "guidance": 2.0}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Arguments of a tiny tokenizer, which is read once for all rows, and of a text encoder."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    root = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, latents_mean=[0.1] * 4, latents_std=[2.0] * 4).save_pretrained(
        root / "vae"
    )
    HashedWordEncoder(dim=8).save(root / "words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "published_tokenizer", functools.cache(convert.published_tokenizer))
        yield ["--tokenizer", str(root / "vae"), "--text_encoder", str(root / "words")]


@pytest.fixture(scope="module")
def converted(parts, tmp_path_factory):
    """(bundle, path of an adapter of it)."""
    root = tmp_path_factory.mktemp("converted")
    assert convert.main([str(READ["diffusers"](root / "theirs")), str(root / "bundle"), *parts]) == 0
    return Bundle.open(root / "bundle"), make_adapter(root / "one", root / "bundle", 1, patterns=("blocks.*",))


def made(bundle, **options):
    adapters = options.pop("adapters", {})
    pipeline = TextToVideo.from_pretrained(bundle, device="cpu", **options)
    return pipeline(["a red seven"], seeds=3, adapters=adapters, **ASKED)[0]


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", READ)
def test_rows_become_one_bundle_and_its_video(layout, converted, parts, tmp_path):
    """Every later command sees the bundle alone: weights, parts and defaults are the same to the byte."""
    bundle, _ = converted
    assert convert.main([str(READ[layout](tmp_path / "theirs")), str(tmp_path / "bundle"), *parts]) == 0
    found = Bundle.open(tmp_path / "bundle", verify=True)
    assert found.manifest["files"] == bundle.manifest["files"] and found.config == bundle.config
    released = replace(found.defaults, schedule=bundle.defaults.schedule)
    assert released == bundle.defaults


def test_rows_are_generated_merged_and_served(converted, tmp_path):
    bundle, adapter = converted
    plain, adapted = made(bundle), made(bundle, adapters={adapter: 0.7})
    assert distance(adapted.latents_CTHW, plain.latents_CTHW) > 1e-3, "negative control"
    merge_bundle(bundle, {adapter: 0.7}, tmp_path / "merged")
    assert distance(made(tmp_path / "merged").latents_CTHW, adapted.latents_CTHW) <= 1e-5
    for adapters, expected in (((), plain), (("one:0.7",), adapted)):
        info = service_info(bundle, bundle.defaults, None, adapters=Path(adapter).parent)
        engine = Engine(TextToVideo.from_pretrained(bundle, device="cpu"), info, adapters=Path(adapter).parent)
        request = VideoRequest(prompt="a red seven", seed=3, adapters=adapters, **ASKED)
        run(engine, asker := Asker(request))
        assert asker.endings == [None], asker.endings
        (video,) = asker.videos
        assert np.abs(np.asarray(Image.open(io.BytesIO(video.data))).astype(int) - expected.video[0]).max() <= 1


@pytest.mark.slow
def test_rows_are_exported_and_served_by_triton(converted, tritonserver, tmp_path):
    bundle, adapter = converted
    profiles = ("batch=1,1,2", "frames=1,1,5", "height=16,16,32", "width=16,16,32")
    settings = ExportSettings(profiles=profiles, adapter_rank=2, adapter_targets=("blocks.*",), video_steps=1)
    export_bundle(bundle.path, tmp_path / "exported", settings)
    for adapters in ({}, {adapter: 0.7}):
        found = made(tmp_path / "exported", runtime="onnx", adapters=adapters)
        assert distance(found.latents_CTHW, made(bundle, adapters=adapters).latents_CTHW) <= 1e-4
    repository = build_repository(
        tmp_path / "exported", tmp_path / "models", scheduling=Scheduling(device="cpu"), runtime="onnx"
    )
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        client = VideoClient(f"grpc://{server.grpc_url}")
        (video,) = client.generate(VideoRequest(prompt="a red seven", seed=3, **ASKED), timeout=300)
    shown = np.asarray(Image.open(io.BytesIO(video.data))).astype(int)
    assert np.abs(shown - made(bundle).video[0]).max() <= 1
