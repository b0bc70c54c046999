"""`megadit serve up --drain`: another bundle is served from some job on, and none is lost or made twice."""

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.shared.cli import verbs
from megadit.models.storage.components import load_network
from megadit.serve.launch.local_server import Ports
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling

LONG, SHORT = {"prompt": "a", "num_steps": 1500, "num_frames": 1}, {"prompt": "a red seven", "num_frames": 1, "seed": 3}


def build(bundle, repository) -> None:
    limits = {"max_work": 16 * 24 * 5 * 5000}
    build_repository(bundle, repository, scheduling=Scheduling(device="cpu"), limits=limits)


@pytest.fixture
def retrained_dir(bundle_dir, tmp_path):
    """The bundle with other weights."""
    bundle = Bundle.open(bundle_dir)
    state = load_network(bundle.path / "transformer", device="cpu", dtype=torch.float32).state_dict()
    tokenizer, text_encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    state = {name: 1.5 * value for name, value in state.items()}
    parts = {"config": bundle.config, "tokenizer": tokenizer, "text_encoder": text_encoder}
    write_bundle(tmp_path / "retrained", state_dict=state, defaults=bundle.defaults, training={"step": 8}, **parts)
    return tmp_path / "retrained"


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


@pytest.mark.slow
def test_another_bundle_is_served_and_no_job_is_lost(serve_up, bundle_dir, retrained_dir, tmp_path, eventually):
    models = tmp_path / "models"
    build(bundle_dir, models)
    service = serve_up(models, slots=8)
    before = service.children()
    first = service.create(**SHORT)
    eventually(lambda: service.status(first) == "completed", report=service.log)
    running = [service.create(**LONG, seed=seed) for seed in range(2)]
    eventually(lambda: "in_progress" in map(service.status, running), report=service.log)
    build(retrained_dir, models)
    command = [sys.executable, "-m", "megadit.models.shared.cli.verbs", "serve", "up", str(models), "--drain"]
    drain = subprocess.Popen([*command, f"--port={service.port}"])
    eventually(lambda: '"paused"' in (service.folder / "log").read_text(), report=service.log)
    during = [service.create(**SHORT) for _ in range(3)]
    assert {service.status(each) for each in during} == {"queued"}, "taken, and not begun"
    eventually(lambda: drain.poll() is not None, report=service.log)
    assert drain.returncode == 0
    after = service.create(**SHORT)
    for video in (*running, *during, after):
        eventually(lambda video=video: service.status(video) in ("completed", "failed"), report=service.log)
        assert service.status(video) == "completed", service.log()
    log = (service.folder / "log").read_text()
    assert "job interrupted" not in log and log.count('"job started"') == 7, "none was made twice"
    before_the_stop = log.partition("Signal (15) received")[0]
    assert all(before_the_stop.count(f'"job completed", "job": "{video}"') for video in (first, *running))
    now = service.children()
    assert now["gateway"] == before["gateway"] and now["tritonserver"] != before["tritonserver"]
    made = [pixels(service.content(video)) for video in (*during, after)]
    assert all(np.abs(video - made[0]).max() <= 1 for video in made)
    assert np.abs(pixels(service.content(first)) - made[0]).max() > 10, "by the bundle that came"


def test_nobody_is_asked_to_drain(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    port = Ports.free().http
    assert verbs.main(["serve", "up", str(tmp_path), "--drain", f"--port={port}"]) == 2
    assert f"no `serve up` of yours runs at port {port} here" in capsys.readouterr().err
