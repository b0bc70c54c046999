"""Choice of a rank's CPU threads by measurement: all of its cores, or one if that is faster.

The number of threads changes the last bits of sums, so the choice is saved in checkpoints. For bit-identical runs set
`train.num_threads` or OMP_NUM_THREADS.
"""

import torch
import torch.distributed as dist

from megadit.models.ops.crossover import tune_for_cpu
from megadit.models.shared.resources import asked_threads
from megadit.train.config.schema import RunConfig

WITH_ALL, WITH_ONE = 2, 3
"""Steps whose durations are compared; step 1 warms up."""


class Threads:
    """Chooses the number of threads in the first steps of a run."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._all = torch.get_num_threads()
        is_open = device.type == "cpu" and config.train.num_threads is None and asked_threads() is None
        self._is_open = is_open and self._all > 1
        self._seconds: dict[int, float] = {}

    def go_on(self, step: int, chosen: int) -> None:
        """Resume after `step` steps with the threads chosen before (0: not yet)."""
        if self._is_open and (chosen or step):
            self._set(min(chosen or self._all, self._all))
            self._is_open = False

    def begin(self, step: int) -> None:
        if self._is_open and step == WITH_ONE:
            self._set(1)

    def end(self, step: int, seconds: float) -> int:
        """Record the seconds of a step; return the chosen threads, the same on all ranks, or 0 if undecided."""
        self._seconds[step] = seconds
        if not self._is_open or step != WITH_ONE:
            return 0
        slowest = torch.tensor([self._seconds.get(WITH_ALL, 0.0), seconds])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._is_open, chosen = False, 1 if slowest[1] < slowest[0] else self._all
        self._set(chosen)
        return chosen

    def _set(self, threads: int) -> None:
        torch.set_num_threads(threads)
        tune_for_cpu()  # which variants are faster depends on it
