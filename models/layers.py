"""The layer kit: the few kinds of layer a DiT is built from.

The DiT is written once, as single-device code, against these methods. `TorchLayers` gives plain torch modules; the
Megatron kits (`megadit.models.megatron`) give modules with the same keys that are split over ranks. A linear says
what it does to the sequence: with sequence parallelism the video tokens of a rank are a slice (`sharded`), while
text and modulation are the same on every rank (`replicated`) and must not be gathered.

Shapes: S video tokens, B batch, N heads, K head dim.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megadit.models.axial import Arrangement, move
from megadit.models.experts import Experts, compute_here
from megadit.models.layout import Layout
from megadit.models.ops.attention import attention
from megadit.models.ops.ledger import cheap_values_recomputed
from megadit.models.ops.linear import Linear

Sequence = Literal["sharded", "replicated"]


class LayerKit(Protocol):
    """What a DiT asks of its layers."""

    is_first_part: bool
    """Whether the network begins here: with patches, not with the activations of the part before."""
    is_last_part: bool
    """Whether it ends here: in patches."""

    def column_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = False
    ) -> nn.Module:
        """A linear whose output features (whole heads) are split over ranks.

        `sequence` says whether its input's tokens are a slice of the sequence, to be gathered, or all of them.
        """

    def row_linear(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """A linear whose input features are split over ranks; gives tokens back as they were sharded."""

    def replicated_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = True
    ) -> nn.Module:
        """A linear that every rank holds whole.

        `sequence` says which tokens its output meets: where they are a slice, its gradient is a partial sum.
        """

    def replicated_parameter(self, value: Tensor) -> nn.Parameter:
        """A parameter that every rank holds whole, and whose gradient is a partial sum where tokens are a slice."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, cross: bool) -> Tensor:
        """softmax(q k^T / sqrt(K)) v within each segment, for this rank's heads; see `ops.attention`."""

    def block_stack(self, make_block: Callable[[], nn.Module], num_layers: int) -> nn.Module:
        """The blocks this rank computes, under their global indices; called like one block."""

    def experts(self, make: Callable[[int, int], Experts], num_experts: int, hidden: int) -> Experts:
        """This rank's part of `num_experts` experts, from make(experts, width of their hidden values)."""

    def choose(self, rule: Callable[[Tensor, Layout], Tensor], score_SBE: Tensor, layout: Layout) -> Tensor:
        """rule(scores of all tokens, layout), of which this rank's tokens get their rows."""

    def through_experts(self, experts: Experts, x_SBD: Tensor, weight_SBE: Tensor, chosen_SBE: Tensor) -> Tensor:
        """sum of weight_e FFN_e(x) over the chosen experts of each token, wherever they are."""

    def shard_sequence(self, x_SBD: Tensor) -> Tensor:
        """This rank's slice of the tokens, from all of them."""

    def gather_sequence(self, x_SBD: Tensor) -> Tensor:
        """All tokens, from this rank's slice."""

    def move(self, x_SBD: Tensor, layout: Layout, source: Arrangement, target: Arrangement) -> Tensor:
        """This rank's tokens in another arrangement."""


class BlockStack(nn.ModuleDict):
    """Blocks in order, each under its global index, so that keys do not depend on who holds which."""

    def forward(self, x: Tensor, *context) -> Tensor:
        for block in self.values():
            with cheap_values_recomputed():
                x = block(x, *context)
        return x


class TorchLayers:
    """Torch modules: one device holds everything."""

    is_first_part = is_last_part = True

    def column_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = False
    ) -> nn.Module:
        return Linear(in_features, out_features, bias=bias)

    def row_linear(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        return Linear(in_features, out_features, bias=bias)

    def replicated_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = True
    ) -> nn.Module:
        return Linear(in_features, out_features, bias=bias)

    def replicated_parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, cross: bool) -> Tensor:
        return attention(q, k, v, layout, cross)

    def block_stack(self, make_block: Callable[[], nn.Module], num_layers: int) -> nn.Module:
        return BlockStack({str(index): make_block() for index in range(num_layers)})

    def experts(self, make: Callable[[int, int], Experts], num_experts: int, hidden: int) -> Experts:
        return make(num_experts, hidden)

    def choose(self, rule: Callable[[Tensor, Layout], Tensor], score_SBE: Tensor, layout: Layout) -> Tensor:
        return rule(score_SBE, layout)

    def through_experts(self, experts: Experts, x_SBD: Tensor, weight_SBE: Tensor, chosen_SBE: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # a graph has no tensors whose size depends on values
            return experts.on_all_tokens(x_SBD, weight_SBE * chosen_SBE)
        return compute_here(experts, x_SBD, weight_SBE, chosen_SBE)

    def shard_sequence(self, x_SBD: Tensor) -> Tensor:
        return x_SBD

    def gather_sequence(self, x_SBD: Tensor) -> Tensor:
        return x_SBD

    def move(self, x_SBD: Tensor, layout: Layout, source: Arrangement, target: Arrangement) -> Tensor:
        return move(x_SBD, layout, source, target)
