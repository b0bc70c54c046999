"""Lets Megatron-core (0.16.1 to 0.19.2) run on a machine without CUDA, over gloo. Does nothing where CUDA is present.

Megatron names the device "cuda" and asks `torch.cuda` for the current one throughout. `install` answers with the CPU.
It patches torch for the whole process, so only entry points call it, before anything imports `megatron.core`.

Plain functions are patched, and no TorchFunctionMode is installed: a mode is popped while `Tensor.backward` runs (which
is itself an overridable function), and costs a Python call per operation.
"""

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "linspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
_FACTORY_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_installed = False


def install() -> None:
    """Makes Megatron use the CPU in place of a GPU; a second call and a machine with CUDA change nothing."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _redirect_factories()
    _redirect_tensor_methods()
    _stand_in_for_cuda()
    _pad_uneven_all_gather()
    _silence()
    _import_without_compiler()


def install_for_experts() -> None:
    """Patches Megatron's token dispatcher: tensors that it copies to the CPU as arrays may be arrays already."""
    if torch.cuda.is_available():
        return
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(function: Callable) -> Callable:
    """`function` with `device="cuda"` read as the CPU; pinned memory needs an accelerator and is left out."""

    @functools.wraps(function)
    def redirected(*args, **kwargs):
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _redirect_factories() -> None:
    # `with torch.device("meta")` collects these factories at its first use: let it see the originals
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # forward-mode differentiation first compiles backward functions, which needs the original factories
    forward_ad._maybe_load_decompositions = lambda: None
    for name in _FACTORY_METHODS:
        setattr(Tensor, name, _on_cpu(getattr(Tensor, name)))


def _redirect_tensor_methods() -> None:
    to, type_ = Tensor.to, Tensor.type

    @functools.wraps(to)
    def to_cpu(tensor, *args, **kwargs):
        args = [_CPU if _names_cuda(arg) else arg for arg in args]
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return to(tensor, *args, **kwargs)

    @functools.wraps(type_)
    def type_on_cuda(tensor, *args, **kwargs):
        # Megatron's optimizers sort parameters by type() and refuse what is not "torch.cuda.FloatTensor" and the like
        if args or kwargs:
            return type_(tensor, *args, **kwargs)
        return type_(tensor).replace("torch.", "torch.cuda.")

    Tensor.to = to_cpu
    Tensor.type = type_on_cuda
    Tensor.cuda = lambda tensor, *args, **kwargs: tensor


class _InOrder:
    """A CUDA stream or event; on the CPU everything runs in order."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, *args) -> None: ...

    def wait_event(self, *args) -> None: ...

    def record_event(self, *args) -> "_InOrder":
        return self

    def synchronize(self) -> None: ...


def _stand_in_for_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    # dynamo rejects one object under two names: each gets its own
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream = _InOrder
    cuda.current_stream = lambda *args, **kwargs: _InOrder()
    cuda.default_stream = lambda *args, **kwargs: _InOrder()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _pad_uneven_all_gather() -> None:
    """Gloo gathers tensors of one size only; Megatron's layer-wise optimizer gathers what each rank updated."""
    all_gather = dist.all_gather

    @functools.wraps(all_gather)
    def padded(tensor_list, tensor, group=None, async_op=False):
        sizes = [part.numel() for part in tensor_list]
        if len(set(sizes)) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op
        gathered = [tensor.new_empty(max(sizes)) for _ in sizes]
        all_gather(gathered, F.pad(tensor.flatten(), (0, max(sizes) - tensor.numel())), group=group)
        for part, whole, size in zip(tensor_list, gathered, sizes, strict=True):
            part.view(-1).copy_(whole[:size])

    dist.all_gather = padded


def _import_without_compiler() -> None:
    """Imports Megatron without torch's compiler, for fusions that these networks do not call, and without wandb, for an
    engine of language models: they are more than half of its time."""
    compiler, torch.compile = torch.compile, lambda function=None, **options: function or (lambda each: each)
    is_hidden = sys.modules.setdefault("wandb", None) is None
    try:
        importlib.import_module("megatron.core.optimizer")
    finally:
        torch.compile = compiler
        if is_hidden:
            del sys.modules["wandb"]


def _silence() -> None:
    """Hide Megatron's advice on faster GPU kernels, which does not concern a CPU."""
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
