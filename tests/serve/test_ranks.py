"""A Triton instance that is a group of ranks: the videos of one process, and no rank's loss is one of a request."""

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import ServiceError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling

REQUEST = VideoRequest(prompt="a red seven", seed=5, num_frames=1)
"""An image, which is sent without loss."""
LONG = VideoRequest(prompt="a blue two", seed=6, num_frames=1, num_steps=300)


@pytest.fixture(scope="module")
def server(tritonserver, bundle_dir, adapter_dir, kept_running, tmp_path_factory):
    path = tmp_path_factory.mktemp("service")
    limits = {"max_work": 16 * 24 * 5 * 5000}
    scheduling = Scheduling(device="cpu", ranks=2)
    repository = build_repository(
        bundle_dir, path / "models", scheduling=scheduling, limits=limits, adapters=adapter_dir
    )
    with kept_running(LocalServer(repository, log=path / "triton.log", stop_seconds=3, hang_seconds=1e6)) as running:
        running.log = path / "triton.log"
        yield running
    assert not ranks_of(running.process.pid), "stopping leaves none"


def ranks_of(group: int) -> set[int]:
    """The ranks in a process group; those that have ended, but were not waited for, are none."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            process_group = int(stat.read_text().rpartition(")")[2].split()[2])
            if process_group == group and b"runtimes.rank" in stat.with_name("cmdline").read_bytes():
                found.add(int(stat.parent.name))
    return found


def pixels_of(client: VideoClient, request: VideoRequest, on_progress=None) -> np.ndarray:
    (image,) = client.generate(request, timeout=300, **({} if on_progress is None else {"on_progress": on_progress}))
    return np.asarray(Image.open(io.BytesIO(image.data))).astype(int)


@pytest.mark.slow
def test_two_ranks_behind_one_model_make_the_video_of_one(server, pipeline, bundle_dir, adapter_dir):
    client = VideoClient(f"grpc://{server.grpc_url}")
    made = pixels_of(client, REQUEST)
    assert np.abs(made - pipeline(["a red seven"], seeds=5, num_frames=1)[0].video[0]).max() <= 1
    assert np.abs(made - pipeline(["a red seven"], seeds=6, num_frames=1)[0].video[0]).max() > 10, "the control"
    of_one = pipeline(["a red seven"], seeds=5, num_frames=1, adapters={str(adapter_dir / "one"): 0.7})[0].video[0]
    with_adapter = VideoRequest(prompt="a red seven", seed=5, num_frames=1, adapters=("one:0.7",))
    assert np.abs(pixels_of(client, with_adapter) - of_one).max() <= 1
    assert len(ranks_of(server.process.pid)) == 2


@pytest.mark.slow
def test_a_killed_rank_loses_no_request(server, pipeline):
    """Killed in the middle of one: it goes on where it was, with new ranks."""
    client, killed = VideoClient(f"grpc://{server.grpc_url}"), threading.Event()
    ranks, began = ranks_of(server.process.pid), 0.0

    def kill(step) -> None:
        nonlocal began
        if step.step >= 50 and not killed.is_set():
            killed.set()
            began = time.monotonic()
            os.kill(max(ranks), signal.SIGKILL)

    made = pixels_of(client, LONG, kill)
    print(f"done {time.monotonic() - began:.1f} s after the loss")
    assert killed.is_set() and "ended; starting the ranks again" in server.log.read_text(errors="replace")
    assert np.abs(made - pipeline(["a blue two"], seeds=6, num_frames=1, num_steps=300)[0].video[0]).max() <= 1
    now = ranks_of(server.process.pid)
    assert len(now) == 2 and not now & ranks, "whom the others waited for is gone, and they with it"


@pytest.mark.slow
def test_ranks_end_with_their_backend_and_start_with_the_next(server):
    client, group = VideoClient(f"grpc://{server.grpc_url}"), server.process.pid
    ranks = ranks_of(group)
    parent = int(Path(f"/proc/{max(ranks)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    made = None
    while made is None:
        with contextlib.suppress(ServiceError):
            made = pixels_of(client, REQUEST)
        time.sleep(0.2)
    assert server.process.pid != group and not ranks_of(group)
    assert len(ranks_of(server.process.pid)) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "2"], "device='auto' must name the GPUs of 2 ranks, .*: --device 0,1"),
        (["--ranks", "2", "--device", "0,1,2"], "as many for each instance"),
        (["--ranks", "3", "--tp_size", "2", "--device", "cpu"], "multiple of tp_size x cp_size = 2"),
    ],
)
def test_ranks_that_cannot_be_are_refused(bundle_dir, tmp_path, capsys, options, said):
    assert verbs.main(["serve", "build-repository", str(bundle_dir), str(tmp_path / "models"), *options]) == 2
    with pytest.raises(UserError, match=said):
        raise UserError(capsys.readouterr().err)


def test_options_of_ranks_change_the_repository(bundle_dir, tmp_path):
    def config(*options: str) -> str:
        asked = ["serve", "build-repository", str(bundle_dir), str(tmp_path / "models"), "--device", "cpu", *options]
        assert verbs.main(asked) == 0
        return (tmp_path / "models" / "text_to_video" / "config.pbtxt").read_text()

    changes = [[], ["--ranks", "2"], ["--ranks", "2", "--tp_size", "2"], ["--ranks", "2", "--cp_size", "2"]]
    assert len({config(*options) for options in changes}) == len(changes)
