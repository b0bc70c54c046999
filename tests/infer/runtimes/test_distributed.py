"""Ranks of a pipeline's own make the videos that one process makes, and come back when they are lost."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes import distributed as ranked_module
from megadit.infer.runtimes.distributed import DevicePlacement, DistributedDenoiser, LostRankError
from megadit.infer.runtimes.rank import serve
from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.convert.adapters.files import read_adapter_of
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import rank_environment
from tests.bundles import write_pair_bundle

from ..conftest import make_adapter

PROMPTS = ["a red seven", "a blue two", "a green three"]


@pytest.fixture(scope="module")
def started(bundle_dir):
    """Ranks as users start them."""
    return TextToVideo.from_pretrained(bundle_dir, device="cpu", ranks=DevicePlacement(devices=("cpu", "cpu")))


@pytest.fixture(scope="module")
def forks() -> multiprocessing.context.BaseContext:
    """Forks ranks from a process that has imported all that they need: most of the time of a start is that. It ends
    with this process, and not before the last rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", serve.__module__])
    with mock.patch.dict(os.environ, rank_environment(2)):
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def forked(started, forks, monkeypatch) -> None:
    """Ranks that are started in this test are forked."""

    def start(command, *, pass_fds, **_) -> multiprocessing.Process:
        process = forks.Process(target=serve, args=[Connection(os.dup(*pass_fds))])
        process.start()
        process.wait = process.join
        return process

    monkeypatch.setattr(ranked_module, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


@pytest.fixture
def ranked(started, forked):
    return started


def difference(made, expected) -> int:
    """The largest, in levels: float32 sums in another order may cross the boundary between two of them."""
    pairs = zip(made, expected, strict=True)
    return max(int(np.abs(one.video.astype(int) - other.video).max()) for one, other in pairs)


def pids(ranked) -> list[int]:
    """Of its ranks, the last of which tests stop or kill."""
    group = ranked.denoiser._group
    return [process.pid for process in group._processes] if group else []


def is_there(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


@pytest.mark.parametrize("settings", [{}, {"guidance": 1.0}, {"batch_size": 1}, {"sampler": "heun", "num_frames": 1}])
def test_two_ranks_make_the_videos_of_one(ranked, pipeline, settings):
    assert difference(ranked(PROMPTS, seeds=[1, 2, 3], **settings), pipeline(PROMPTS, seeds=[1, 2, 3], **settings)) <= 1
    other = pipeline(PROMPTS, seeds=[4, 2, 3], **settings)
    assert difference(ranked(PROMPTS, seeds=[1, 2, 3], **settings), other) > 10, "the control"


def test_a_lost_rank_is_started_again_with_its_adapters(ranked, bundle_dir, tmp_path, capfd):
    """Killed between two calls: the video goes on from where it was."""
    make_adapter(tmp_path / "one", bundle_dir, 1)
    asked = {"seeds": 5, "adapters": {str(tmp_path / "one"): 0.8}, "num_steps": 6}
    expected = TextToVideo.from_pretrained(bundle_dir, device="cpu")(PROMPTS, **asked)
    before, steps = pids(ranked), []

    def kill_one(step) -> None:
        steps.append(step.step)
        if step.step == 3:
            os.kill(pids(ranked)[-1], signal.SIGKILL)

    assert difference(ranked(PROMPTS, **asked, on_step=kill_one), expected) <= 1
    assert steps == list(range(1, 7)), "no step was made twice"
    assert len(before) == len(pids(ranked)) == 2 and not any(map(is_there, before))
    assert "rank 1 of 2 ended; starting the ranks again" in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_of_two_networks_have_adapters_of_each(forked, bundle_dir, tmp_path):
    write_pair_bundle(bundle_dir, tmp_path / "pair")
    one, two = (make_adapter(tmp_path / f"{seed}", tmp_path / "pair", seed, base=False) for seed in (1, 2))
    options = {"device": "cpu"}, {"device": "cpu", "ranks": DevicePlacement(devices=("cpu", "cpu"))}
    alone, ranked = (TextToVideo.from_pretrained(tmp_path / "pair", **more) for more in options)
    base = alone(PROMPTS[:1])
    for scales in ({f"high={one}": 0.5, f"low={two}": 1.0}, {one: 0.5}):
        expected = alone(PROMPTS[:1], adapters=scales)
        assert difference(ranked(PROMPTS[:1], adapters=scales), expected) <= 1
        assert difference(base, expected) > 10, "negative control"
    assert difference(pickle.loads(pickle.dumps(ranked))(PROMPTS[:1]), base) <= 1, "of ranks of its own"


def test_a_failure_ends_the_ranks_and_a_mistake_does_not(ranked, pipeline):
    before = pids(ranked)
    adapter = AdapterConfig(rank=1, alpha=1.0, targets=("blocks.*",))
    with pytest.raises(UserError, match="does not fit the network"):
        ranked.denoiser.load_adapter("misfit", {"blocks.0.no_such.down": torch.zeros(1, 1)}, adapter)
    assert difference(ranked(PROMPTS[:1]), pipeline(PROMPTS[:1])) <= 1 and pids(ranked) == before
    conditioning = Conditioning(torch.zeros(2, 1, 16), torch.ones(2, dtype=torch.long), torch.zeros(2))
    with pytest.raises(RuntimeError, match="channels|shape|size"):
        ranked.denoiser(torch.zeros(2, 5, 2, 4, 6), torch.ones(2), conditioning)
    assert not pids(ranked) and not any(map(is_there, before))
    assert difference(ranked(PROMPTS[:1]), pipeline(PROMPTS[:1])) <= 1


def test_an_adapter_is_taken_away_from_ranks_that_were_lost(ranked, bundle_dir, pipeline, tmp_path):
    adapter = read_adapter_of(make_adapter(tmp_path / "one", bundle_dir, 1), Bundle.open(bundle_dir))
    ranked.denoiser.load_adapter("one", *adapter.to_state())
    os.kill(pids(ranked)[-1], signal.SIGKILL)
    ranked.denoiser.remove_adapter("one")
    assert len(pids(ranked)) == 2
    assert difference(ranked(PROMPTS[:1]), pipeline(PROMPTS[:1])) <= 1


def test_an_adapter_is_forgotten_though_ranks_cannot_be_asked(ranked, bundle_dir, pipeline, tmp_path, monkeypatch):
    def refuse(_):
        raise UserError("no room for them")

    adapter = read_adapter_of(make_adapter(tmp_path / "one", bundle_dir, 1), Bundle.open(bundle_dir))
    ranked.denoiser.load_adapter("one", *adapter.to_state())
    os.kill(pids(ranked)[-1], signal.SIGKILL)
    with monkeypatch.context() as without, pytest.raises(LostRankError, match="no room for them"):
        without.setattr(DistributedDenoiser, "_started", refuse)
        ranked.denoiser.remove_adapter("one")
    ranked.denoiser.load_adapter("one", *adapter.to_state())
    ranked.denoiser.remove_adapter("one")
    assert difference(ranked(PROMPTS[:1]), pipeline(PROMPTS[:1])) <= 1


def test_a_rank_that_stands_still_is_lost_and_one_that_was_slow_is_not(ranked, pipeline, monkeypatch, capfd):
    expected, slow, wait = pipeline(PROMPTS), pids(ranked)[-1], ranked_module.wait
    monkeypatch.setattr(ranked_module, "PATIENCE", 0.5)

    def wait_for_the_slow(connections, seconds):
        """It goes on once it was silent for so long, and will be asked whether it is there."""
        answering = wait(connections, seconds)
        if not answering:
            os.kill(slow, signal.SIGCONT)
            monkeypatch.setattr(ranked_module, "PATIENCE", 60.0)
        return answering

    with monkeypatch.context() as patch:
        patch.setattr(ranked_module, "wait", wait_for_the_slow)
        os.kill(slow, signal.SIGSTOP)
        assert difference(ranked(PROMPTS), expected) <= 1
    assert slow in pids(ranked) and not capfd.readouterr().err
    assert ranked_module.PATIENCE == 60.0, "it was silent"
    monkeypatch.setattr(ranked_module, "PATIENCE", 2.0)
    os.kill(slow, signal.SIGSTOP)
    assert difference(ranked(PROMPTS), expected) <= 1
    assert slow not in pids(ranked)
    assert "rank 1 of 2 has been silent for 2 s; starting the ranks again" in capfd.readouterr().err


def test_a_rank_that_stands_still_takes_no_large_message_for_ever(forked, bundle_dir, pipeline, monkeypatch, capfd):
    monkeypatch.setattr(ranked_module, "PATIENCE", 3.0)
    ranked = TextToVideo.from_pretrained(bundle_dir, device="cpu", ranks=DevicePlacement(devices=("cpu",)))
    monkeypatch.setattr(ranked_module, "PATIENCE", 60.0)  # with those that are started again
    os.kill(pids(ranked)[-1], signal.SIGSTOP)
    large = {"num_frames": 17, "height": 64, "width": 96, "num_steps": 1}
    assert difference(ranked(PROMPTS, **large), pipeline(PROMPTS, **large)) <= 1
    assert "rank 0 of 1 hangs in the middle of a message; starting the ranks again" in capfd.readouterr().err


def test_a_rank_that_stands_still_in_its_answer_is_lost(forked, bundle_dir, pipeline, monkeypatch, capfd):
    """An answer larger than what a socket holds: a part of it has come."""
    monkeypatch.setattr(ranked_module, "PATIENCE", 4.0)  # within a message
    ranked = TextToVideo.from_pretrained(bundle_dir, device="cpu", ranks=DevicePlacement(devices=("cpu",)))
    monkeypatch.setattr(ranked_module, "PATIENCE", 60.0)  # until one comes
    large = {"num_frames": 17, "height": 64, "width": 96, "num_steps": 1}
    expected, rank, wait = pipeline(PROMPTS[:1], **large), pids(ranked)[-1], ranked_module.wait

    def wait_until_it_stands_still(connections, seconds):
        answering = wait(connections, seconds)
        if answering and is_there(rank):
            time.sleep(0.5)
            os.kill(rank, signal.SIGSTOP)
        return answering

    monkeypatch.setattr(ranked_module, "wait", wait_until_it_stands_still)
    assert difference(ranked(PROMPTS[:1], **large), expected) <= 1
    assert not is_there(rank)
    assert "rank 0 of 1 hangs in the middle of a message; starting the ranks again" in capfd.readouterr().err


def test_rows_of_conditions_put_together_are_the_whole():
    given = CleanLatents(torch.randn(3, 4, 2, 2, 2), torch.ones(2, 2, 2, dtype=torch.bool), (5.0,))
    scales = {"one": torch.tensor([1.0, 0.0, 2.0])}
    text = torch.randn(3, 2, 4), torch.tensor([2, 1, 0]), torch.tensor([8.0, 0.0, 4.0])
    whole = Conditioning(*text, scales, given, torch.randn(3, 2, 4))
    parts = [whole.at(places) for places in ([0, 1], [2])]
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1].text_BLE.untyped_storage().nbytes() == 4 * 2 * 4, "no row of the others is sent along"
    again = Conditioning.concatenate(parts)
    for name in ("text_BLE", "text_length_B", "fps_B", "image_BIE"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
    assert torch.equal(again.adapter_scale_B["one"], scales["one"])
    assert torch.equal(again.clean.latents_BCTHW, given.latents_BCTHW) and again.clean.extra_times == (5.0,)


def test_given_videos_reach_the_ranks(forked, able_dir, able):
    ranked = TextToVideo.from_pretrained(able_dir, device="cpu", ranks=DevicePlacement(devices=("cpu", "cpu")))
    frames = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    asked = {
        "seeds": [1, 2, 3],
        "conditioning": ConditioningItem(frames=frames, kind="first_frame"),
        "image_guidance": 1.5,
    }
    assert difference(ranked(PROMPTS, **asked), able(PROMPTS, **asked)) <= 1
    assert difference(ranked(PROMPTS, **asked), able(PROMPTS, seeds=[1, 2, 3])) > 10, "the control"


def test_ranks_end_with_who_started_them(bundle_dir, tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.distributed import DevicePlacement
if __name__ == "__main__":
    ranks = DevicePlacement(devices=("cpu", "cpu"))
    pipeline = TextToVideo.from_pretrained({str(bundle_dir)!r}, device="cpu", ranks=ranks)
    children = Path("/proc/self/task", str(os.getpid()), "children").read_text()
    Path({str(tmp_path / "ranks")!r}).write_text(children)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program])
    ranks = (tmp_path / "ranks").read_text().split()
    assert len(ranks) == 2
    deadline = time.monotonic() + 60
    while any(Path("/proc", pid).exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_that_cannot_be_laid_out_so_are_refused(bundle_dir):
    with pytest.raises(UserError, match="3 ranks cannot be divided into device groups of 2 x 1"):
        DevicePlacement(devices=("cpu",) * 3, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 2}, {"tensor": 2}], ids=["cp", "tp"])
def test_ranks_that_share_matrices_or_tokens(bundle_dir, pipeline, sizes, tmp_path):
    pytest.importorskip("megatron.core")
    ranked = TextToVideo.from_pretrained(
        bundle_dir, device="cpu", ranks=DevicePlacement(devices=("cpu", "cpu"), **sizes)
    )
    expected = pipeline(PROMPTS, seeds=[1, 2, 3])
    assert difference(ranked(PROMPTS, seeds=[1, 2, 3]), expected) <= 1
    if "context" in sizes:
        lost = pids(ranked)[-1]
        killing = threading.Timer(0.3, os.kill, [lost, signal.SIGKILL])  # within a call, whose other rank waits for it
        killing.start()
        many = {"seeds": 3, "num_steps": 100}
        assert difference(ranked(PROMPTS[:1], **many), pipeline(PROMPTS[:1], **many)) <= 1
        killing.join()
        assert lost not in pids(ranked)
    with_adapter = {"seeds": 3, "adapters": {make_adapter(tmp_path / "one", bundle_dir, 1): 0.8}}
    assert difference(ranked(PROMPTS, **with_adapter), pipeline(PROMPTS, **with_adapter)) <= 1
