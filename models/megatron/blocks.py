"""How a rank's blocks compute: the kind of their linears, and what becomes of their activations until backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megadit.models.megatron.graphed_blocks import GraphedBlocks
from megadit.models.megatron.linears.fp8 import fp8_linear
from megadit.models.megatron.linears.int8 import int8_linear
from megadit.models.megatron.linears.parallel import SplitLinear, split_linear
from megadit.models.megatron.linears.te import fp8_arithmetic, te_linear
from megadit.models.networks.attention import SelfAttention
from megadit.models.networks.blocks import BlockStack
from megadit.models.networks.registry import towers
from megadit.models.ops.ledger import cheap_values_recomputed, recomputed
from megadit.models.ops.offload import HostMemory, fetch_before

Recompute = Literal["none", "selective", "full"]
LinearKind = Literal["local", "fp8", "transformer_engine", "int8"]
LINEARS: dict[str, SplitLinear] = {
    "local": split_linear,
    "fp8": fp8_linear,
    "transformer_engine": te_linear,
    "int8": int8_linear,
}
"""`fp8` multiplies as `TransformerConfig.fp8` says, `int8` is frozen."""


def arrange_blocks(
    network: nn.Module,
    config: TransformerConfig,
    impl: LinearKind,
    *,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    cpu_offloading_num_layers: int = 0,
    cuda_graph_max_segments: int | None = None,
) -> None:
    """Replaces the blocks of a network of `parallelize`, whose linears are of the kind `impl`.

    Args:
        recompute: what is recomputed in backward: nothing, attention (`selective`), blocks (`full`).
        recompute_num_layers: how many blocks of the chunk are recomputed; None means all.
        cpu_offloading_num_layers: how many blocks of the chunk save their activations in host memory.
        cuda_graph_max_segments: replay blocks for packs with at most so many segments; None: never.
    """
    if recompute == "selective":
        for attention in network.modules():
            if isinstance(attention, SelfAttention):
                attention.core = partial(recomputed, attention.core)
    arithmetic = fp8_arithmetic(config) if impl == "transformer_engine" else nullcontext
    for tower in towers(network):
        most = (recompute_num_layers or len(tower.blocks)) if recompute == "full" else 0
        blocks = dict(tower.blocks.items())
        made = RecomputedBlocks(blocks, most, arithmetic, cpu_offloading_num_layers)
        tower.blocks = made if cuda_graph_max_segments is None else GraphedBlocks(blocks, cuda_graph_max_segments)


class RecomputedBlocks(BlockStack):
    """Blocks, each within `arithmetic()`; the first `num_recomputed` save only their inputs, and the first
    `num_offloaded` of the others save in host memory."""

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        num_recomputed: int,
        arithmetic: Callable[[], AbstractContextManager],
        num_offloaded: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.num_recomputed, self.num_offloaded = num_recomputed, num_offloaded
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, *context) -> Tensor:
        """Apply all blocks to tokens [S, B, D]."""
        before = None
        for index, block in enumerate(self.values()):
            if index < self.num_recomputed:
                x = recomputed(partial(self._compute, block), x, *context)
                continue
            memory = self._memory_of(index, block, x, context)
            with cheap_values_recomputed(memory):
                x = self._compute(block, x, *context)
            if before is not None:
                fetch_before(x, before)
            before = memory
        return x

    def first(self, count: int) -> "RecomputedBlocks":
        """Return the first `count` blocks, sharing their modules."""
        blocks = dict(islice(self.items(), count))
        return RecomputedBlocks(blocks, self.num_recomputed, self.arithmetic, self.num_offloaded)

    def _memory_of(self, index: int, block: nn.Module, x: Tensor, context: tuple) -> HostMemory | None:
        if index >= self.num_recomputed + self.num_offloaded or not torch.is_grad_enabled():
            return None
        shared = (leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor))
        return HostMemory(x.device, chain(block.parameters(), block.buffers(), shared))

    def _compute(self, block: nn.Module, x: Tensor, *context) -> Tensor:
        with self.arithmetic():
            return block(x, *context)
