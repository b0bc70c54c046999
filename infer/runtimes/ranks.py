"""Sampling on several ranks under torchrun: replicas share the prompts; guidance passes, tokens, matrices are split.

world = replicas x guidance passes x context-parallel x tensor-parallel ranks; tensor-parallel ranks are adjacent
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.infer.sampling.guidance import Ask, Branch, Evaluate, in_one_batch
from megadit.models.megatron.interfaces import join_ranks
from megadit.models.shared.errors import UserError

Item = TypeVar("Item")
PASSES = 2
"""Ranks that share the conditional and unconditional pass."""


def world_size() -> int:
    """Processes that were started together (by torchrun); 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process prints errors and progress."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Place of this process among those that were started together."""

    replica: int
    """Index of its replica."""
    num_replicas: int
    writes: bool
    """Whether it writes its replica's files: the other ranks of the replica hold the same videos."""
    passes: ProcessGroup | None
    """Ranks that share the conditional and unconditional pass."""

    def mine(self, items: Sequence[Item], work: Sequence[float] = ()) -> list[Item]:
        """The items of this replica, in their order: those of all replicas are about equal in `work` (default: in
        number)."""
        return [items[place] for place in self._places(work or [1] * len(items))[self.replica]]

    def _places(self, work: Sequence[float]) -> list[list[int]]:
        """Places of each replica's items: the most work first, each to the replica that has the least."""
        places, loads = [[] for _ in range(self.num_replicas)], [0.0] * self.num_replicas
        for place in sorted(range(len(work)), key=lambda place: -work[place]):
            replica = loads.index(min(loads))
            places[replica].append(place)
            loads[replica] += work[place]
        return [sorted(own) for own in places]

    def gathered(self, mine: list[Item], work: Sequence[float]) -> list[Item] | None:
        """All items in their original order (before `mine`), on the first process; None on the others."""
        if world_size() == 1:
            return mine
        parts = [None] * world_size() if is_first() else None
        dist.gather_object((self.replica, self.writes, mine), parts)
        if parts is None:
            return None
        places = self._places(work)
        found = {
            place: item
            for replica, writes, items in parts
            if writes
            for place, item in zip(places[replica], items, strict=True)
        }
        return [found[place] for place in range(len(work))]


ALONE = Ranks(replica=0, num_replicas=1, writes=True, passes=None)
"""A single process."""


def start(*, tensor: int, context: int, split_guidance: bool) -> Ranks:
    """Joins the processes that torchrun started, and finds this one's place among them.

    Raises:
        UserError: if they cannot be divided this way.
    """
    shared, world = tensor * context, world_size()
    per_replica = shared * (PASSES if split_guidance else 1)
    if min(tensor, context) < 1 or world % per_replica:
        raise UserError(
            f"{world} processes cannot be divided into replicas of {per_replica} (tp_size={tensor}, cp_size={context}"
            f"{', cfg_parallel' if split_guidance else ''}): start a multiple of {per_replica} with torchrun "
            f"--nproc-per-node {per_replica} -m megadit.infer.generate.command ..."
        )
    if world == 1:
        return ALONE
    if not dist.is_initialized():
        join_ranks("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    passes = _pass_group(rank, shared, world) if split_guidance else None
    return Ranks(
        replica=rank // per_replica,
        num_replicas=world // per_replica,
        writes=rank % per_replica == 0,
        passes=passes,
    )


def finish() -> None:
    """Waits for the processes that torchrun started, and destroys their groups, without which gloo aborts at exit."""
    if world_size() > 1:
        dist.barrier()
        dist.destroy_process_group()


def _pass_group(rank: int, shared: int, world: int) -> ProcessGroup:
    """The group of this rank and its counterpart for guidance; torch requires that every process creates all groups."""
    own = None
    for replica_start in range(0, world, PASSES * shared):
        for place in range(replica_start, replica_start + shared):
            members = [place + half * shared for half in range(PASSES)]
            group = dist.new_group(members)
            own = group if rank in members else own
    return own


def split_over_ranks(group: ProcessGroup) -> Evaluate:
    """Evaluate branches on the ranks of `group`, each some of them; all ranks get all outputs.

    A single branch is evaluated by all ranks, which needs no exchange.
    """
    rank, size = group.rank(), group.size()

    def evaluate(branches: Sequence[Branch]) -> Ask:
        if len(branches) == 1:
            return in_one_batch(branches)
        most, ask_own = -(-len(branches) // size), in_one_batch(branches[rank::size])

        def ask(x: Tensor, sigma_B: Tensor) -> list[Tensor]:
            own = ask_own(x, sigma_B)
            own += [torch.zeros_like(x)] * (most - len(own))
            gathered = [torch.empty(most, *x.shape, dtype=x.dtype, device=x.device) for _ in range(size)]
            dist.all_gather(gathered, torch.stack(own).to(x.dtype), group=group)
            return [gathered[place % size][place // size] for place in range(len(branches))]

        return ask

    return evaluate


def device_name(name: str) -> str:
    """Device of one of several processes if none is named: the GPU of its local rank."""
    if name == "auto" and world_size() > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name
