"""Which condition row each token of a pack has, by length group and token by token: what the modulation ops share.

Shapes: S video tokens, D width, G condition rows, c segments of a length group, s tokens of each.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megadit.models.segments import Run

Rows = tuple[Run, ...] | Tensor | None
"""Length groups that assign a pack's tokens to condition rows, or the row of each token, int64 [S]; None for a dense
batch, whose element b has row b."""


@lru_cache(maxsize=8)
def row_of_token(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """int64 [S]: the segment of each token of `runs`, which follow one another."""
    segments = torch.tensor([segment for run in runs for segment in range(run.segment, run.segment + run.count)])
    lengths = torch.tensor([run.length for run in runs for _ in range(run.count)])
    return segments.repeat_interleave(lengths).to(device, non_blocking=True)


def rows_by_token(rows: tuple[Run, ...] | Tensor, device: torch.device) -> Tensor:
    """int64 [S]: the row of each token."""
    return rows if isinstance(rows, Tensor) else row_of_token(rows, device)


def are_looked_up(x: Tensor, rows: Rows) -> bool:
    """Whether each token looks its row up: on a GPU, inside one compiled kernel."""
    return isinstance(rows, Tensor) or (rows is not None and x.is_cuda)


def tokens_of(x_S1D: Tensor, run: Run) -> Tensor:
    """A length group's tokens as a uniform batch: a view [c, s, D]."""
    return x_S1D[run.start : run.stop].view(run.count, run.length, x_S1D.shape[-1])


def rows_of(x_GD: Tensor, run: Run) -> Tensor:
    """A length group's rows, ready to broadcast over tokens: a view [c, 1, D]."""
    return x_GD[run.segments, None]


def sum_tokens(x_S1D: Tensor, like_GD: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """Sums the tokens of each segment: in float32, whatever precision the sum is rounded to."""
    total_GD = torch.zeros_like(like_GD)
    for run in runs:
        # a segment cut by sequence parallelism never appears twice in one rank's runs, so rows are written once
        total_GD[run.segments] = tokens_of(x_S1D, run).sum(1, dtype=like_GD.dtype)
    return total_GD


def sum_rows(x_S1D: Tensor, row_S: Tensor, num_rows: int) -> Tensor:
    """Sums the tokens of each row, [G, D].

    A product with the rows' indicator matrix: its order is fixed, where a scatter's is not.
    """
    is_of_row_GS = torch.arange(num_rows, device=row_S.device)[:, None] == row_S
    return is_of_row_GS.to(x_S1D.dtype) @ x_S1D[:, 0]
