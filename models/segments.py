"""What a pack consists of: segments, pieces, groups of equal length, and the ranks that share its tokens.

A pack holds whole samples ("segments") one after another; its tail is one padding segment, so that shapes never
change from step to step.

Shapes: S video tokens of a rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample of a pack: a grid of video tokens and the text it is conditioned on."""

    grid: Grid
    """Tokens along time, height and width."""
    text_length: int
    """Text tokens; 0 means no text, and one learned null token stands in."""
    is_padding: bool = False

    @property
    def num_tokens(self) -> int:
        return prod(self.grid)

    @property
    def text_slots(self) -> int:
        """Places this segment takes in the text of the pack."""
        return max(1, self.text_length)


class Piece(NamedTuple):
    """Neighbouring tokens with one condition row."""

    row: int
    num_tokens: int
    is_padding: bool = False


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Neighbours with equally many tokens, segments or pieces: kernels treat them as one uniform batch."""

    start: int
    """First token."""
    first: int
    """First segment, or condition row of the first piece; the others follow it."""
    count: int
    length: int
    """Tokens of each."""
    is_padding: bool = False

    @property
    def stop(self) -> int:
        """Last token (excluded)."""
        return self.start + self.count * self.length

    @property
    def members(self) -> slice:
        """The segments, or the condition rows."""
        return slice(self.first, self.first + self.count)


def length_groups(pieces: Iterable[Piece]) -> tuple[LengthGroup, ...]:
    """Groups neighbouring pieces of equally many tokens whose rows follow one another; leaves out empty ones."""
    groups, start = [], 0
    filled = [piece for piece in pieces if piece.num_tokens > 0]
    # rows that follow one another are at the same distance from their index in the list
    keyed = [((piece.num_tokens, piece.is_padding, piece.row - index), piece) for index, piece in enumerate(filled)]
    for (length, is_padding, _), group in groupby(keyed, key=lambda item: item[0]):
        members = [piece.row for _, piece in group]
        groups.append(LengthGroup(start, members[0], len(members), length, is_padding))
        start = groups[-1].stop
    return tuple(groups)


@dataclass(frozen=True, eq=False)
class ConditionRows:
    """The condition row of each of a rank's tokens: which shift, scale and gate modulate it."""

    groups: tuple[LengthGroup, ...]

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S]."""
        if device not in self._of_token:
            rows = torch.tensor([row for group in self.groups for row in range(group.first, group.first + group.count)])
            lengths = torch.tensor([group.length for group in self.groups for _ in range(group.count)])
            self._of_token[device] = rows.repeat_interleave(lengths).to(device, non_blocking=True)
        return self._of_token[device]

    @cached_property
    def _of_token(self) -> dict[torch.device, Tensor]:
        return {}


@dataclass(frozen=True, slots=True)
class RowsByToken:
    """Condition rows of which only a tensor is known, not how they are grouped: a recording's, which has any pack's."""

    row_S: Tensor
    groups = None

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S]."""
        return self.row_S


@dataclass(frozen=True, slots=True)
class TokenMesh:
    """The ranks that share the tokens of a pack, and which of them this is: rank = context_rank * slices + slice.

    Context parallelism gives every rank an equal share of each segment, its CP shard; sequence parallelism cuts the
    tokens of a CP shard, in whatever order they are, into equal SP shards.
    """

    context: int = 1
    slices: int = 1
    rank: int = 0
    width: int = 1
    """CP shards that are taken together: this rank's and those of the ranks after it."""

    @property
    def size(self) -> int:
        return self.context * self.slices

    @property
    def context_rank(self) -> int:
        return self.rank // self.slices

    @property
    def slice(self) -> int:
        return self.rank % self.slices

    def at(self, context_rank: int, width: int = 1) -> "TokenMesh":
        """The same mesh seen from the rank with another CP shard."""
        return replace(self, rank=context_rank * self.slices + self.slice, width=width)

    def span(self, num_tokens: int, start: int) -> tuple[int, int]:
        """First and last token (excluded) of a segment that are in this CP shard, counted within the segment.

        Every shard gets num_tokens // context tokens. Remainders go to ranks round-robin, on from the last segment's
        (`start`, this segment's first token, knows its rank). So all ranks hold equally many tokens of a pack, without
        padding, and the shards of neighbouring ranks join up.
        """
        base, left = divmod(num_tokens, self.context)

        def before(rank: int) -> int:
            return rank * base + sum((start + extra) % self.context < rank for extra in range(left))

        return before(self.context_rank), before(self.context_rank + self.width)


ONE_RANK = TokenMesh()
