"""Fusion of chains of small operations into few kernels, where that is faster.

A compiler builds a new kernel for each kind of inputs: other strides, dimensions of size 1. A chain with too many
kinds, or one that fails to compile, runs uncompiled.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from operator import itemgetter
from threading import Lock
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

COMPILED_ON = frozenset({"cuda"} if find_spec("triton") else ())
"""Devices where memory traffic costs more than the arithmetic; on a CPU, data is already in the caches."""
KERNELS_ON = COMPILED_ON
"""Devices that run kernels written in Triton."""
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
    "triton.mix_order_reduction_non_strict_mode": True,
}
"""Options of inductor: cheap values that are needed twice are recomputed, not written to memory and read; reductions
along rows and columns are one kernel for all sizes (docs/kernels.md)."""


def by_inductor(graph: GraphModule, inputs: list) -> Callable:
    """Compiles a graph into as few kernels as possible."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=options_there())


def options_there() -> dict[str, int | bool]:
    """The `OPTIONS` that this torch supports."""
    return {name: OPTIONS[name] for name in OPTIONS.keys() & torch._inductor.list_options()}


BACKEND: Callable = by_inductor
MOST_VARIANTS = 64
"""Maximum kinds of inputs that one chain is compiled for."""
_NUM_KINDS: Counter[Callable] = Counter()
"""Number of kinds of inputs that each chain was compiled for."""
_AS_WRITTEN: set[Callable] = set()
"""Chains that failed to compile."""


def is_compiled(x: Tensor) -> bool:
    """Whether chains of operations on `x`, of any shape, are compiled."""
    return x.device.type in COMPILED_ON and not torch.compiler.is_compiling()


def two_or_more(x_G: Tensor) -> Tensor:
    """The rows [G, ...]; when compiling, a single row gets an unused second one: packs of one segment would otherwise
    be compiled separately."""
    return F.pad(x_G, (0, 0) * (x_G.ndim - 1) + (0, 1)) if len(x_G) == 1 and is_compiled(x_G) else x_G


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels, which compute in float32, support `x`, of any shape."""
    is_there = x.device.type in KERNELS_ON and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    return is_there and triton_works(x.device)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device; Triton needs a C compiler, which not every machine has."""
    try:
        from megadit.models.ops.row_sums import gate_backward

        one, row_S = torch.ones(1, 1, 1, device=device), torch.zeros(1, dtype=torch.long, device=device)
        gate_backward(one, one[0], one, row_S, torch.arange(2, dtype=torch.int32, device=device))
    except Exception as error:  # any error of compilers and drivers
        reason = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"Triton kernels do not run, so that a step takes longer: {reason}", stacklevel=2)
        return False
    return True


def fused(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs); the first input is a tensor, and determines the device.

    If `is_compiled`, the function is compiled, once for each width and for all other sizes: its operations become one
    or two passes over memory, and intermediate values are not stored. `function` has no gradients (call it within an
    autograd function); it may change its inputs in place.
    """
    if not is_compiled(inputs[0]) or function in _AS_WRITTEN:
        return function(*inputs)
    try:
        return compiled(function, tuple(map(_kind, inputs)))(*inputs)
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
    from torch._dynamo.exc import FailOnRecompileLimitHit

    _NUM_KINDS[function] += 1
    if _NUM_KINDS[function] > MOST_VARIANTS:
        raise FailOnRecompileLimitHit(f"more than {MOST_VARIANTS} kinds of inputs")
    return _Compiled(function)


class _Compiled:
    """A function that is compiled at its first call; later calls run the kernels directly.

    The compiler checks its inputs at every call, which takes a host several times as long as a GPU computes. `_kind`
    determines all that it checks: the inputs of one `_Compiled` would always pass.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # the compiler's limit counts all variants of one code object: each kind has its own
        copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
        self._backend = torch._dynamo.lookup_backend(BACKEND)
        self._checked = torch.compile(copy, fullgraph=True, dynamic=True, backend=self._compile)
        self._calls: list[_Call] = []
        self._direct: Callable[..., Any] | None = None
        self._lock = Lock()

    def __call__(self, *inputs: Any) -> Any:
        if self._direct is not None:
            return self._direct(*inputs)
        inputs = tuple(map(_plain, inputs))
        with self._lock, _as_kinds_say():
            self._calls.clear()
            found = self._checked(*inputs)
            if len(self._calls) == 1:
                self._direct = self._calls.pop().repeated(inputs, found)
        return found

    def _compile(self, graph: GraphModule, inputs: list) -> Callable[..., Any]:
        kernels = self._backend(graph, inputs)
        declared = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]

        def watched(*arguments: Any) -> Any:
            gave = kernels(*arguments)
            self._calls.append(_Call(kernels, declared, arguments, gave))
            return gave

        return watched


