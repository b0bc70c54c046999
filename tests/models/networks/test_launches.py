"""Kernels that a GPU is given for a layer, around the layers and around the network, counted: a small one takes longer
to launch than to run.

The meta device stands for the GPU. Each operation of torch that computes counts as one kernel, a compiled chain too;
kernels of our own and flash attention count as many as they are. What libraries launch inside is not seen.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from megadit.models.configs.config import DiTConfig
from megadit.models.networks import embeddings
from megadit.models.networks.dit import DiT
from megadit.models.ops import fusion, gated_residual, modulated_norm, qk_norm_rope
from megadit.models.ops.registry import force_variants
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.losses import edm_loss

row_sums = pytest.importorskip("megadit.models.ops.row_sums", reason="Triton is not installed")
META = torch.device("meta")
PACKS = {"one sample": [(4, 8, 8)], "eight": [(2, 8, 8), (1, 8, 8)] * 4}
MOST_OF_A_LAYER, MOST_AROUND = 70, 48
"""Kernels of a layer, forward and backward; and of the network around its layers.

Of these 48, 20 are matrix products, 7 gradients of biases, 6 SiLU, 4 the last norm and its modulation, 7 the text's
precision and null token, 2 sinusoids; 2 give a pack of one sample a second modulation row.
"""
MOST_AROUND_A_NETWORK = 50
"""Kernels of noise and loss without the network and its gradients, if no sample has conditioning tokens."""
NOTHING_COMPUTED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view"}


class Kernels(TorchDispatchMode):
    """Counts what computes within it, by the name of the operation."""

    def __init__(self):
        super().__init__()
        self.names, self.is_off = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not (self.is_off or function.is_view or name in NOTHING_COMPUTED):
            self.names.append(name)
        return function(*args, **kwargs or {})

    @contextmanager
    def known(self, *names):
        """These kernels, whatever operations stand for them."""
        self.names += names
        before, self.is_off = self.is_off, True
        yield
        self.is_off = before


@pytest.fixture
def kernels(monkeypatch):
    """A counter, on a meta device that is given what a GPU is."""
    counter = Kernels()

    def chain(function, *inputs):
        with counter.known(function.__name__):
            return function(*inputs)

    def norm_backward(grad, x, factor, *others):
        with counter.known("norm_backward", "sums of runs"):
            return torch.empty_like(x), torch.empty_like(factor), torch.empty_like(factor)

    def gate_backward(grad, gate, y, *others):
        with counter.known("gate_backward", "sums of runs"):
            return torch.empty_like(gate), torch.empty_like(y)

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            with counter.known("flash"):
                return torch.empty_like(q)

        @staticmethod
        def backward(ctx, grad):
            with counter.known("flash, prepared", "flash, backward", "flash, converted"):
                return tuple(map(torch.empty_like, ctx.saved_tensors))

    monkeypatch.setattr(fusion, "COMPILED_ON", {"meta"})
    monkeypatch.setattr(fusion, "KERNELS_ON", {"meta"})
    monkeypatch.setattr(fusion, "triton_works", lambda device: True)
    force_variants(["attention=varlen_flash"])
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *bounds: Flash.apply(q, k, v))
    monkeypatch.setattr(row_sums, "norm_backward", norm_backward)
    monkeypatch.setattr(row_sums, "gate_backward", gate_backward)
    for module in (embeddings, gated_residual, modulated_norm, qk_norm_rope):
        monkeypatch.setattr(module, "fused", chain)
    yield counter
    force_variants([])


def network_and_batch(samples, layers):
    """A network with so many layers, and a pack of samples for it."""
    config = DiTConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=2, in_channels=4, patch_spatial=2, crossattn_emb_size=16
    )
    segments = [Segment((frames, height // 2, width // 2), 5) for frames, height, width in samples]
    capacity, count = sum(segment.num_tokens for segment in segments), len(segments)
    layout = PackLayout.pack(segments, capacity=capacity, text_capacity=5 * count)
    with META:
        dit = DiT(config).bfloat16()
        tokens, text = torch.empty(capacity, 1, config.patch_dim), torch.empty(5 * count, 1, 16)
        of_samples, keys = torch.empty(count), torch.empty(count, dtype=torch.long)
    return dit, PackedBatch(tokens, text, layout, of_samples, keys, of_samples, ("",) * count)


def step(counter, samples, layers):
    """Names of the kernels of a forward and backward of a network with so many layers."""
    dit, batch = network_and_batch(samples, layers)
    inputs = batch.tokens_S1P.bfloat16(), batch.fps_G, batch.text_L1E, batch.fps_G, batch.layout
    dit.forward_packed(*inputs)  # sends what is kept
    counter.names.clear()
    with counter:
        out = dit.forward_packed(*inputs)
        out.backward(torch.empty_like(out))
    return list(counter.names)


@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS)
def test_few_kernels_are_launched(kernels, samples):
    one, three = (step(kernels, samples, layers) for layers in (1, 3))
    of_layer = (len(three) - len(one)) // 2
    assert 30 < of_layer <= MOST_OF_A_LAYER, (Counter(three) - Counter(one)).most_common()
    assert len(one) - of_layer <= MOST_AROUND, Counter(one).most_common()


@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS)
def test_few_kernels_are_launched_for_noise_and_loss(kernels, monkeypatch, samples):
    def network(dit, tokens, *conditions, **more):
        with kernels.known():
            return torch.empty_like(tokens).requires_grad_()

    monkeypatch.setattr(DiT, "forward_packed", network)
    dit, batch = network_and_batch(samples, 1)
    inputs = dit, batch, batch.fps_G, batch.tokens_S1P
    edm_loss(*inputs)  # sends what is kept
    kernels.names.clear()
    with kernels:
        edm_loss(*inputs).objective.backward()
    assert 20 < len(kernels.names) <= MOST_AROUND_A_NETWORK, Counter(kernels.names).most_common()
