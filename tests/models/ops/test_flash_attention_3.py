"""FlashAttention-3: where it is switched on, and that our calls reach its kernels with the right arguments."""

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megadit.models.megatron.parallelism import block_attention
from megadit.models.megatron.parallelism.block_attention import attend_block, attend_block_backward
from megadit.models.ops.attention import attend_by_length_group, attend_varlen, switch_to_flash_attention_3
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch does not call FlashAttention-3")

PACK = PackLayout.pack([Segment((1, 2, 4), 3), Segment((1, 1, 5), 2)], capacity=16, text_capacity=6)


@pytest.fixture
def package(monkeypatch):
    """A package of its name, without kernels."""
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def switched(monkeypatch):
    """What the switch was called with."""
    calls = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    switch_to_flash_attention_3.cache_clear()
    yield calls
    switch_to_flash_attention_3.cache_clear()


def attend_on_a_gpu():
    """The first uses of both attentions, of tensors without numbers."""
    with FakeTensorMode():
        q, bounds = torch.empty(16, 1, 2, 8, device="cuda", dtype=torch.bfloat16), torch.empty(3, device="cuda")
        tensors = SimpleNamespace(bounds=bounds, text_bounds=bounds)
        for cross in (False, True):
            attend_varlen(q, q, q, SimpleNamespace(on=lambda device: tensors, longest=8, longest_text=8), cross)
        block_attention._kernel(q)


@pytest.mark.parametrize(
    ("capability", "is_used"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_a_hopper_gpu_is_switched_once(monkeypatch, package, switched, capability, is_used):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    attend_on_a_gpu()
    assert switched == ["FA3"] * is_used and switch_to_flash_attention_3() is is_used


@pytest.mark.parametrize("impls", [None, lambda: ["FA4"]], ids=["torch 2.9", "another kernel alone"])
def test_an_older_torch_is_not_switched(monkeypatch, package, switched, impls):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delattr(torch.nn.attention, "list_flash_attention_impls")
    if impls is not None:
        monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", impls, raising=False)
    attend_on_a_gpu()
    assert not switched


def test_nothing_is_switched_without_the_package(monkeypatch, switched):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    attend_on_a_gpu()
    assert not switched


class Recorded:
    """In the place of torch's library of kernels."""

    kernels: dict = {}

    def __init__(self, *_):
        self.kernels.clear()

    def impl(self, name, function, key):
        self.kernels[name] = function


def test_functions_of_torch_take_what_the_operations_give_them(monkeypatch):
    monkeypatch.setattr(fa3, "Library", Recorded)
    fa3._fa3_register_kernels()
    ours = ["_flash_attention", "_scaled_dot_product_flash_attention"]
    assert {f"{ours[0]}_forward", f"{ours[0]}_backward", ours[1], f"{ours[1]}_backward"} <= Recorded.kernels.keys()
    for name, function in Recorded.kernels.items():
        operation, _, overload = name.partition(".")
        arguments = getattr(getattr(torch.ops.aten, operation), overload or "default")._schema.arguments
        taken = inspect.signature(function).parameters
        assert all(argument.name in taken for argument in arguments), name
        in_order = [argument.name for argument in arguments if not argument.kwarg_only]
        assert in_order == [x.name for x in taken.values() if x.kind is x.POSITIONAL_OR_KEYWORD], name


class OnCpu(torch.library.Library):
    """Kernels of CUDA's key under that of CPUs, which has none for these operations."""

    def __init__(self, namespace, kind, key):
        super().__init__(namespace, kind, "CPU")

    def impl(self, name, function, key):
        super().impl(name, function, "CPU")


def segments(tensors, bounds, num_batches):
    """[s, N, K] of each segment: of [T, N, K] between bounds, or of [B, S, N, K]."""
    if bounds is None:
        return [[x[b] for x in tensors] for b in range(num_batches)]
    return [[x[i:j] for x in tensors] for i, j in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]


def forward(q, k, v, *arguments):
    """The kernel's result and logarithms of sums, computed by definition."""
    (out, cu_q, cu_k), scale = arguments[3:6], arguments[20]
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0]) if cu_q is not None else torch.empty(len(q), q.shape[2], q.shape[1])
    lses = lse.unbind() if cu_q is None else lse.split(cu_q.diff().tolist(), dim=1)
    pairs = zip(segments([q, out], cu_q, len(q)), segments([k, v], cu_k, len(q)), lses, strict=True)
    for (q_sNK, out_sNK), (k_lNK, v_lNK), lse_Ns in pairs:
        scores = torch.einsum("sNK,lNK->Nsl", q_sNK, k_lNK) * (scale or q.shape[-1] ** -0.5)
        out_sNK.copy_(torch.einsum("Nsl,lNK->sNK", scores.softmax(-1), v_lNK))
        lse_Ns.copy_(scores.logsumexp(-1))
    return out, lse, None, None


