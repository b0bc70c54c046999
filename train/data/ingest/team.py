"""The processes of `torchrun` that prepare one data set together; alone without it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

LONGEST_WAIT = timedelta(days=7)
"""For the slowest rank's share of a stage."""


@dataclass(frozen=True, slots=True)
class Team:
    """Rank r of n does the units r, r + n, ... of each stage, and waits for the others after it."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_team() -> Iterator[Team]:
    """The team that the environment of torchrun describes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team()
        return
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    try:
        yield Team(rank=dist.get_rank(), size=size)
    finally:
        dist.destroy_process_group()
