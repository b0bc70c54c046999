"""Chains of small operations as few kernels, where that pays.

A compiler makes a kernel anew for whatever it takes for another kind of inputs: gradients, views, sides of length 1.
Chains are therefore called with tensors of one form, and one that still meets too many kinds, or that the compiler
cannot make, runs as it is written.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

COMPILED_ON = frozenset({"cuda"} if find_spec("triton") else ())
"""Devices where a pass over memory costs more than what is computed in it; on a CPU it is already in the caches."""
KERNELS_ON = COMPILED_ON
"""Devices that run kernels written in Triton."""
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
    "triton.mix_order_reduction_non_strict_mode": True,
}
"""Of inductor. What is computed of few numbers and needed twice is computed twice, not written to memory and read; sums
along rows and across them are one kernel for all sizes (docs/kernels.md)."""


def by_inductor(graph: GraphModule, inputs: list) -> Callable:
    """Compiles a graph, in as few kernels as may be."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=options_there())


def options_there() -> dict[str, int | bool]:
    """`OPTIONS` that this torch has."""
    return {name: OPTIONS[name] for name in OPTIONS.keys() & torch._inductor.list_options()}


BACKEND: Callable = by_inductor
MOST_VARIANTS = 64
"""Kinds of inputs that one chain is compiled for."""
_AS_WRITTEN: set[Callable] = set()
"""Chains that the compiler failed with."""


def is_compiled(x: Tensor) -> bool:
    """Whether chains of operations on `x`, of any shape, are compiled."""
    return x.device.type in COMPILED_ON and not torch.compiler.is_compiling()


def has_kernels(x: Tensor) -> bool:
    """Whether kernels written in Triton, which compute in float32, take `x`, of any shape."""
    is_there = x.device.type in KERNELS_ON and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    return is_there and triton_works(x.device)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether a kernel of our own runs there; Triton asks for a C compiler, which not every machine has."""
    try:
        from megadit.models.ops.row_sums import gate_backward

        one, row_S = torch.ones(1, 1, 1, device=device), torch.zeros(1, dtype=torch.long, device=device)
        gate_backward(one, one[0], one, row_S, torch.arange(2, dtype=torch.int32, device=device))
    except Exception as error:  # whatever compilers and drivers raise
        reason = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"kernels of our own do not run, so that a step takes longer: {reason}", stacklevel=2)
        return False
    return True


def fused(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs); the first input is a tensor, and says where.

    Where `is_compiled` says so the function is compiled, once for each width and for all other sizes: its operations
    become one or two passes over memory, and nothing between them is stored. `function` takes no gradients (call it
    within an autograd function); it may change its inputs in place.
    """
    if not is_compiled(inputs[0]) or function in _AS_WRITTEN:
        return function(*inputs)
    plain = tuple(_plain(x) for x in inputs)
    try:
        return compiled(function, tuple(_kind(x) for x in plain))(*plain)
    except Exception as error:
        if not _is_the_compilers(error):
            raise
        _AS_WRITTEN.add(function)
        reason = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"{function.__name__} runs uncompiled, more slowly: {reason}", stacklevel=2)
        return function(*inputs)


@cache
def compiled(function: Callable[..., Any], kinds: tuple[Hashable, ...]) -> Callable[..., Any]:
    """The compiled function for inputs of these `kinds`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # the limit counts all variants of one code object: each kind has its own
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(copy, fullgraph=True, dynamic=True, backend=BACKEND)


def _plain(x: Any) -> Any:
    """The same numbers in a tensor without a history, at the start of its storage, whose width is a constant.

    With the width left open a kernel would divide for every number, and could not keep a row in its registers.
    """
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    if x.storage_offset():
        x = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    if _has_width(x):
        torch._dynamo.mark_static(x, x.ndim - 1)
    return x


def _has_width(x: Tensor) -> bool:
    return x.ndim > 1 and x.is_floating_point()


def _kind(x: Any) -> Hashable:
    """What a compiled function is made for."""
    if not isinstance(x, Tensor):
        return type(x), x
    return x.ndim, x.dtype, x.shape[-1] if _has_width(x) else None


def _is_the_compilers(error: Exception) -> bool:
    """Whether it comes from compiling, before anything was computed."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, FailOnRecompileLimitHit | TorchDynamoException)