@contextmanager
def _as_kinds_say() -> Iterator[None]:
    """Makes the compiler treat equal sizes as independent, and numbers as constants."""
    from torch._dynamo import config as tracing
    from torch.fx.experimental import _config as shapes

    with shapes.patch(use_duck_shape=False), tracing.patch(specialize_float=True):
        yield


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a compiled graph."""

    kernels: Callable[..., Any]
    declared: list[Any]
    """The compiler's description of each input: a tensor with symbolic sides, or a symbol."""
    arguments: tuple[Any, ...]
    gave: Sequence[Any]

    def repeated(self, inputs: tuple[Any, ...], found: Any) -> Callable[..., Any] | None:
        """The function that returned `found` for `inputs` by this call, as the same call for others of their kind.

        None if its inputs and outputs are not those of the function.
        """
        sources = [self._source(at, inputs) for at in range(len(self.arguments))]
        results = found if isinstance(found, tuple) else (found,)
        at = [next((n for n, value in enumerate(self.gave) if value is result), None) for result in results]
        if any(n is None and result is not None for n, result in zip(at, results, strict=True)):
            return None
        kernels, is_tuple = self.kernels, isinstance(found, tuple)

        def call(*inputs: Any) -> Any:
            gave = kernels(*[source(inputs) for source in sources])
            if is_tuple:
                return tuple(None if n is None else gave[n] for n in at)
            return None if at[0] is None else gave[at[0]]

        return call

    def _source(self, at: int, inputs: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        """Return a function that finds input `at` of the kernels among the function's inputs: one of them, or a
        dimension of one; other numbers are constants of the kind."""
        value, symbol = self.arguments[at], self.declared[at]
        if isinstance(value, Tensor) and (index := _index(value, inputs)) is not None:
            return itemgetter(index)
        if isinstance(symbol, torch.SymInt):
            for known, declared in zip(self.arguments, self.declared, strict=True):
                for dim, side in enumerate(declared.shape if isinstance(declared, Tensor) else ()):
                    if isinstance(side, torch.SymInt) and side.node.expr == symbol.node.expr:
                        return partial(_side, _index(known, inputs), dim)
        return lambda inputs: value


def _index(value: Tensor, inputs: tuple[Any, ...]) -> int | None:
    return next((index for index, x in enumerate(inputs) if x is value), None)


def _side(index: int, dim: int, inputs: tuple[Any, ...]) -> int:
    return inputs[index].shape[dim]


def _plain(x: Any) -> Any:
    """The same values in a tensor without history, at the start of its storage, with constant width.

    With symbolic width a kernel would divide for every element, and could not keep a row in registers; an offset in a
    storage would be another symbolic number.
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
    """Key of the inputs that a compiled function is valid for: device, dtype, width, strides, which dimensions are 0 or
    1, and whether 32-bit indices suffice."""
    if not isinstance(x, Tensor):
        return type(x), x
    ones = tuple(min(side, 2) for side in x.shape)
    strides = None if x.is_contiguous() else x.stride()
    return x.device, x.dtype, x.shape[-1] if _has_width(x) else None, ones, strides, x.numel() < 2**31


def _is_the_compilers(error: Exception) -> bool:
    """Whether an error comes from compilation, before anything was computed."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, FailOnRecompileLimitHit | TorchDynamoException)
