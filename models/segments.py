"""Packs: many samples of any size in one sequence of fixed capacity, described by plain integers.

A pack holds whole samples ("segments") one after another; its tail is one padding segment, so that shapes never
change from step to step. Everything a kernel wants to know about boundaries is computed here, once per pack and on
the CPU; nothing asks the device for it again and nothing builds an S x S mask.

Shapes: S video tokens, G segments of a pack (padding included).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megadit.models.shared.errors import UserError

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


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments with equally many tokens: kernels treat them as one uniform batch."""

    start: int
    """First token."""
    segment: int
    """First segment."""
    count: int
    length: int
    """Tokens of each segment."""
    is_padding: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    @property
    def segments(self) -> slice:
        return slice(self.segment, self.segment + self.count)


class Share(NamedTuple):
    """The part of every segment that ranks `first` to `stop` (excluded) of `size` hold together."""

    first: int = 0
    stop: int = 1
    size: int = 1

    def span(self, num_tokens: int, start: int) -> tuple[int, int]:
        """First and last token (excluded) that a segment gives to this share, counted within the segment.

        Every rank gets an equal slice; tokens that are left are dealt out one by one, on from the rank at which those
        of the segments before ended (`start`, this segment's first token, knows which). So all ranks hold equally many
        tokens of a pack, without padding, and the shares of neighbouring ranks join up.
        """
        base, left = divmod(num_tokens, self.size)

        def before(rank: int) -> int:
            return rank * base + sum((start + extra) % self.size < rank for extra in range(left))

        return before(self.first), before(self.stop)


def find_runs(parts: Iterable[tuple[int, int, bool]]) -> tuple[Run, ...]:
    """Runs of (segment, tokens, is_padding) triples that follow one another; those without tokens are left out."""
    runs, start = [], 0
    filled = [(segment, *rest) for segment, *rest in parts if rest[0] > 0]
    # neighbours have the same distance to their place in the list: a segment left out between two parts them
    keyed = [((length, padding, segment - place), segment) for place, (segment, length, padding) in enumerate(filled)]
    for (length, is_padding, _), group in groupby(keyed, key=lambda item: item[0]):
        members = [segment for _, segment in group]
        runs.append(Run(start, members[0], len(members), length, is_padding))
        start = runs[-1].stop
    return tuple(runs)


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))[:-1]


