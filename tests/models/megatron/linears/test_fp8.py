"""Products in eight bits by torch: against the same roundings in float64, and against what kernels of GPUs ask for."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megadit.models.configs.config import DiTConfig
from megadit.models.megatron import extensions
from megadit.models.megatron.linears import fp8, shares
from megadit.models.megatron.linears.fp8 import (
    E4M3,
    E5M2,
    OF_GRADIENTS,
    Format,
    Fp8Linear,
    WeightCodes,
    _EightBitProduct,
    codes_of,
    scale_of,
    weights_unchanged,
)
from megadit.models.megatron.linears.shares import Share
from megadit.models.megatron.plan import COLUMN
from megadit.models.networks.registry import build_network
from megadit.models.ops import fusion, ledger
from megadit.models.ops.ledger import recomputed
from megadit.models.ops.reference import Linear
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORMATS = [E4M3, E5M2]

pytestmark = pytest.mark.skipif(not extensions.has_eight_bit_products(), reason="this torch has no products in 8 bits")


def random(*shape, seed=0, size=1.0):
    """Of sizes that differ much, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def rounded(x, of: Format):
    """float64: what eight bits make of a tensor, by numbers of the host."""
    x = x.detach().double()
    factor = 2.0 ** (of.top - 1 - math.floor(math.log2(x.abs().max())))
    return (x * factor).to(of.dtype).double() / factor


def expected(x, weight, grad, of_gradients):
    """y, dx and dW in float64, of tensors that are rounded alike."""
    x, weight, grad = rounded(x, E4M3), rounded(weight, E4M3), rounded(grad, of_gradients)
    return x @ weight.T, grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


def computed(x, weight, grad, of_gradients):
    layer = Fp8Linear(Share(*weight.shape), of_gradients).to(weight)
    layer.weight.data.copy_(weight)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad


# float32: another order of sums; bfloat16: each result is rounded once, by 2^-9 at most
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
@pytest.mark.parametrize("kind", OF_GRADIENTS)
def test_product_and_gradients_are_those_of_rounded_numbers(dtype, allowed, kind):
    inputs = random(16, 2, 64), random(48, 64, seed=1, size=0.02), random(16, 2, 48, seed=2, size=1e-6)
    inputs = [x.to(dtype) for x in inputs]
    found, exact = computed(*inputs, OF_GRADIENTS[kind]), expected(*inputs, OF_GRADIENTS[kind])
    plain = inputs[0].double() @ inputs[1].double().T
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() < allowed * theirs.norm()
    assert 1e-2 < (found[0].double() - plain).norm() / plain.norm() < 6e-2, "three bits of mantissa"


@pytest.mark.parametrize("of", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1e-30, 3e-7, 1.0, 255.9, 256.0, 448.0, 1e30, 3e38])
def test_scales_are_powers_of_two_that_use_the_range_and_never_leave_it(of, size):
    x = torch.tensor([size, -size / 3])
    scale = scale_of(x, of)
    assert math.frexp(scale.factor.item())[0] == 0.5 and (scale.factor * scale.step).item() == 1
    codes = codes_of(x[None], scale, of).float()
    assert codes.isfinite().all() and LARGEST[of.dtype] / 4 < codes.abs().max() <= LARGEST[of.dtype]


def test_nothing_stays_nothing_and_what_is_not_finite_is_seen():
    weight = random(16, 32)
    assert not computed(torch.zeros(16, 32), weight, torch.zeros(16, 16), E5M2)[0].any()
    for bad in (float("nan"), float("inf")):
        x = random(16, 32)
        x[3, 5] = bad
        assert not computed(x, weight, torch.ones(16, 16), E5M2)[0][3].isfinite().all()


def test_a_part_of_a_matrix_is_rounded_as_the_whole():
    """But for what is too small beside the rest for any format: ranks of any layout multiply the same numbers."""
    whole = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 0.01
    part = whole[:16] * 0.3
    by_parts = torch.cat([rounded(part, E4M3), rounded(whole[16:], E4M3)])
    together = rounded(torch.cat([part, whole[16:]]), E4M3)
    assert torch.equal(by_parts, together) and part.max() < 0.5 * whole.max()


