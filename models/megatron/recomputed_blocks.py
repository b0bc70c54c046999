"""Blocks that keep their inputs alone, and are computed again in backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

from torch import Tensor, nn

from megadit.models.networks.blocks import BlockStack
from megadit.models.ops.ledger import cheap_values_recomputed, recomputed


class RecomputedBlocks(BlockStack):
    """Blocks, each within `arithmetic()`; the first `num_recomputed` keep their inputs and nothing else."""

    def __init__(
        self, blocks: dict[str, nn.Module], num_recomputed: int, arithmetic: Callable[[], AbstractContextManager]
    ) -> None:
        super().__init__(blocks)
        self.num_recomputed = num_recomputed
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, *context) -> Tensor:
        """Tokens [S, B, D] after all blocks, of tokens [S, B, D]."""
        for index, block in enumerate(self.values()):
            if index < self.num_recomputed:
                x = recomputed(partial(self._compute, block), x, *context)
            else:
                with cheap_values_recomputed():
                    x = self._compute(block, x, *context)
        return x

    def first(self, count: int) -> "RecomputedBlocks":
        """The first of them, the same modules, computed as here."""
        return RecomputedBlocks(dict(islice(self.items(), count)), self.num_recomputed, self.arithmetic)

    def _compute(self, block: nn.Module, x: Tensor, *context) -> Tensor:
        with self.arithmetic():
            return block(x, *context)
