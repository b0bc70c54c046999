"""The elements of a pack: segments, token spans, length groups, and the ranks that share its tokens.

A pack holds whole samples ("segments") one after another; its tail is one padding segment, so that shapes never
change from step to step.

Shapes: S video tokens of a rank, L keys (video or text tokens), G segments.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.models.host_to_device import sent_together

CPU = torch.device("cpu")
LONGEST_RUN = 32
"""Maximum tokens of a kernel's program. 8,192 keep a GPU with 132 multiprocessors busy, and a program's output, some
float32 rows, is a sixteenth of what it reads."""

Grid = tuple[int, int, int]
Span = tuple[int, int]
"""First and last (excluded)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample of a pack: a grid of video tokens and the text it is conditioned on."""

    grid: Grid
    """Tokens along time, height and width; extra conditioning frames come after those of the video."""
    text_length: int
    """Text tokens; 0 means no text, and one learned null token stands in."""
    is_padding: bool = False
    clean: tuple[Span, ...] = ()
    """Runs of conditioning tokens, clean among the noisy ones: in order, and not adjacent."""
    times: tuple[float, ...] = ()
    """Time of each frame of tokens; empty: 0, 1, 2, ..."""

    @property
    def num_tokens(self) -> int:
        return prod(self.grid)

    @property
    def text_places(self) -> int:
        """Number of text places of this segment in the pack."""
        return max(1, self.text_length)

    @property
    def reach(self) -> Grid:
        """The smallest grid, from 0, that holds the positions of its tokens."""
        return self.grid if not self.times else (ceil(max(self.times)) + 1, *self.grid[1:])

    def spans(self, span: Span, row: int, clean_row: int) -> "tuple[TokenSpan, ...]":
        """Its tokens within `span`: generated ones have one modulation row, conditioning ones another."""
        edges = [0, *(edge for run in self.clean for edge in run), self.num_tokens]
        inner = [min(max(edge, span[0]), span[1]) for edge in edges]
        rows = [clean_row if index % 2 else row for index in range(len(inner) - 1)]
        runs = zip(rows, inner, inner[1:], strict=False)
        return tuple(TokenSpan(row, stop - first, self.is_padding) for row, first, stop in runs)


class TokenSpan(NamedTuple):
    """Consecutive tokens with one modulation row."""

    row: int
    num_tokens: int
    is_padding: bool = False


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Consecutive segments or token spans of equal length, which kernels compute as one uniform batch."""

    start: int
    """First token."""
    first: int
    """First segment, or modulation row of the first span; the others follow it."""
    count: int
    length: int
    """Tokens of each member."""
    is_padding: bool = False
    gap: int = 0
    """Tokens between two members, which belong to other spans of the same segments."""

    @property
    def stop(self) -> int:
        """Last token (excluded)."""
        return self.start + self.count * (self.length + self.gap) - self.gap

    @property
    def members(self) -> slice:
        """The segments, or the modulation rows."""
        return slice(self.first, self.first + self.count)

    def tokens_of(self, x_S: Tensor) -> Tensor:
        """The group's tokens as a uniform batch: a view [count, length, ...] of [S, ...]."""
        return x_S[self.start : self.stop].unfold(0, self.length, self.length + self.gap).movedim(-1, 1)


class GroupTexts(NamedTuple):
    """The text of every length group, padded to a rectangle."""

    slots: Tensor
    """int64: the text places of all groups, one group after another."""
    shapes: tuple[torch.Size, ...]
    """(c, l) of each group."""
    masks: tuple[Tensor | None, ...]
    """bool [c, 1, 1, l] of each group: which of its places have text; None: all."""

    @classmethod
    def of(cls, groups: "Sequence[LengthGroup]", starts: Sequence[int], lengths: Sequence[int]) -> "GroupTexts":
        """Build the texts of segments whose text begins at `starts` and has these `lengths`."""
        found = [text_of_group(group, starts, lengths) for group in groups]
        places, are_valid = zip(*found, strict=True)
        masks = tuple(None if valid.all() else valid[:, None, None] for valid in are_valid)
        places_L = torch.cat([places_cl.flatten() for places_cl in places])
        return cls(places_L, tuple(places_cl.shape for places_cl in places), masks)


