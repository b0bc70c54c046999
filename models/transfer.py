"""Small tensors from the CPU to a GPU, many by one copy that nobody waits for.

A copy from ordinary memory stops the host until the GPU has done all that it was told before. Memory that is pinned is
copied in its turn, while the host goes on; torch gives it to others only when the copy is done.
"""

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Tree = TypeVar("Tree")

_ALIGNMENT = 64
"""Bytes: every tensor begins where kernels may read it at full speed."""


def sent_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The same tensors, of any shapes and types, on another device; on the CPU these tensors themselves.

    They share one block of memory, which lives as long as any of them.
    """
    device = torch.device(device)
    if device.type == "cpu" or not tensors:
        return list(tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda" and torch.cuda.is_available())
    for tensor, part in zip(tensors, _parts(block, sizes, tensors), strict=True):
        part.copy_(tensor)
    return _parts(block.to(device, non_blocking=True), sizes, tensors)


def sent_as_one(tree: Tree, device: torch.device | str) -> Tree:
    """What tuples, lists and dictionaries hold, with all of their tensors on another device: `sent_together`."""
    leaves, form = tree_flatten(tree)
    sent = iter(sent_together([leaf for leaf in leaves if isinstance(leaf, Tensor)], device))
    return tree_unflatten([next(sent) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def _parts(block: Tensor, sizes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """A block's bytes as tensors of the shapes and types of `like`."""
    pieces = zip(block.split(list(sizes)), like, strict=True)
    return [piece[: prod(x.shape) * x.itemsize].view(x.dtype).view(x.shape) for piece, x in pieces]
