"""Statistics of the gradients of all parameters and the activations of all blocks."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadit.train.engine.setup import Training

Sums = dict[str, tuple[float, int, float]]
"""Name -> sum of squares, count, largest absolute value; replicas on several ranks do not change the mean."""


class Statistics:
    """Context that records the outputs of all DiT blocks; afterwards `found` has statistics of them and of gradients.

    {"activation" | "gradient": {name: {"rms", "max"}}}, over all ranks; gradients are those that the optimizer used,
    after clipping. Empty if `is_due` is false.
    """

    def __init__(self, training: Training, *, is_due: bool) -> None:
        self.found: dict[str, Any] = {}
        self._training = training
        self._is_due = is_due
        self._outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def __enter__(self) -> "Statistics":
        blocks = _blocks(self._training) if self._is_due else ()
        self._hooks = [block.register_forward_hook(self._watch(name)) for name, block in blocks]
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if not self._is_due or error_type is not None:
            return
        self.found = {
            "activation": _over_all_ranks({name: _add(values) for name, values in self._outputs.items()}),
            "gradient": _over_all_ranks(_gradients(self._training)),
        }

    def _watch(self, name: str):
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs[name].append(_measure(output[0] if isinstance(output, tuple) else output))

        return note


def _blocks(training: Training) -> Iterator[tuple[str, nn.Module]]:
    for part in training.parts:
        for name, module in part.module.dit.named_modules():
            if name.rpartition(".")[0] == "blocks":
                yield name, module


def _gradients(training: Training) -> Sums:
    measured = defaultdict(list)
    for owned in training.tensors.ownership.slices:
        factor = getattr(owned.optimizer, "gradient_factor", None)  # of gradients that it scales as it reads them
        if owned.key.grad is not None:
            measured[owned.name].append(_measure(owned.key.grad, factor))
        elif getattr(owned.parameter, "main_grad", None) is not None:  # not copied where it is float32 already
            measured[owned.name].append(_measure(owned.cut(owned.parameter.main_grad), factor))
    return {name: _add(values) for name, values in measured.items()}


@torch.no_grad()
def _measure(x: Tensor, factor: Tensor | None = None) -> Tensor:
    """[sum of squares, count, largest] of x, of any shape, times a scalar; left on the device."""
    x = (x.to_local() if hasattr(x, "to_local") else x).detach().float()
    x = x if factor is None else x * factor.float()
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    return torch.stack([x.square().sum(), x.new_tensor(x.numel()), largest])


def _add(values: list[Tensor]) -> tuple[float, int, float]:
    squares, counts, largest = torch.stack(values).double().T
    return squares.sum().item(), int(counts.sum()), largest.max().item()


def _over_all_ranks(mine: Sums) -> dict[str, dict[str, float]]:
    everyones: list[Sums] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    names = sorted({name for part in everyones for name in part})
    found = {}
    for name in names:
        squares, counts, largest = zip(*(part[name] for part in everyones if name in part), strict=True)
        found[name] = {"rms": math.sqrt(sum(squares) / max(1, sum(counts))), "max": max(largest)}
    return found
