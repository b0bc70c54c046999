"""What a block saves for its backward is in host memory until then, comes back in time, and changes no gradient."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.megatron.blocks import RecomputedBlocks
from megadit.models.networks.dit import DiT
from megadit.models.ops import ledger
from megadit.models.ops.offload import HostMemory
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from tests.bundles import random_network

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES = {
    "megadit": {},
    "cosmos": {"family": "cosmos", "adaln_lora_dim": 8},
    "wan": {"family": "wan"},
    "moviegen": {"family": "moviegen"},
    "st_dit": {"family": "st_dit"},
    "flow": {"parameterization": "flow"},
}


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(ledger, "SMALL", 0)


def network(device: str, **config) -> DiT:
    shape = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 16}
    return random_network(DiTConfig(**shape | config)).to(device)


def losses_gradients(dit: DiT, device: str) -> list[Tensor]:
    """Of a step with two samples of other sizes."""
    generator = torch.Generator().manual_seed(1)
    segments = [Segment((2, 4, 4), 5), Segment((1, 2, 6), 3)]
    capacity, texts = sum(segment.num_tokens for segment in segments), 8
    layout = PackLayout.pack(segments, capacity=capacity, text_capacity=texts)
    tokens = torch.randn(capacity, 1, dit.config.patch_dim, generator=generator).to(device)
    text = torch.randn(texts, 1, 16, generator=generator).to(device)
    sigma, fps = torch.tensor([0.3, 2.0], device=device), torch.tensor([16.0, 24.0], device=device)
    dit.zero_grad()
    dit.forward_packed(tokens, sigma, text, fps, layout).square().sum().backward()
    return [parameter.grad for parameter in dit.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_gradients_are_the_same(config, device, monkeypatch):
    dit = network(device, **config)
    expected = losses_gradients(dit, device)
    sent, copy = [], HostMemory._sent
    monkeypatch.setattr(HostMemory, "_sent", lambda self, storage: sent.append(self) or copy(self, storage))
    blocks = dict(dit.blocks.items())
    for num_offloaded in (2, 3):
        sent.clear()
        dit.blocks = RecomputedBlocks(blocks, 0, ledger.nullcontext, num_offloaded)
        found = losses_gradients(dit, device)
        assert len(set(sent)) == num_offloaded, "blocks"
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


class Scaled(nn.Module):
    """A block that saves tensors in several shapes and orders, and some twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.own: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, self.weight).sin()
        self.own.append(weakref.ref(y.untyped_storage()))
        return x + y * y.t().contiguous().t() * y.view(2, 3, 6).flatten(0, 1).exp()


NUM_SAVED = 6
"""Of a `Scaled`: its input, the sine's input and result, a transposed copy, an exponential, and a product."""


def stack(num_offloaded: int) -> RecomputedBlocks:
    torch.manual_seed(0)
    return RecomputedBlocks({str(index): Scaled() for index in range(3)}, 0, ledger.nullcontext, num_offloaded)


def test_nothing_of_it_stays_on_the_device():
    x = torch.randn(6, 6, requires_grad=True)
    for num_offloaded in (0, 2):
        blocks = stack(num_offloaded)
        out = blocks(x)
        gc.collect()
        held = [block.own[0]() is not None for block in blocks.values()]
        assert held == [index >= num_offloaded for index in range(3)]
        out.sum().backward()


def test_a_storage_is_copied_once_and_parameters_never(monkeypatch):
    sent, copy, blocks = [], HostMemory._sent, stack(1)
    monkeypatch.setattr(HostMemory, "_sent", lambda self, storage: sent.append(storage._cdata) or copy(self, storage))
    out = blocks(torch.randn(6, 6, requires_grad=True))
    assert out.requires_grad and len(sent) == len(set(sent)) == NUM_SAVED
    assert not {parameter.untyped_storage()._cdata for parameter in blocks.parameters()} & set(sent)


def test_a_block_comes_back_while_the_one_behind_computes(monkeypatch):
    """And is gone when its gradients are known."""
    events, fetch, blocks = [], HostMemory.fetch, stack(2)
    memories: list[HostMemory] = []
    make = blocks._memory_of

    def memory_of(index, *rest):
        memory = make(index, *rest)
        memories.append(memory)
        return memory

    def fetched(self):
        if self._there is None:
            events.append(f"fetched {memories.index(self)}")
        fetch(self)

    monkeypatch.setattr(blocks, "_memory_of", memory_of)
    monkeypatch.setattr(HostMemory, "fetch", fetched)
    out = blocks(torch.randn(6, 6, requires_grad=True))
    for index, block in enumerate(blocks.values()):
        block.weight.register_hook(lambda _, index=index: events.append(f"gradient {index}"))
    out.sum().backward()
    assert events == ["fetched 1", "gradient 2", "fetched 0", "gradient 1", "gradient 0"]
    gone = [weakref.ref(memory) for memory in memories if memory is not None]
    memories.clear()
    gc.collect()
    assert out.grad_fn is not None and [each() for each in gone] == [None, None]


def test_without_gradients_nothing_is_copied(monkeypatch):
    monkeypatch.delattr(HostMemory, "_sent")
    with torch.no_grad():
        stack(2)(torch.randn(6, 6))
