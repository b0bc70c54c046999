"""What is sent together arrives as it was, by one copy; and what training and sampling send and ask for, counted.

The meta device stands for a GPU: it computes nothing, and refuses to tell a number.
"""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import numpy
import pytest
import torch

from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models import host_to_device as transfer
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.unet import USUAL, UNetConfig
from megadit.models.host_to_device import sent_together
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.unet import UNet
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.data.packs.packed_batch import PackFormat, TrainingSample
from megadit.train.optim.adamw import HalfMomentAdamW
from tests.stable_diffusion import UNETS
from tests.traffic import Traffic, note_waits
from tests.train.objectives.models import training_model

META = torch.device("meta")


def config(family="megadit", **changes):
    fixed = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "in_channels": 4, "crossattn_emb_size": 16}
    return DiTConfig(family=family, **fixed, **changes)


FAMILY_CHANGES = {
    "moviegen": {"position_embedding": "learned", "learned_positions": (4, 8, 8)},
    "cosmos": {"position_embedding": "rope", "adaln_lora_dim": 6},
}


def batch(model, *, count=3):
    samples = [
        TrainingSample(
            sample_id=str(index),
            occurrence=0,
            latent_CTHW=torch.randn(4, 1 + index, 4, 4),
            text_LE=torch.randn(2 + index, model.crossattn_emb_size),
            fps=8.0,
        )
        for index in range(count)
    ]
    pack = PackFormat(model=model, seq_length=64, text_seq_length=24, seed=0, text_dropout=0.3)
    return pack.pack(samples)


def test_tensors_arrive_as_they_were(monkeypatch):
    tensors = [torch.randn(3, 5).bfloat16(), torch.arange(7), torch.tensor(True), torch.zeros(0, 4), torch.randn(1, 1)]
    assert all(a is b for a, b in zip(sent_together(tensors, "cpu"), tensors, strict=True))
    # a device of another name that computes like a CPU
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device="cpu", **how: empty(*size, **how))
    there = sent_together(tensors, "meta")
    monkeypatch.undo()
    assert len({x.untyped_storage().data_ptr() for x in there}) == 1
    for sent, tensor in zip(there, tensors, strict=True):
        assert sent.dtype == tensor.dtype and torch.equal(sent, tensor)
        assert sent.data_ptr() % 16 == 0 or sent.numel() == 0


class FakeCuda:
    """The streams of torch.cuda: what is told to them is noted, in order, with the stream that is current."""

    def __init__(self, monkeypatch) -> None:
        self.told, self.current = [], "main"
        for name in ("Stream", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, device):  # noqa: N802
        return FakeStream(self, "side")

    def current_stream(self, device):
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, cuda, name) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.told.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.cuda.told.append(f"{self.name} records")
        return "event"

    def wait_event(self, event):
        self.cuda.told.append(f"{self.name} waits for {event}")


def test_a_side_stream_copies_beside_and_who_reads_waits_for_it(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    side, copy_in_turn = transfer.SideStream(META), transfer.copy_in_turn

    def noted(there, here):
        cuda.told.append(f"{cuda.current} copies {len(here)} bytes")
        copy_in_turn(there, here)

    monkeypatch.setattr(transfer, "copy_in_turn", noted)
    [sent] = sent_together([torch.ones(16)], META, side.copy)
    arrival = side.arrival()
    assert sent.shape == (16,)
    assert cuda.told == ["side waits for main", "side copies 64 bytes", "side records"]
    arrival()
    assert cuda.told[3:] == ["main waits for event"]


@pytest.fixture
def late(monkeypatch):
    """A GPU whose copies to the host are made no earlier than somebody waits for an event behind them."""
    cuda, copy, asked, made = FakeCuda(monkeypatch), torch.Tensor.copy_, [], []

    def copy_(there, here, non_blocking=False):
        if not non_blocking:
            return copy(there, here)
        assert cuda.current == "side"
        asked.append((there, here))

    def record_event(stream):
        before = len(asked)

        def synchronize():
            while len(made) < before:
                copy(*asked[len(made)])
                made.append(before)

        return SimpleNamespace(synchronize=synchronize)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: cuda.told.append(f"kept for {stream.name}"))
    monkeypatch.setattr(FakeStream, "record_event", record_event)
    cuda.asked = asked
    return cuda


