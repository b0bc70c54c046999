"""Load balance of experts: token counts over all ranks, and the router bias of the next step."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megadit.models.networks.experts import ExpertMLP
from megadit.models.networks.registry import towers
from megadit.train.engine.setup import Training

Counts = list[list[int]]
"""Tokens of each expert of each layer in one step, the same on all ranks; [] for a network without experts."""


def exchange_counts(training: Training) -> Counts:
    """Sum the token counts over all ranks, for the next step to balance; every rank calls this after each step."""
    experts = training.config.model.experts
    if not experts.num_experts or experts.routing != "token_choice":
        return []
    shape = training.config.model.num_layers, experts.num_experts
    counts_LE = torch.zeros(shape, dtype=torch.long, device=training.groups.device)
    for index, mlp in _expert_mlps(training):
        counts_LE[index] = mlp.load.take_counts()
    dist.all_reduce(counts_LE)  # no two ranks have counted the same token in the same layer
    counts = counts_LE.tolist()
    restore_counts(training, counts)
    return counts


def restore_counts(training: Training, counts: Counts) -> None:
    """Set the counts of the previous step, on a resume."""
    for index, mlp in _expert_mlps(training) if counts else ():
        mlp.load.set_counts(torch.tensor(counts[index]))


def largest_load(counts: Counts) -> float:
    """Largest load of an expert, as a multiple of the mean of its layer."""
    return max(max(layer) * len(layer) / max(1, sum(layer)) for layer in counts)


def _expert_mlps(training: Training) -> Iterator[tuple[int, ExpertMLP]]:
    """(layer, experts) of this rank."""
    for part in training.parts:
        for tower in towers(part.module.dit):
            for index, block in tower.blocks.items():
                if isinstance(block.mlp, ExpertMLP):
                    yield int(index), block.mlp
