"""Numbers, configuration and videos of a run arrive where they are looked at."""

import contextlib
import importlib.util
import json
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec

import numpy as np
import pytest

from megadit.infer.media.video_io import write_video
from megadit.train.monitoring import trackers as trackers
from megadit.train.monitoring.metrics import Metrics
from megadit.train.monitoring.trackers import open_trackers
from megadit.train.recipes import load_recipe

FRAMES = np.random.default_rng(0).integers(0, 255, (3, 16, 24, 3), dtype=np.uint8)


def run_config(folder, **logger):
    run = load_recipe("digits_tiny")
    logger = {"tensorboard": False, **logger}
    return replace(run, train=replace(run.train, output_dir=str(folder)), logger=replace(run.logger, **logger))


@pytest.fixture
def videos(tmp_path):
    write_video(tmp_path / "a.mp4", FRAMES, 8)
    write_video(tmp_path / "b.png", FRAMES[:1])
    return [("a red seven", tmp_path / "a.mp4"), ("a blue two", tmp_path / "b.png")]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_shows_scalars_and_moving_videos(tmp_path, videos):
    (board,) = open_trackers(run_config(tmp_path, tensorboard=True), start=0)
    board.scalars(1, {"loss": 0.5, "validation/none/mean": 2.0})
    board.videos(1, videos)
    board.close()
    found = events(tmp_path)
    assert [event.value for event in found.Scalars("loss")] == [0.5] and found.Scalars("validation/none/mean")
    moving, still = (found.Images(f"validation_generation/{number:02d}")[0] for number in range(2))
    assert moving.encoded_image_string[:4] == b"GIF8" and (moving.height, moving.width) == (16, 24)
    assert len(moving.encoded_image_string) > 2 * len(still.encoded_image_string)
    (caption,) = found.Tensors("validation_generation/00/caption/text_summary")
    assert caption.tensor_proto.string_val[0] == b"a red seven"


