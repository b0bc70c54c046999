"""Lookup of each token's modulation row in a pack, by length group or token by token, for the modulation ops.

Shapes: S video tokens, B batch, D width, G modulation rows, c token spans of a length group, s tokens of each.
"""

import torch
from torch import Tensor

from megadit.models.ops.fusion import has_kernels, is_compiled
from megadit.models.packing.layout import Rows
from megadit.models.packing.segments import ConditionRows, DenseRows, LengthGroup, RowsByToken

FEWEST_NUMBERS = 1 << 15
"""Minimum mean number of elements of length groups: for smaller ones, calls cost more than copies of their rows."""
Group = LengthGroup | Tensor
"""Tokens that are processed together: a length group, or all of a pack with the row of each, int64 [S]."""


def are_looked_up(x: Tensor, rows: Rows | None) -> bool:
    """Whether each token of x [S, 1, D] looks up its row: on a GPU, inside one compiled kernel."""
    return isinstance(rows, RowsByToken) or (isinstance(rows, ConditionRows) and is_compiled(x))


def are_in_runs(x: Tensor, rows: Rows | None) -> bool:
    """Whether kernels process x [S, 1, D] by runs of tokens with one row."""
    return isinstance(rows, ConditionRows | RowsByToken) and has_kernels(x)


def are_grouped(rows: Rows | None) -> bool:
    """Whether rows come as length groups, which can be viewed as batches."""
    return isinstance(rows, ConditionRows)


def are_in_shreds(x: Tensor, rows: Rows | None) -> bool:
    """Whether conditioning tokens cut x [S, 1, D], on a CPU, into many small length groups."""
    return are_grouped(rows) and x.is_cpu and rows.are_cut and x.numel() < FEWEST_NUMBERS * len(rows.groups)


def are_dense(rows: Rows | None) -> bool:
    """Whether they are the rows of a uniform batch with conditioning tokens."""
    return isinstance(rows, DenseRows)


def tokens_of(x_S1D: Tensor, group: Group) -> Tensor:
    """A group's tokens as a uniform batch: a view [c, s, D]; for all tokens [1, S, D]."""
    return x_S1D[None, :, 0] if isinstance(group, Tensor) else group.tokens_of(x_S1D[:, 0])


def rows_of(x_GD: Tensor, group: Group) -> Tensor:
    """A group's rows, ready to broadcast over tokens: a view [c, 1, D]; for all tokens a copy, [1, S, D]."""
    return x_GD.index_select(0, group)[None] if isinstance(group, Tensor) else x_GD[group.members, None]


def sum_tokens(x_S1D: Tensor, like_GD: Tensor, groups: tuple[Group, ...]) -> Tensor:
    """Sums the tokens of each row, [G, D]: in float32, whatever precision the result has."""
    if isinstance(groups[0], Tensor):
        wide = torch.promote_types(like_GD.dtype, torch.float32)
        sums_GD = torch.zeros_like(like_GD, dtype=wide).index_add_(0, groups[0], x_S1D[:, 0].to(wide))
        return sums_GD.to(like_GD.dtype)
    total_GD = torch.zeros_like(like_GD)
    for group in groups:
        total_GD[group.members] += tokens_of(x_S1D, group).sum(1, dtype=like_GD.dtype)
    return total_GD


def sum_rows(x_S1D: Tensor, row_S: Tensor, num_rows: int) -> Tensor:
    """Sums the tokens of each row, [G, D].

    A product with the rows' indicator matrix: its order is fixed, unlike that of a scatter.
    """
    is_of_row_GS = torch.arange(num_rows, device=row_S.device)[:, None] == row_S
    return is_of_row_GS.to(x_S1D.dtype) @ x_S1D[:, 0]
