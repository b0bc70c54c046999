"""Processors that multiply no half precision, and whether any such product is asked of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.models import machine

HALF = {torch.bfloat16, torch.float16}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution")
"""torch's operations that multiply matrices, and the attentions."""


class _Counting(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.rpartition("::")[2].lstrip("_")
        if name.startswith((*PRODUCTS, "scaled_dot_product")):
            inputs = (x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor))
            self.found += [name] if any(x.dtype in HALF and x.is_cpu for x in inputs) else []
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_half_products() -> Iterator[list[str]]:
    """The products in half precision on the CPU that this thread asks for within, by name, backward passes included."""
    found: list[str] = []
    with _Counting(found):
        yield found


@contextmanager
def without_half_products() -> Iterator[None]:
    """Within, this processor is one that has no instructions for half precision."""
    with mock.patch.object(machine, "_has_products", lambda dtype: False):
        machine.multiplies.cache_clear()
        yield
    machine.multiplies.cache_clear()
