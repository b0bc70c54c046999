"""Test cases of exported networks with adapters: different ones in each sample of a batch, several at once, and none.

In torch, adapters are attached to linears as in sampling; in the graph, they are inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.lora.adapters import chosen_targets, load_adapter, remove, set_scale
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.registry import SavedNetwork

SCALES: Mapping[str, Sequence[Sequence[float]]] = {
    "two in a slot": ([0.7, -1.0], [0.0, 1.0]),
    "one beside none": ([1.0, 0.0], [0.0, 0.0]),
}
"""Name of a case -> scales of two adapters, cycled over the samples."""
State = dict[str, Tensor]


def adapter_inputs(
    slots: AdapterInputs, batch: int, scales: Sequence[Sequence[float]]
) -> tuple[dict[str, Tensor], list[tuple[State, AdapterConfig, Tensor]]]:
    """Graph inputs of random adapters, and the adapters with their scales [B]; they share the rank of the inputs if it
    is more than one."""
    ranks = (slots.rank - slots.rank // 2, max(slots.rank // 2, 1))
    rows = [scales[sample % len(scales)] for sample in range(batch)]
    if slots.rank == 1:  # no rank left for a second one
        rows = [[one, 0.0 if one else other] for one, other in rows]
    adapters = []
    for number, rank in enumerate(ranks):
        state = random_state(slots, rank, seed=number)
        about = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=slots.targets)
        adapters.append((state, about, torch.tensor([row[number] for row in rows])))
    packed = [(slots.packed(state, about), scale_B) for state, about, scale_B in adapters]
    return slots.filled(batch, packed), adapters


def random_state(slots: AdapterInputs, rank: int, seed: int) -> State:
    """A random adapter state, whose changes are a fifth as large as the linears' inputs."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, target in chosen_targets(slots.config, slots.targets).items():
        shape = (rank, target.in_features)
        state[f"{name}.down"] = torch.randn(shape, generator=generator) * target.in_features**-0.5
        state[f"{name}.up"] = 0.1 * torch.randn(target.out_features, rank, generator=generator) * rank**-0.5
    return state


@contextmanager
def attached(dit: SavedNetwork, adapters: Sequence[tuple[State, AdapterConfig, Tensor]]) -> Iterator[None]:
    """Attach these adapters to the network, at their scales, within the block."""
    names = [f"case_{number}" for number in range(len(adapters))]
    try:
        for name, (state, about, scale_B) in zip(names, adapters, strict=True):
            load_adapter(dit, state, about, name)
            set_scale(dit, scale_B, name)
        yield
    finally:
        for name in names:
            remove(dit, name)
