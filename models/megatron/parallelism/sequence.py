"""Sequence parallelism (arXiv 2205.05198): each rank has some tokens outside, and some heads within, the linears that
tensor-parallel ranks share.

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
    """Maps all tokens to this rank's slice of them."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        """This rank's slice, [S / ranks, B, D]."""
        return scatter_to_sequence_parallel_region(x_SBD, group=self.group)


class GatherTokens(nn.Module):
    """Maps this rank's slice to all tokens."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, without a sum
        """The tokens of all ranks, [S * ranks, B, D]."""
        return gather_from_sequence_parallel_region(x_SBD, tensor_parallel_output_grad=False, group=self.group)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x`, of any shape, over ranks; the gradient is summed, too."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x, group=group), group=group)
