"""Workers that prepare one data set together: ranks of `torchrun`, tasks of a job array, both, or one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megadit.models.megatron.interfaces import join_ranks
from megadit.models.shared.errors import UserError, report_once

LONGEST_WAIT = timedelta(days=7)
"""Maximum time to wait for the slowest rank in a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Shard of the work of a stage, for one of several independent jobs."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """`3/100` is the fourth of a hundred.

        Raises:
            UserError: for anything else.
        """
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise UserError(f"--shard: {text!r} is no shard; write NUMBER/COUNT, from 0/100 to 99/100")
        return cls(number=int(number), count=int(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Ranks of one job, which wait for each other after each stage."""

    rank: int = 0
    size: int = 1
    shard: Shard = Shard()  # noqa: RUF009  (it is frozen)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_whole(self) -> bool:
        """Whether there are no other workers on the data set."""
        return self.shard.count == 1

    def mine(self, num_units: int) -> range:
        """Units of a stage for this rank of this job."""
        return range(self.shard.number * self.size + self.rank, num_units, self.shard.count * self.size)

    @property
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    def wait(self) -> None:
        """Wait for all ranks; raises UserError if one has ended."""
        if self.size == 1:
            return
        try:
            dist.barrier()
        except RuntimeError as error:
            with report_once():
                raise UserError("a rank of this preparation has ended before its stage; see what it says") from error


@contextmanager
def join_workers(shard: Shard) -> Iterator[Workers]:
    """Join the workers that torchrun's environment describes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Workers(shard=shard)
        return
    join_ranks("gloo", timeout=LONGEST_WAIT)
    workers = Workers(rank=dist.get_rank(), size=size, shard=shard)
    if workers.device.type == "cuda":
        torch.cuda.set_device(workers.device)
    try:
        yield workers
    finally:
        dist.destroy_process_group()