def text_of_group(group: LengthGroup, starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A group's text places, padded to a rectangle: (indices int64, is valid bool), [c, l]; empty for padding."""
    length_c1 = torch.tensor(lengths[group.members])[:, None]
    starts_c1 = torch.tensor(starts[group.members])[:, None]
    offset_l = torch.arange(0 if group.is_padding else int(length_c1.max()))
    is_valid_cl = offset_l < length_c1
    return torch.where(is_valid_cl, starts_c1 + offset_l, starts_c1), is_valid_cl


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Offsets of consecutive spans of these lengths."""
    return tuple(accumulate(lengths, initial=0))[:-1]


def cut_spans(segments: Sequence[Sequence[TokenSpan]], first: int, last: int) -> Iterator[tuple[TokenSpan, ...]]:
    """The spans of the tokens `first` to `last` (excluded), cut at both ends; spans outside become empty."""
    stop = 0

    def cut(span: TokenSpan) -> TokenSpan:
        nonlocal stop
        start, stop = stop, stop + span.num_tokens
        return span._replace(num_tokens=min(stop, last) - max(start, first))

    for spans in segments:
        yield tuple(map(cut, spans))


def length_groups(segments: Iterable[Sequence[TokenSpan]]) -> tuple[LengthGroup, ...]:
    """Groups the spans of neighbouring segments that are cut alike and whose rows are consecutive.

    Empty spans are left out.
    """
    groups, start = [], 0
    filled = [tuple(span for span in spans if span.num_tokens > 0) for spans in segments]
    # consecutive rows have the same difference to their segment's index in the list
    keyed = [
        (tuple((span.num_tokens, span.is_padding, span.row - index) for span in spans), spans)
        for index, spans in enumerate(filter(None, filled))
    ]
    for _, group in groupby(keyed, key=lambda item: item[0]):
        members = [spans for _, spans in group]
        size, before = sum(span.num_tokens for span in members[0]), 0
        for row, length, is_padding in members[0]:
            groups.append(LengthGroup(start + before, row, len(members), length, is_padding, size - length))
            before += length
        start += size * len(members)
    return tuple(groups)


def up_to_each(num_tokens: int, device: torch.device) -> Tensor:
    """bool [S, S]: a causal mask, True for each token and those before it."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def attended_in_segments(bounds: Tensor, key_bounds: Tensor, num_queries: int, num_keys: int, causal: bool) -> Tensor:
    """bool [1, S, L]: True where query and key are of one segment; `bounds` and `key_bounds`, int32 [G + 1], are where
    segments begin."""
    segment_S, segment_L = (
        torch.searchsorted(edges[1:], torch.arange(size, device=edges.device, dtype=edges.dtype), right=True)
        for edges, size in ((bounds, num_queries), (key_bounds, num_keys))
    )
    is_same_SL = segment_S[:, None] == segment_L
    return (is_same_SL & up_to_each(num_keys, bounds.device) if causal else is_same_SL)[None]


@dataclass(frozen=True, eq=False)
class ConditionRows:
    """The modulation row of each of a rank's tokens: which shift, scale and gate modulate it."""

    groups: tuple[LengthGroup, ...]

    @cached_property
    def are_cut(self) -> bool:
        """Whether some segments have several rows, because they have conditioning tokens."""
        return any(group.gap for group in self.groups)

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S]."""
        return self._on(device)[0]

    def starts_of_runs(self, device: torch.device) -> Tensor:
        """int32 [P + 1]: the start of each run of at most `LONGEST_RUN` consecutive tokens with one row, and S."""
        return self._on(device)[1]

    def keep(self, device: torch.device, row_S: Tensor, starts_P: Tensor) -> None:
        """Caches the results of `of_token`, int64 [S], and `starts_of_runs`, int32 [P + 1], for a device."""
        self._there[device] = row_S, starts_P

    @cached_property
    def _there(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._there:
            self.keep(device, *(self._computed() if device.type == "cpu" else sent_together(self._on(CPU), device)))
        return self._there[device]

    def _computed(self) -> tuple[Tensor, Tensor]:
        row_S = torch.empty(sum(group.count * group.length for group in self.groups), dtype=torch.long)
        for group in self.groups:
            group.tokens_of(row_S).copy_(torch.arange(group.first, group.first + group.count)[:, None])
        edges = [0, *(row_S.diff().nonzero().flatten() + 1).tolist(), len(row_S)]
        starts = [at for first, stop in pairwise(edges) for at in range(first, stop, LONGEST_RUN)]
        return row_S, torch.tensor([*starts, len(row_S)], dtype=torch.int32)


@dataclass(frozen=True)
class DenseRows:
    """Modulation rows of a uniform batch with conditioning tokens: in sample b, those have row B + b, others row b."""

    num_tokens: int
    clean: tuple[Span, ...]
    batch: int

    @cached_property
    def runs(self) -> tuple[tuple[Span, slice], ...]:
        """Tokens in order, and their rows in the samples of the batch."""
        spans = Segment((1, 1, self.num_tokens), 0, clean=self.clean).spans((0, self.num_tokens), 0, self.batch)
        stops = list(accumulate(span.num_tokens for span in spans))
        runs = zip((0, *stops), stops, spans, strict=False)
        return tuple(((first, stop), slice(row, row + self.batch)) for first, stop, (row, *_) in runs if stop > first)

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S, B]."""
        return torch.cat(
            [  # created on the device: no copy
                torch.arange(rows.start, rows.stop, device=device).expand(stop - first, -1)
                for (first, stop), rows in self.runs
            ]
        )


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Modulation rows of a uniform batch as an input, for exported networks, in which any token may be conditioning."""

    row_SB: Tensor

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S, B]."""
        return self.row_SB


@dataclass(frozen=True, slots=True)
class RowsByToken:
    """Modulation rows as tensors, without their grouping, for a CUDA graph, which is replayed for any pack."""

    row_S: Tensor
    starts_P: Tensor
    """`ConditionRows.starts_of_runs`, padded with S to a fixed length."""

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S]."""
        return self.row_S

    def starts_of_runs(self, device: torch.device) -> Tensor:
        """int32 [P + 1]."""
        return self.starts_P


@dataclass(frozen=True, slots=True)
class TokenMesh:
    """The ranks that share the tokens of a pack, and this rank = context_rank * slices + slice.

    Context parallelism gives every rank an equal share of each segment, its CP shard; sequence parallelism cuts the
    tokens of a CP shard, in whatever order they are, into equal SP shards.
    """

    context: int = 1
    slices: int = 1
    rank: int = 0
    width: int = 1
    """Number of CP shards that are taken together: this rank's and those of the ranks after it."""

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

        Every shard gets num_tokens // context tokens. Remainders go to ranks round-robin, continuing after the last
        segment's rank (`start`, this segment's first token, determines it). So all ranks hold equally many tokens of a
        pack, without padding, and the shards of neighbouring ranks are adjacent.
        """
        base, left = divmod(num_tokens, self.context)

        def before(rank: int) -> int:
            return rank * base + sum((start + extra) % self.context < rank for extra in range(left))

        return before(self.context_rank), before(self.context_rank + self.width)


ONE_RANK = TokenMesh()
