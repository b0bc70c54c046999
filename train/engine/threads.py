"""Threads of a rank on a CPU: all of its cores, or one where its work is too small to share, or others keep cores busy.

Sums over other threads have other last bits: the choice is kept in checkpoints; `train.num_threads` or OMP_NUM_THREADS
make it beforehand, for runs that are to be equal to the bit.
"""

import torch
import torch.distributed as dist

from megadit.models.shared.cores import asked_threads
from megadit.train.config.schema import RunConfig

WITH_ALL, WITH_ONE = 2, 3
"""Steps that are compared; the first one prepares what the others find."""


class Threads:
    """Lets a run's first steps choose its threads."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._all = torch.get_num_threads()
        is_open = device.type == "cpu" and config.train.num_threads is None and asked_threads() is None
        self._is_open = is_open and self._all > 1
        self._seconds: dict[int, float] = {}

    def go_on(self, step: int, chosen: int) -> None:
        """After `step` steps, in which so many threads were chosen (0: none)."""
        if self._is_open and (chosen or step):
            torch.set_num_threads(min(chosen or self._all, self._all))
            self._is_open = False

    def begin(self, step: int) -> None:
        if self._is_open and step == WITH_ONE:
            torch.set_num_threads(1)

    def end(self, step: int, seconds: float) -> int:
        """Note the seconds of a step; return the threads used from now on, alike on all ranks, or 0 if undecided."""
        self._seconds[step] = seconds
        if not self._is_open or step != WITH_ONE:
            return 0
        slowest = torch.tensor([self._seconds.get(WITH_ALL, 0.0), seconds])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._is_open, chosen = False, 1 if slowest[1] < slowest[0] else self._all
        torch.set_num_threads(chosen)
        return chosen
