"""Sequence parallelism (arXiv 2205.05198): between the linears that tensor-parallel ranks share, each has some tokens;
within them some heads, of which some sums are over all.

Shapes: S video tokens, B batch, D width.
"""

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class ScatterTokens(nn.Module):
    """This rank's slice of the tokens, from all of them."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        """This rank's slice, [S / ranks, B, D]."""
        return scatter_to_sequence_parallel_region(x_SBD, group=self.group)


class GatherTokens(nn.Module):
    """All tokens, from this rank's slice."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, nothing is summed
        """The tokens of all ranks, [S * ranks, B, D]."""
        return gather_from_sequence_parallel_region(x_SBD, tensor_parallel_output_grad=False, group=self.group)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x`, of any shape, over ranks, with which each goes on by itself: gradients are summed, too."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x, group=group), group=group)
