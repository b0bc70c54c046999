"""A layout as the planner sees it: the sizes of the groups, and what it decides beside them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How `gpus` ranks share a run."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Chunks of layers that one pipeline rank holds."""
    context: int = 1
    context_comm: str = "ulysses"
    sequence_parallel: bool = False
    data_parallel: str = "ddp"
    recompute: str = "none"
    micro_batch_size: int = 1
    global_batch_size: int = 1

    @property
    def data(self) -> int:
        """Data-parallel copies."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    def groups(self) -> dict[str, np.ndarray]:
        """Who is in which group, [groups, members]: Megatron's order, tensor fastest, then context, data, pipeline."""
        ranks_pdct = np.arange(self.gpus).reshape(self.pipeline, self.data, self.context, self.tensor)
        axes = {"tensor": 3, "context": 2, "data": 1, "pipeline": 0}
        return {
            name: np.moveaxis(ranks_pdct, axis, -1).reshape(-1, ranks_pdct.shape[axis]) for name, axis in axes.items()
        }