def test_tensorboard_forgets_what_a_killed_run_told_beyond_its_checkpoint(tmp_path):
    for start, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        (board,) = open_trackers(run_config(tmp_path, tensorboard=True), start=start)
        for step in steps:
            board.scalars(step, {"loss": float(start)})
        board.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("loss")] == [(1, 0), (2, 1), (3, 1)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_offline(tmp_path, videos, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = run_config(tmp_path, wandb_exp_name="my_experiment", wandb_project="DiT", wandb_entity="us")
    for step in (1, 2):  # the second as after a resume
        (board,) = open_trackers(config, start=step - 1)
        board.scalars(step, {"loss": 0.25})
        board.videos(step, videos)
        board.close()
    assert "no WANDB_API_KEY" in capfd.readouterr().out
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one run, continued"
    media = {path.suffix for path in (tmp_path / "wandb").rglob("media/**/*") if path.is_file()}
    assert media == {".mp4", ".png"}
    written = files[0].read_bytes()
    for expected in (
        "my_experiment",
        "DiT",
        "us",
        "loss",
        "0.25",
        "validation_generation/00",
        "a red seven",
        "adam_beta2",
    ):
        assert expected.encode() in written


class Recorder:
    """Stands in for wandb, and for its run."""

    def __init__(self):
        self.logged, self.settings, self.axes = [], [], []
        self.__spec__ = ModuleSpec("wandb", None)
        self.Settings = dict

    def init(self, **settings):
        self.settings.append(settings)
        return self

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, values, step):
        if not self.logged or step > self.logged[-1][0]:  # as it does
            self.logged.append((step, values["step"], values["loss"]))

    def finish(self):
        pass


def test_weights_and_biases_hears_of_steps_that_were_taken_back(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Recorder())
    config = run_config(tmp_path, wandb_exp_name="x")
    with Metrics(config, start=0, length=0, enabled=True) as metrics:
        for step in (1, 2, 3):
            tell(metrics, step, loss=1.0)
        metrics.rewind(1, 0)
        for step in (2, 3, 4):
            tell(metrics, step, loss=2.0)
    with Metrics(config, start=3, length=0, enabled=True) as metrics:  # killed, and continued from step 3
        for step in (4, 5):
            tell(metrics, step, loss=2.0)
    of_steps = [(step, loss) for _, step, loss in wandb.logged]
    assert of_steps == [(1, 1.0), (2, 1.0), (3, 1.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert set(wandb.axes) == {("*", "step")} and len({settings["id"] for settings in wandb.settings}) == 1


def tell(metrics, step, loss):
    metrics.log({"step": step, "loss": loss, "lr": 0.1, "seconds": 1.0, "consumed_samples": step})


def test_weights_and_biases_in_another_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_config(tmp_path / "run", wandb_exp_name="x", wandb_save_dir=str(tmp_path / "there"))
    (tmp_path / "run").mkdir()
    open_trackers(config, start=0)[0].close()
    assert list((tmp_path / "there" / "wandb").glob("offline-run-*"))


def test_a_missing_package_is_said_and_nothing_else_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert open_trackers(run_config(tmp_path, tensorboard=True, wandb_exp_name="x"), start=0) == []
    told = capsys.readouterr().err
    assert "logger.tensorboard is off: tensorboard is not installed" in told
    assert "logger.wandb_exp_name is off: wandb is not installed (pip install 'megadit[wandb]')" in told


class WandbServer(BaseHTTPRequestHandler):
    """Answers as much of W&B's API as a run asks for, or as a server in trouble does."""

    trouble: str | None = None
    is_over = threading.Event()
    bucket = {"id": "x", "name": "r", "displayName": "r", "config": "{}", "sweepName": None, "historyLineCount": 0} | {
        "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
    }
    answers = {
        "upsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        "viewer": {"viewer": {"id": "v", "entity": "e", "flags": "{}", "teams": {"edges": []}}},
    }

    def log_message(self, *_) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        if self.trouble == "hangs":
            self.is_over.wait(60)
        found = next((value for name, value in self.answers.items() if name in body), {})
        data = json.dumps({"data": found}).encode()
        with contextlib.suppress(OSError):
            self.send_response(500 if self.trouble else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = answer


@pytest.fixture
def wandb_server(monkeypatch):
    wandb = pytest.importorskip("wandb")
    handler = type("Handler", (WandbServer,), {"is_over": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield server
    handler.is_over.set()
    server.shutdown()
    server.server_close()
    wandb.teardown()


@pytest.mark.parametrize("trouble", ["hangs", "fails", "is gone"])
@pytest.mark.parametrize("moment", ["start", "middle"])
def test_a_server_in_trouble_ends_no_run(moment, trouble, tmp_path, wandb_server, capsys, monkeypatch):
    begin_run = trackers.WeightsAndBiases._begin

    def begin_patiently(board, mode, settings):
        """What is waited for in vain is soon given up, and nothing else."""
        monkeypatch.setattr(trackers, "SECONDS_TO_ANSWER", 5.0 if (moment, mode) == ("start", "online") else 300.0)
        return begin_run(board, mode, settings)

    monkeypatch.setattr(trackers.WeightsAndBiases, "_begin", begin_patiently)
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 3.0 if moment == "middle" else 300.0)

    def begin() -> None:
        wandb_server.RequestHandlerClass.trouble = trouble
        if trouble == "is gone":
            wandb_server.shutdown()
            wandb_server.server_close()

    if moment == "start":
        begin()
    (board,) = open_trackers(run_config(tmp_path, wandb_exp_name="x", wandb_project="p"), start=0)
    board.scalars(1, {"loss": 1.0})
    if moment == "middle":
        begin()
    for step in range(2, 5):
        board.scalars(step, {"loss": 1.0})
    board.close()
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(told) == 1 and "wandb sync" in told[0]
    with contextlib.suppress(ConnectionError):  # its own process may have died of the server's answer (0.31)
        sys.modules["wandb"].teardown()  # as at the end of the process
    (written,) = (tmp_path / "wandb").glob(f"{'offline-' if moment == 'start' else ''}run-*/run-*.wandb")
    assert b"loss" in written.read_bytes()


def remove(folder) -> None:
    """At once: its writer may make a file there meanwhile."""
    folder.rename(folder.with_name("removed"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("moment", ["start", "middle", "end"])
def test_tensorboard_without_a_folder_ends_no_run(moment, tmp_path, capsys, videos):
    folder = tmp_path / "tensorboard"
    if moment == "start":
        folder.write_text("a file")
    (board,) = open_trackers(run_config(tmp_path, tensorboard=True), start=0)
    if moment == "middle":
        remove(folder)
        folder.write_text("a file")
    for step in range(1, 2000):  # more than it keeps back
        board.scalars(step, {"loss": 1.0, "lr": 0.1})
    board.videos(1, videos)
    if moment == "end":
        remove(folder)
        folder.write_text("a file")
    board.close()
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(told) <= 1 and all("without TensorBoard" in each for each in told)
    assert told or moment == "end", "what its thread still holds is lost without a word"


def test_a_board_that_fails_fails_once(tmp_path, monkeypatch, capsys):
    class Failing:
        def scalars(self, step, values):
            raise KeyError("whatever")

    monkeypatch.setattr(trackers, "Curves", lambda folder: Failing())
    config = run_config(tmp_path, curves=True)
    with Metrics(config, start=0, length=0, enabled=True) as metrics:
        for step in (1, 2):
            tell(metrics, step, loss=1.0)
    assert capsys.readouterr().err.count("goes on without curves.png: 'whatever'") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