def test_without_gradients_the_product_is_that_of_the_weights():
    layer = Fp8Linear(Share(48, 32, 48), E5M2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = random(7, 32)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight) + layer.bias)


def test_autograd_keeps_what_it_keeps_of_other_linears():
    layer, kept = Fp8Linear(Share(48, 32), E5M2), []
    x = random(16, 32).requires_grad_()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    large = [tensor for tensor in kept if tensor.numel() > 1]
    assert [tensor.data_ptr() for tensor in large] == [x.data_ptr(), layer.weight.data_ptr()]


@pytest.fixture
def casts(monkeypatch):
    """How often a matrix was scaled and cast, by its shape."""
    counts = Counter()

    def counted(name, function, x, *others, **options):
        counts[name, tuple(x.shape)] += 1
        return function(x, *others, **options)

    for name in ("scale_of", "codes_of", "turned_codes_of"):
        monkeypatch.setattr(fp8, name, partial(counted, name, getattr(fp8, name)))
    return counts


def micro_batches(layer):
    """Results and gradients of three micro-batches, of which one is computed again in its backward."""
    found = []
    for seed in range(3):
        x = random(16, 32, seed=seed).requires_grad_()
        y = recomputed(layer, x) if seed == 1 else layer(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
    return [*found, layer.weight.grad]


@pytest.mark.parametrize("caches", [False, True])
def test_a_weight_is_scaled_once_a_step_and_cast_once_with_a_cache(casts, caches):
    shape = (48, 32)
    layer, other = (Fp8Linear(Share(*shape), E5M2) for _ in range(2))
    with torch.no_grad():
        layer.weight.copy_(random(*shape))
        other.weight.copy_(layer.weight)
    expected = micro_batches(other)
    assert (casts["scale_of", shape], casts["codes_of", shape], casts["turned_codes_of", shape]) == (4, 4 + 3, 3)
    casts.clear()
    with weights_unchanged([nn.Sequential(layer)], caches=caches):
        found = micro_batches(layer)
        within = casts["scale_of", shape], casts["codes_of", shape], casts["turned_codes_of", shape]
    assert within == ((1, 1, 1) if caches else (1, 4 + 3, 3)), "the stand-in for the kernel of both casts once"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert layer.weight_codes is None, "freed after the step"


def test_the_next_step_casts_the_new_weights():
    """Written as the distributed optimizer writes them, to a view that does not count as a version."""
    layer, found = Fp8Linear(Share(48, 32), E5M2), []
    version = layer.weight._version
    for seed in range(2):
        layer.weight.data.copy_(random(48, 32, seed=seed))
        with weights_unchanged([layer], caches=True):
            found.append(layer(random(16, 32).requires_grad_()))
        assert torch.equal(found[-1], layer(random(16, 32).requires_grad_()))
    assert layer.weight._version == version and not torch.equal(*found)


@pytest.fixture
def kept(monkeypatch):
    """What autograd keeps in blocks of a large network: of each memory once, in bytes."""
    monkeypatch.setattr(ledger, "SMALL", 0)
    sizes, pack = {}, ledger._Ledger._pack

    def packed(self, tensor):
        found = pack(self, tensor)
        for one in [found] if isinstance(found, torch.Tensor) else found.recipe.inputs:
            if isinstance(one, torch.Tensor) and one.numel() > 1:
                sizes[one.untyped_storage().data_ptr()] = one, one.untyped_storage().nbytes()
        return found

    monkeypatch.setattr(ledger._Ledger, "_pack", packed)
    return sizes


@pytest.mark.parametrize("family", ["megadit", "nemo", "moviegen", "st_dit"])
def test_what_linears_read_is_kept_for_others_anyway(monkeypatch, kept, family):
    """But for the text, once for all layers, and on CPUs the input of a block: codes of x would take twice as much."""
    width, words, tokens = 256, 16, 32
    config = DiTConfig(
        **dict(num_layers=2, hidden_size=width, num_attention_heads=2, in_channels=4, patch_spatial=2),
        **dict(crossattn_emb_size=16, family=family),
    )
    network = build_network(config).bfloat16()
    for path, plain in list(network.blocks.named_modules()):
        if type(plain) is Linear and "modulation" not in path:
            layer = Fp8Linear(Share(plain.out_features, plain.in_features), E5M2).bfloat16()
            network.blocks.set_submodule(path, layer)
    layout = PackLayout.pack([Segment((2, 4, 4), words)], capacity=tokens, text_capacity=words)
    x, text, one = torch.randn(tokens, 1, config.patch_dim), torch.randn(words, 1, 16), torch.ones(1)

    def bytes_kept():
        kept.clear()
        network.forward_packed(x.bfloat16(), one, text.bfloat16(), one, layout)
        return sum(size for _, size in kept.values())

    forward, now, codes = _EightBitProduct.forward, bytes_kept(), []

    def without_x(ctx, *inputs):
        y = forward(ctx, *inputs)
        ctx.save_for_backward(inputs[1])
        codes.append(inputs[0].numel())
        return y

    monkeypatch.setattr(_EightBitProduct, "forward", staticmethod(without_x))
    assert 2 * words * config.text_size <= now - bytes_kept() < sum(codes) / 2


def test_tokens_of_other_ranks_are_gathered_again(monkeypatch):
    gathered = []

    def gather(x, group):
        gathered.append(torch.cat([x, 2 * x]))
        return gathered[-1]

    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(shares.parallel_state, "get_tensor_model_parallel_group", lambda: group)
    monkeypatch.setattr(shares, "gather_from_sequence_parallel_region", gather)
    monkeypatch.setattr(ledger, "SMALL", 0)
    share = shares.share_of(nn.Linear(32, 96, bias=False), COLUMN, SimpleNamespace(sequence_parallel=True))
    layer, x = Fp8Linear(share, E5M2), random(8, 32).requires_grad_()
    torch.nn.init.normal_(layer.weight)
    with ledger.cheap_values_recomputed():
        y = layer(x)
    gathered[0].detach().zero_()  # kept by nobody
    y.square().sum().backward()
    assert len(gathered) == 2
    _, of_whole, of_weight = computed(torch.cat([x, 2 * x]), layer.weight, 2 * y.detach(), E5M2)
    assert torch.equal(layer.weight.grad, of_weight) and torch.equal(x.grad, of_whole[:8] + 2 * of_whole[8:])


def test_frozen_weights_get_no_gradient():
    layer = Fp8Linear(Share(48, 32), E5M2).requires_grad_(False)
    torch.nn.init.normal_(layer.weight)
    x = random(16, 32).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad.any()


def step_on_a_gpu(tokens: int, inputs: int, outputs: int, caches: bool = False) -> None:
    """Of tensors that a GPU would hold: torch checks sizes, types and orders, nothing is computed."""
    kept = SimpleNamespace(needs_input_grad=(True, True, False, False))
    kept.save_for_backward = lambda *tensors: setattr(kept, "saved_tensors", tensors)
    with FakeTensorMode():  # autograd itself asks for a GPU's streams
        x, weight, grad = (
            torch.empty(size, device="cuda", dtype=torch.bfloat16)
            for size in ((tokens, 1, inputs), (outputs, inputs), (tokens, 1, outputs))
        )
        y = _EightBitProduct.forward(kept, x, weight, E5M2, WeightCodes(caches=caches))
        of_x, of_weight, *_ = _EightBitProduct.backward(kept, grad)
    assert (y.shape, of_x.shape, of_weight.shape) == (grad.shape, x.shape, weight.shape)
    assert y.dtype == of_x.dtype == of_weight.dtype == torch.bfloat16 and y.is_cuda


def test_kernels_of_gpus_take_what_they_are_given(monkeypatch):
    monkeypatch.setattr(fusion, "COMPILED_ON", frozenset())
    for caches in (False, True):
        step_on_a_gpu(32, 64, 48, caches)
    for sizes in ((32, 40, 48), (32, 64, 40), (24, 64, 48)):  # not in sixteens: rules refuse them before a run
        with pytest.raises(RuntimeError, match="divisible by 16"):
            step_on_a_gpu(*sizes)


def test_where_it_runs(monkeypatch):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    asked = []
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: asked.append(key) or has_kernel(op, "CPU")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, can in {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True, (10, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert extensions.has_eight_bit_products() == can
    assert set(asked) == {"CUDA"}