def grid_positions(grid: Grid, device: torch.device | str | None = None) -> Tensor:
    """int64 [T*H*W, 3]: the (t, h, w) of each token of one grid, in order."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


class Kept:
    """What was computed for a dense batch, as long as there is room for it."""

    def __init__(self, room: int) -> None:
        """`room` is in bytes."""
        self._values: dict[Hashable, Any] = {}
        self._room = room

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A tensor, a tuple of them or None: computed once if it fits, else at each call."""
        if key in self._values:
            return self._values[key]
        value = compute()
        parts = value if isinstance(value, tuple) else (value,)
        size = sum(part.untyped_storage().nbytes() for part in parts if part is not None)
        if size <= self._room:
            self._room -= size
            self._values[key] = value
        return value


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A uniform batch: every sample has the same grid. The form in which sampling and export run."""

    grid: Grid
    """Tokens along time, height and width."""
    text_mask_BL: Tensor
    """bool: True where a text token may be attended."""
    device: torch.device
    over: Literal["sample", "time", "space"] = "sample"
    """What self-attention sees: all tokens of a sample, those of the same pixel, or those of the same frame."""
    kept: Kept | None = None
    """Where the same conditions come at many noise levels: what depends on them and on sizes alone. None: seen once."""

    @property
    def runs(self) -> None:
        """No runs: modulation broadcasts over the batch."""
        return None

    @property
    def grid_positions_S3(self) -> Tensor:
        return grid_positions(self.grid, self.device)

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value derived from this layout; computed again where the batch is seen once."""
        return compute() if self.kept is None else self.kept.cached(key, compute)

    def constant(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value that the network's parameters, sizes and conditions decide: the same at every noise level."""
        return self.cached(key, compute)


class _Cache:
    """What was computed of a layout. No dictionary or dataclass: FSDP would search it for tensors, for every block."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}


@dataclass(frozen=True)
class SegmentLayout:
    """Where everything is in a pack, or in several packs that form one micro-batch.

    With context parallelism a rank holds a share of every segment's tokens. What is said of tokens here is said of
    those at hand; `segments` and text are whole.
    """

    segments: tuple[Segment, ...]
    share: Share = Share()
    _cache: _Cache = field(default_factory=_Cache, repr=False, compare=False)

    @classmethod
    def pack(cls, segments: Sequence[Segment], *, capacity: int, text_capacity: int) -> "SegmentLayout":
        """Lays out segments in order and fills the tail with one padding segment.

        The padding segment takes what is left of both the video tokens and the text slots.

        Raises:
            UserError: if the segments need more tokens or text slots than the pack holds.
        """
        tokens = sum(segment.num_tokens for segment in segments)
        slots = sum(segment.text_slots for segment in segments)
        spare, spare_text = capacity - tokens, text_capacity - slots
        if spare < 0 or spare_text < 0:
            raise UserError(
                f"{len(segments)} samples with {tokens} video tokens and {slots} text tokens do not fit a pack of "
                f"{capacity} and {text_capacity}; raise data.seq_length or data.text_seq_length"
            )
        if spare or spare_text:
            segments = [*segments, Segment((1, 1, spare), spare_text, is_padding=True)]
        return cls(tuple(segments))

    @classmethod
    def concatenate(cls, layouts: "Sequence[SegmentLayout]") -> "SegmentLayout":
        """Several packs as one micro-batch: one sequence, one after another."""
        return cls(tuple(segment for layout in layouts for segment in layout.segments))

    @property
    def whole(self) -> "SegmentLayout":
        """All tokens of all segments."""
        return self.shared(Share())

    def shared(self, share: Share) -> "SegmentLayout":
        """The tokens of `share`."""
        if share == self.share:
            return self
        return self.cached(("share", share), lambda: self._make_share(share))

    def _make_share(self, share: Share) -> "SegmentLayout":
        made = SegmentLayout(self.segments, share)
        made._cache.values["share", self.share] = self  # what was computed for these tokens is found again from there
        return made

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last token (excluded) at hand of each segment, counted within it."""
        sizes = [segment.num_tokens for segment in self.segments]
        return tuple(self.share.span(*pair) for pair in zip(sizes, _offsets(sizes), strict=True))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - first for first, stop in self.spans)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return _offsets(self.lengths)

    @cached_property
    def text_slots(self) -> tuple[int, ...]:
        # the padding segment may have no slot left to itself
        return tuple(s.text_length if s.is_padding else s.text_slots for s in self.segments)

    @cached_property
    def text_starts(self) -> tuple[int, ...]:
        return _offsets(self.text_slots)

    @cached_property
    def capacity(self) -> int:
        return sum(self.lengths)

    @cached_property
    def text_capacity(self) -> int:
        return sum(self.text_slots)

    @property
    def num_segments(self) -> int:
        return len(self.segments)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that belong to samples."""
        pairs = zip(self.lengths, self.segments, strict=True)
        return sum(length for length, segment in pairs if not segment.is_padding)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The whole sequence as runs of equally long segments."""
        return find_runs(self._parts(0, self.capacity))

    def local_runs(self, rank: int, size: int) -> tuple[Run, ...]:
        """The runs of the `rank`-th of `size` equal slices of the sequence, offsets counted within the slice."""
        if size == 1:
            return self.runs
        return self.cached(("local_runs", rank, size), lambda: self._cut_runs(rank, size))

    def _cut_runs(self, rank: int, size: int) -> tuple[Run, ...]:
        assert self.capacity % size == 0, f"{self.capacity} tokens do not split over {size} ranks"
        first, last = rank * self.capacity // size, (rank + 1) * self.capacity // size
        return find_runs(self._parts(first, last))

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """(segment, how many of the tokens first..last it has, whether it is padding)."""
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            yield i, min(start + length, last) - max(start, first), self.segments[i].is_padding

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value derived from this layout, computed once."""
        if key not in self._cache.values:
            self._cache.values[key] = compute()
        return self._cache.values[key]

    def constant(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value that parameters and conditions decide, too: they are others for every pack."""
        return compute()

    @cached_property
    def segment_of_token_S(self) -> Tensor:
        """int64: the index of each token's segment."""
        return torch.repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))

    @cached_property
    def position_in_segment_S(self) -> Tensor:
        """int64: each token's index within its segment, in (t, h, w) order."""
        pairs = zip(self.starts, self.spans, strict=True)
        offset_G = torch.tensor([first - start for start, (first, _) in pairs], dtype=torch.long)
        return torch.arange(self.capacity) + offset_G[self.segment_of_token_S]

    @cached_property
    def token_index_S(self) -> Tensor:
        """int64: the place of each token at hand in the whole sequence."""
        starts_G = torch.tensor(self.whole.starts, dtype=torch.long)
        return starts_G[self.segment_of_token_S] + self.position_in_segment_S

    @cached_property
    def token_mask_S(self) -> Tensor:
        """bool: True for the tokens of samples."""
        valid_G = torch.tensor([not segment.is_padding for segment in self.segments])
        return valid_G[self.segment_of_token_S]

    @cached_property
    def grid_positions_S3(self) -> Tensor:
        """int64: each token's (t, h, w) in the grid of its segment."""
        _, height_G, width_G = torch.tensor([segment.grid for segment in self.segments], dtype=torch.long).unbind(-1)
        segment_S, index_S = self.segment_of_token_S, self.position_in_segment_S
        width_S, area_S = width_G[segment_S], (height_G * width_G)[segment_S]
        return torch.stack([index_S // area_S, index_S % area_S // width_S, index_S % width_S], dim=-1)

    @cached_property
    def null_text_slots(self) -> Tensor:
        """int64: the slots of the pack's text where the learned null token stands."""
        slots = [
            start
            for start, segment in zip(self.text_starts, self.segments, strict=True)
            if segment.text_length == 0 and not segment.is_padding
        ]
        return torch.tensor(slots, dtype=torch.long)

    def bounds(self, device: torch.device, *, of_text: bool) -> tuple[Tensor, int]:
        """Cumulative lengths of all segments or of their texts, int32 [G + 1], and the longest."""
        lengths = self.text_slots if of_text else self.lengths

        def compute() -> tuple[Tensor, int]:
            bounds = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
            return bounds.to(device, non_blocking=True), max(lengths)

        return self.cached(("bounds", of_text, device), compute)

    def text_of_run(self, run: Run) -> tuple[Tensor, Tensor]:
        """A run's text slots, made rectangular: (indices int64, is valid bool), [count, longest]; none of padding."""
        slots_G1 = torch.tensor(self.text_slots[run.segments])[:, None]
        starts_G1 = torch.tensor(self.text_starts[run.segments])[:, None]
        offset_L = torch.arange(0 if run.is_padding else int(slots_G1.max()))
        is_valid_GL = offset_L < slots_G1
        return torch.where(is_valid_GL, starts_G1 + offset_L, starts_G1), is_valid_GL


Layout = SegmentLayout | DenseLayout
