"""Recorded denoiser calls give what the network gives, for every size, and call it no more."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes import cuda_graphs as graphs
from megadit.infer.runtimes.cuda_graphs import RecordedDenoiser
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.networks import conditioning as conditioning_module
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from tests.bundles import CONFIG
from tests.traffic import Traffic

CPU = torch.device("cpu")


def record_on_cpu(compute):
    """What a CUDA graph does, without one: computes again from the same places into the same place."""
    output = compute()
    return output, lambda: output.copy_(compute())


def inputs(seed: int, batch: int = 2, length: int = 3, frames: int = 2):
    generator = torch.Generator().manual_seed(seed)
    text_BLE = torch.randn(batch, length, 16, generator=generator)
    conditioning = Conditioning(text_BLE, torch.tensor([length, 0][:batch]), torch.full((batch,), 8.0))
    x = torch.randn(batch, 48, frames, 4, 6, generator=generator)
    return x, torch.full((batch,), 0.5 + seed), conditioning


def test_recorded_calls_are_those_of_the_network(pipeline):
    recorded = RecordedDenoiser(pipeline.denoiser, CPU, record_on_cpu)
    kept = []
    for case in (inputs(1), inputs(2), inputs(3, length=70), inputs(4, batch=1, frames=1), inputs(1)):
        kept.append((recorded(*case), pipeline.denoiser(*case)))
    for found, expected in kept:  # looked at last: no answer is overwritten by a later call
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_each_size_is_recorded_once_and_few_are_kept(pipeline, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    recordings = []

    def record(compute):
        recordings.append(compute)
        return record_on_cpu(compute)

    recorded = RecordedDenoiser(pipeline.denoiser, CPU, record)
    for case in (inputs(1), inputs(2), inputs(3, length=9), inputs(4, batch=1)):  # texts of 3 and 9 are padded alike
        recorded(*case)
    assert len(recordings) == 2
    recorded(*inputs(5, frames=1))
    recorded(*inputs(6, batch=1))
    assert len(recordings) == 3
    recorded(*inputs(7))  # the longest unused was let go
    assert len(recordings) == 4


def test_whole_videos_are_the_same(pipeline, bundle_dir):
    ours = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    ours.denoiser = RecordedDenoiser(ours.denoiser, CPU, record_on_cpu)
    expected = pipeline(["a red seven", "blue"], seeds=[1, 2])
    for found, reference in zip(ours(["a red seven", "blue"], seeds=[1, 2]), expected, strict=True):
        assert abs(found.video.astype(int) - reference.video).max() <= 1


def test_what_is_given_is_not_lost(able, able_dir):
    frames = np.zeros((1, able.defaults.height, able.defaults.width, 3), dtype=np.uint8)
    given = ConditioningItem(frames=frames, kind="first_frame")
    ours = TextToVideo.from_pretrained(able_dir, device="cpu")
    ours.denoiser = RecordedDenoiser(ours.denoiser, CPU, record_on_cpu)
    (found,), (reference,) = (each(["a red seven"], conditioning=given) for each in (ours, able))
    assert abs(found.video.astype(int) - reference.video).max() <= 1
    (free,) = ours(["a red seven"])
    assert abs(found.video.astype(int) - free.video).max() > 1


def given_of(seed: int, *places: int, extra: int = 0) -> CleanLatents:
    """Latent frames that are given, and some that are only given."""
    generator = torch.Generator().manual_seed(seed)
    is_given = torch.zeros(2 + extra, 4, 6, dtype=torch.bool)
    is_given[[*places, *range(2, 2 + extra)]] = True
    return CleanLatents(torch.randn(2, 48, 2 + extra, 4, 6, generator=generator), is_given, (0.5,) * extra)


def test_what_is_given_is_recorded_once_for_its_places(able, monkeypatch):
    recordings = []

    def record(compute):
        recordings.append(compute)
        return record_on_cpu(compute)

    recorded, kept = RecordedDenoiser(able.denoiser, CPU, record), []
    for seed, places, extra in ((1, (0,), 0), (2, (0,), 0), (3, (1,), 0), (4, (0,), 1), (5, (0,), 0)):
        x, sigma, conditioning = inputs(seed)
        case = x, sigma, replace(conditioning, clean=given_of(seed, *places, extra=extra))
        kept.append((recorded(*case), able.denoiser(*case), able.denoiser(x, sigma, conditioning)))
    for found, expected, without in kept:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        assert (found - without).abs().max() > 1e-3
    assert len(recordings) == 3


@pytest.mark.parametrize("places", [None, (0,), (1,)])
def test_nothing_is_asked_or_sent_while_it_is_recorded(places, monkeypatch):
    """On a GPU that would end the recording; once before is not."""
    device, found = torch.device("meta"), []

    def record(compute):
        compute()
        with Traffic() as traffic:
            output = compute()
        found.append(traffic)
        return output, lambda: None

    denoiser = TorchDenoiser(DiT(replace(CONFIG, conditioning_sigma=0.02)), device=device)
    x, sigma, conditioning = inputs(1)
    given = None if places is None else given_of(1, *places, extra=1)
    if given is not None:
        here, given = given, given.to(device)
        monkeypatch.setitem(conditioning_module._ON_HOST, given.is_clean_THW, here.is_clean_THW)  # what it had answered
    recorded = RecordedDenoiser(denoiser, device, record)
    recorded(x.to(device), sigma, replace(conditioning.to(device), clean=given))
    [traffic] = found
    assert not traffic.sent and not traffic.asked, (traffic.sent, traffic.asked)


def test_without_a_gpu_it_is_refused(bundle_dir):
    with pytest.raises(UserError, match="cuda_graphs needs a GPU"):
        TextToVideo.from_pretrained(bundle_dir, device="cpu", cuda_graphs=True)


class FakeCuda:
    """Records nothing: says in what mode it was asked to, and on which device."""

    def __init__(self, monkeypatch, *, refuses=False):
        self.modes, self.devices, self.replays, self.refuses = [], [], 0, refuses
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay),
            "graph": self.graph,
            "device": self.device,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def replay(self):
        self.replays += 1

    @contextmanager
    def graph(self, graph, capture_error_mode="global"):
        self.modes.append(capture_error_mode)
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    @contextmanager
    def device(self, device):
        self.devices.append(device)
        yield


def test_another_thread_may_work_while_a_graph_is_recorded(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    calls = []
    _, replay = graphs.record_cuda_graph(lambda: calls.append(1))
    replay()
    assert cuda.modes == ["thread_local"] and cuda.replays == 1 and len(calls) == graphs.WARM_UP + 1


def test_what_cannot_be_recorded_is_computed_each_time(monkeypatch):
    FakeCuda(monkeypatch, refuses=True)
    x = torch.zeros(3)
    with pytest.warns(UserWarning, match="no CUDA graph, .*operation not permitted when stream is capturing"):
        output, replay = graphs.record_cuda_graph(lambda: x + 1)
    x.fill_(4)
    replay()
    assert torch.equal(output, torch.full((3,), 5.0))


def test_calls_are_made_on_the_device_that_was_asked_for(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(RecordedDenoiser, "_replayed", lambda self, *inputs: list(cuda.devices))
    assert RecordedDenoiser(None, torch.device("cuda", 1))(*inputs(1)) == [torch.device("cuda", 1)]


@pytest.mark.gpu
def test_on_a_gpu_the_videos_are_the_same(bundle_dir):
    loaded = [TextToVideo.from_pretrained(bundle_dir, device="cuda", cuda_graphs=graphs) for graphs in (False, True)]
    one, other = (pipeline(["a red seven", "blue"], seeds=[1, 2]) for pipeline in loaded)
    for found, reference in zip(one, other, strict=True):
        assert abs(found.video.astype(int) - reference.video).max() <= 1