def test_large_tensors_come_back_through_two_blocks_while_the_next_piece_is_copied(late):
    tensors = [torch.randn(5, 7), torch.randn(3).bfloat16(), torch.tensor(4.0), torch.empty(0), torch.randn(9, 4).T]
    copies = transfer.HostCopies(torch.device("cuda"), block_bytes=48)
    here = [copies.copy(tensor) for tensor in tensors]
    in_flight = [not torch.equal(found, tensor) for found, tensor in zip(here, tensors, strict=True)]
    assert in_flight[-1], "the last one is not waited for yet"
    copies.finish()
    for found, tensor in zip(here, tensors, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    blocks = [there.untyped_storage().data_ptr() for there, _ in late.asked]
    assert len(set(blocks)) == 2 and all(a != b for a, b in pairwise(blocks)), "in turn"
    assert late.told == ["side waits for main", "kept for side"] * len(tensors)


def test_tensors_come_back_by_one_copy_that_is_waited_for_when_they_are_read(monkeypatch):
    waits = []
    note_waits(monkeypatch, waits.append)
    tensors = [torch.randn(3, 5).half(), torch.arange(7), torch.randn(2, 3, 4), torch.zeros(0, 4)]
    assert all(a is b for a, b in zip(transfer.fetch_together(tensors)(), tensors, strict=True))
    block = torch.zeros(transfer.block_bytes(tensors), dtype=torch.uint8)
    for part, tensor in zip(transfer.unpacked(block, tensors), tensors, strict=True):
        part.copy_(tensor)
    there = [tensor.to(META) for tensor in tensors]
    with Traffic(answer=lambda asked: block) as traffic:
        fetched = transfer.fetch_together(there)
        assert not waits
        found = fetched()
    assert waits == [0] and traffic.fetched.total() == 1 and not traffic.asked
    for x, tensor in zip(found, tensors, strict=True):
        assert x.dtype == tensor.dtype and torch.equal(x, tensor)
    assert len({x.untyped_storage().data_ptr() for x in found if x.numel()}) == 3, "none keeps the pinned block"


@pytest.mark.parametrize("family", ["megadit", "moviegen", "cosmos"])
def test_a_micro_batch_is_sent_by_three_copies_at_most_and_nothing_is_asked_for(family):
    model = config(family, **FAMILY_CHANGES.get(family, {}))
    with META:
        training = training_model(DiT(model), learned_uncertainty=True)
    training.uncertainty(torch.empty(1, device=META))  # its constants are sent once
    pack = batch(model)
    with Traffic() as traffic:
        sums = training(pack.to(META))
        sums.objective.backward()
    # the batch, its layout, and the words of its length groups, which the kernel for any lengths does without
    assert traffic.sent.total() <= 3 and not traffic.asked, (traffic.sent, traffic.asked)


def test_a_copy_of_ordinary_memory_is_waited_for():
    """Whatever is asked of it."""
    with Traffic() as traffic:
        torch.ones(3).to(META, non_blocking=True)
        assert traffic.sent.total() == traffic.asked.total() == 1
        sent_together([torch.ones(3)], META)
    assert traffic.sent.total() == 2 and traffic.asked.total() == 1


def test_what_would_be_waited_for_is_seen():
    there = torch.empty(3, device=META)
    with Traffic() as traffic:
        there.add(torch.ones(3).to(META))
        torch.tensor([1.0], device=META), there.new_tensor(2.0), torch.as_tensor(numpy.ones(3), device=META)
        there[[0, 2]], there.copy_(torch.ones(())), torch.where(there > 0, torch.ones(()), there)
        assert traffic.sent.total() == 7 == sum("copy" in line for line in traffic.asked.elements())
        assert there.sum().item() == 1 and sum("item" in line for line in traffic.asked) == 1
    with Traffic() as traffic:  # what a kernel takes along, and what one fills
        there.mul(torch.ones(())), torch.where(there > 0, 2.0, there), there.new_full((2,), 3.0)
        there[0] = 1.0
        torch.as_tensor(there, device=META)
    assert not traffic.sent and not traffic.asked


def test_an_update_sends_one_tensor_for_each_group():
    groups = [{"params": [torch.nn.Parameter(torch.empty(4, 4, device=META)) for _ in range(5)]} for _ in range(2)]
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer = HalfMomentAdamW(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    with Traffic() as traffic:
        optimizer.step()
    assert traffic.sent.total() == 2 and not traffic.asked


NETWORKS = {
    "edm": {},
    "vp": {"parameterization": "vp"},
    "flow": {"parameterization": "flow"},
    **{family: {"family": family, **changes} for family, changes in FAMILY_CHANGES.items()},
    "st_dit": {"family": "st_dit"},
}
XL = "stable diffusion xl"


def denoiser_of(name):
    if name != XL:
        return TorchDenoiser(DiT(config(**NETWORKS[name])), device=META)
    pytest.importorskip("diffusers", reason="diffusers is not installed (megadit[diffusers])")
    settings = USUAL | UNETS["xl"]
    return TorchDenoiser(UNet(UNetConfig(settings=settings, prediction="noise", pixels_per_latent=2)), device=META)


def steps(sampler, denoise):
    """How often three steps ask `denoise`, without traffic but for that of the first call."""
    x, sigmas = torch.empty(2, 4, 2, 4, 4, device=META).double(), torch.tensor([8.0, 2.0, 0.5, 0.0]).double()
    calls = []

    def counted(x, sigma_B):
        calls.append(sigma_B)
        return denoise(x, sigma_B)

    counted(x.float(), sigmas[:1].float().expand(2))  # what is kept for all noise levels is sent by the first call
    with Traffic() as traffic:
        SAMPLERS[sampler](counted, x, sigmas)
    assert not traffic.sent and not traffic.asked, (traffic.sent, traffic.asked)
    return len(calls) - 1


@pytest.mark.parametrize("network", [*NETWORKS, XL])
def test_a_network_that_is_sampled_asks_for_nothing_and_sends_nothing(network):
    """What a recorded graph would hold."""
    denoiser, width = denoiser_of(network), 40 if network == XL else 16
    given = Conditioning(
        torch.randn(2, 5, width), torch.tensor([5, 0]), torch.full((2,), 8.0), pooled_BP=torch.randn(2, 20)
    ).to(META)
    frames = slice(1 if network == XL else 2)
    assert steps("euler", lambda x, sigma_B: denoiser(x[:, :, frames], sigma_B, given).expand_as(x)) == 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_asks_for_nothing_and_sends_nothing(sampler):
    assert steps(sampler, lambda x, sigma_B: x / 2) >= 3


def test_layouts_of_a_pack_are_sent_once():
    layout = PackLayout.pack([Segment((1, 2, 4), 3), Segment((1, 2, 2), 0)], capacity=20, text_capacity=6)
    with Traffic() as traffic:
        tensors = layout.on(META)
        for name in ("segment_of_token_S", "positions_S3", "bounds", "text_bounds", "is_sample_S"):
            assert getattr(tensors, name).shape == getattr(layout.on("cpu"), name).shape
        assert layout.rows.of_token(META).shape == (20,)
    assert traffic.sent.total() == 1 and not traffic.asked
