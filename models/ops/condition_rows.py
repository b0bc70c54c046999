"""Which condition row each token of a pack has, by length group and token by token: what the modulation ops share.

Shapes: S video tokens, D width, G condition rows, c segments of a length group, s tokens of each.
"""

import torch
from torch import Tensor

from megadit.models.segments import ConditionRows, LengthGroup


def are_looked_up(x: Tensor, rows: ConditionRows | None) -> bool:
    """Whether each token of x [S, 1, D] looks its row up: on a GPU, inside one compiled kernel."""
    return rows is not None and (rows.groups is None or x.is_cuda)


def are_grouped(rows: ConditionRows | None) -> bool:
    """Whether rows come as length groups, which can be viewed as batches."""
    return rows is not None and rows.groups is not None


def tokens_of(x_S1D: Tensor, group: LengthGroup) -> Tensor:
    """A length group's tokens as a uniform batch: a view [c, s, D]."""
    return x_S1D[group.start : group.stop].view(group.count, group.length, x_S1D.shape[-1])


def rows_of(x_GD: Tensor, group: LengthGroup) -> Tensor:
    """A length group's rows, ready to broadcast over tokens: a view [c, 1, D]."""
    return x_GD[group.members, None]


def sum_tokens(x_S1D: Tensor, like_GD: Tensor, groups: tuple[LengthGroup, ...]) -> Tensor:
    """Sums the tokens of each row, [G, D]: in float32, whatever precision the sum is rounded to."""
    total_GD = torch.zeros_like(like_GD)
    for group in groups:
        # a segment cut by sequence parallelism never appears twice in one rank's groups, so rows are written once
        total_GD[group.members] = tokens_of(x_S1D, group).sum(1, dtype=like_GD.dtype)
    return total_GD


def sum_rows(x_S1D: Tensor, row_S: Tensor, num_rows: int) -> Tensor:
    """Sums the tokens of each row, [G, D].

    A product with the rows' indicator matrix: its order is fixed, where a scatter's is not.
    """
    is_of_row_GS = torch.arange(num_rows, device=row_S.device)[:, None] == row_S
    return is_of_row_GS.to(x_S1D.dtype) @ x_S1D[:, 0]
