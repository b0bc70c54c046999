"""Blocks with activation recomputation: they save only their inputs, and are recomputed in backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

from torch import Tensor, nn

from megadit.models.networks.blocks import BlockStack
from megadit.models.ops.ledger import cheap_values_recomputed, recomputed


class RecomputedBlocks(BlockStack):
    """Blocks, each within `arithmetic()`; the first `num_recomputed` save only their inputs."""

    def __init__(
        self, blocks: dict[str, nn.Module], num_recomputed: int, arithmetic: Callable[[], AbstractContextManager]
    ) -> None:
        super().__init__(blocks)
        self.num_recomputed = num_recomputed
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, *context) -> Tensor:
        """Apply all blocks to tokens [S, B, D]."""
        for index, block in enumerate(self.values()):
            if index < self.num_recomputed:
                x = recomputed(partial(self._compute, block), x, *context)
            else:
                with cheap_values_recomputed():
                    x = self._compute(block, x, *context)
        return x

    def first(self, count: int) -> "RecomputedBlocks":
        """Return the first `count` blocks, sharing their modules."""
        return RecomputedBlocks(dict(islice(self.items(), count)), self.num_recomputed, self.arithmetic)

    def _compute(self, block: nn.Module, x: Tensor, *context) -> Tensor:
        with self.arithmetic():
            return block(x, *context)
