"""A callback is told of calls that a GPU has done, or nearly: a fake one finishes a call when it is waited for."""

from types import SimpleNamespace

import pytest
import torch

from megadit.infer.pipeline.batches import CALLS_AHEAD, Cancelled, StepProgress

CALLS = 6


@pytest.fixture
def gpu(monkeypatch):
    """Work that was launched, and work that was waited for."""
    seen = SimpleNamespace(launched=0, done=0, streams=set())

    class Event:
        def __init__(self, blocking):
            assert blocking, "a host that waits leaves its core to others"

        def record(self, stream):
            self.number = seen.launched
            seen.streams.add(stream)

        def synchronize(self):
            seen.done = self.number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return seen


def denoiser(gpu, device):
    def denoise(x, sigma_B):
        gpu.launched += 1
        return SimpleNamespace(device=torch.device(device))

    return denoise


def run(gpu, on_step, device="cuda:1"):
    progress = StepProgress(on_step, CALLS, preview=lambda x0: None)
    denoise = progress.around(denoiser(gpu, device), range(1))
    for _ in range(CALLS):
        denoise(None, torch.ones(1))


def test_a_callback_is_told_when_the_call_two_before_is_done(gpu):
    found = []
    run(gpu, lambda step: found.append((step.step, step.num_done, gpu.done)))
    assert found == [(step, done, done) for step in range(1, CALLS + 1) for done in (max(step - CALLS_AHEAD, 1),)]
    assert gpu.streams == {"stream of cuda:1"}


def test_cancelling_leaves_at_most_two_calls(gpu):
    with pytest.raises(Cancelled, match="after denoiser call 4 of 6"):
        run(gpu, lambda step: step.step < 4)
    assert gpu.launched - gpu.done == CALLS_AHEAD


@pytest.mark.parametrize(("on_step", "device"), [(None, "cuda:1"), (lambda step: None, "cpu")])
def test_nobody_waits_where_nobody_is_told_or_nothing_runs_behind(gpu, on_step, device):
    run(gpu, on_step, device)
    assert gpu.launched == CALLS and gpu.done == 0 and not gpu.streams


def test_on_a_cpu_each_call_is_done(gpu):
    found = []
    run(gpu, lambda step: found.append(step.num_done), "cpu")
    assert found == list(range(1, CALLS + 1))