def backward(grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *arguments):
    """The kernel's gradients, computed by definition from the logarithms of sums."""
    scale = arguments[4] or q.shape[-1] ** -0.5
    lses = lse.unbind() if cu_q is None else lse.split(cu_q.diff().tolist(), dim=1)
    of_q, of_k = segments([grad, q, out, dq], cu_q, len(q)), segments([k, v, dk, dv], cu_k, len(q))
    for (g, q_sNK, o, dq_sNK), (k_lNK, v_lNK, dk_lNK, dv_lNK), lse_Ns in zip(of_q, of_k, lses, strict=True):
        P = (torch.einsum("sNK,lNK->Nsl", q_sNK, k_lNK) * scale - lse_Ns[..., None]).exp()
        dS = P * (torch.einsum("sNK,lNK->Nsl", g, v_lNK) - (g * o).sum(-1).T[..., None]) * scale
        dq_sNK.copy_(torch.einsum("Nsl,lNK->sNK", dS, k_lNK))
        dk_lNK.copy_(torch.einsum("Nsl,sNK->lNK", dS, q_sNK))
        dv_lNK.copy_(torch.einsum("Nsl,sNK->lNK", P, g))


@pytest.fixture
def on_cpu(monkeypatch, package):
    """Torch's switch, real, with definitions in the place of the package's kernels."""
    kernels, seen = SimpleNamespace(fwd=forward, bwd=backward), []
    for name in ("fwd", "bwd"):
        counted = getattr(kernels, name)
        setattr(kernels, name, lambda *a, of=counted: seen.append(of.__name__) or of(*a))
    monkeypatch.setattr(torch.ops, "flash_attn_3", kernels, raising=False)
    monkeypatch.setattr(fa3, "Library", OnCpu)
    for refuses in ("_fa3_forward_support_error", "_fa3_backward_support_error"):
        monkeypatch.setattr(fa3, refuses, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    switch_to_flash_attention_3.cache_clear()
    assert switch_to_flash_attention_3() and torch.nn.attention.current_flash_attention_impl() == "FA3"
    yield seen
    torch.nn.attention.restore_flash_attention_impl()
    switch_to_flash_attention_3.cache_clear()


def normal(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_packs_reach_its_kernels_by_varlen_attention(on_cpu, cross):
    keys = PACK.text_capacity if cross else PACK.capacity
    q, k, v = normal((PACK.capacity, 1, 2, 8), (keys, 1, 2, 8), (keys, 1, 2, 8))
    is_sample = PACK.on("cpu").is_sample_S[:, None, None]
    ours, theirs = (
        torch.autograd.grad((attend(q, k, v, PACK, cross) * is_sample).square().sum(), (q, k, v))
        for attend in (attend_varlen, attend_by_length_group)
    )
    assert on_cpu == ["forward", "backward"]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_ring_reaches_its_kernels(on_cpu, monkeypatch):
    q, k, v, grad = normal((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8), (2, 5, 3, 8))
    with torch.no_grad():
        out, lse = attend_block(q, k, v)
        expected = [out, lse, *attend_block_backward(grad, q, out, lse, k, v)]
        monkeypatch.setattr(
            block_attention, "_kernel", lambda q: (block_attention._flash_forward, block_attention._flash_backward)
        )
        found = [*attend_block(q, k, v), *attend_block_backward(grad, q, out, lse, k, v)]
    assert on_cpu == ["forward", "backward"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
