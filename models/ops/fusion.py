"""Chains of small operations as few kernels, where that pays."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def fused(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs); the first input is a tensor, and says where.

    On a GPU the function is compiled, once for all sizes: its operations become one or two passes over memory, and
    nothing between them is stored. On a CPU, where each pass is already in its caches, it runs as it is written.
    `function` takes no gradients (call it within an autograd function); it may change its inputs in place.
    """
    if inputs[0].is_cuda and not torch.compiler.is_compiling() and _has_triton():
        return compiled(function)(*inputs)
    return function(*inputs)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
