"""Chains of small operations as few kernels, where that pays.

A compiler makes a kernel anew for whatever it takes for another kind of inputs: other strides, sides of length 1. One
chain that meets too many kinds, or that the compiler cannot make, runs as it is written.
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
"""Options of inductor: cheap values that are needed twice are recomputed, not written to memory and read; sums along
rows and across them are one kernel for all sizes (docs/kernels.md)."""


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
_NUM_KINDS: Counter[Callable] = Counter()
"""Number of kinds of inputs that each chain was compiled for."""
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
    """A function that its first call compiles; later ones go straight to the kernels.

    The compiler checks at each call whether its inputs are such as it compiled for, which takes a host several times as
    long as a GPU computes. `_kind` says all of that: what one `_Compiled` is called with would always pass.
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
    """The compiler takes no sides for one because they are equal in the first call, and numbers for constants."""
    from torch._dynamo import config as tracing
    from torch.fx.experimental import _config as shapes

    with shapes.patch(use_duck_shape=False), tracing.patch(specialize_float=True):
        yield


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of what a graph was compiled to."""

    kernels: Callable[..., Any]
    declared: list[Any]
    """The compiler's description of each input: a tensor with symbolic sides, or a symbol."""
    arguments: tuple[Any, ...]
    gave: Sequence[Any]

    def repeated(self, inputs: tuple[Any, ...], found: Any) -> Callable[..., Any] | None:
        """The function that gave `found` for `inputs` by this call, as the same call for others of their kind.

        None where its inputs and outputs are not those of the function.
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
        """Return a function that finds input `at` of the kernels among the function's inputs: one of them, or a side
        of one; other numbers are constants of the kind."""
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
    """The same numbers in a tensor without a history, at the start of its storage, whose width is a constant.

    With the width left open a kernel would divide for every number, and could not keep a row in its registers; a place
    within a storage would be one more number that the compiler keeps open.
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
    """Key of the inputs that a compiled function is valid for: device, dtype, width, strides, which sides are 0 or 1,
    and whether 32 bits can index it."""
    if not isinstance(x, Tensor):
        return type(x), x
    ones = tuple(min(side, 2) for side in x.shape)
    strides = None if x.is_contiguous() else x.stride()
    return x.device, x.dtype, x.shape[-1] if _has_width(x) else None, ones, strides, x.numel() < 2**31


def _is_the_compilers(error: Exception) -> bool:
    """Whether it comes from compiling, before anything was computed."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, FailOnRecompileLimitHit | TorchDynamoException)
