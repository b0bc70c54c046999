"""The layout of a pack: the sample, position and text of each token, described by plain integers.

All boundaries that kernels read are computed here, once per pack on the CPU, and copied to a GPU at once; nothing
reads them back, and nothing builds an S x S mask.

Shapes: S video tokens, L text places, G segments of a pack (padding included), R modulation rows, P runs of tokens with
one row, c segments of a length group, l places of their longest text.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megadit.models.host_to_device import Need, memo_key
from megadit.models.packing.segments import (
    CPU,
    ONE_RANK,
    ConditionRows,
    GroupTexts,
    LengthGroup,
    Segment,
    TokenMesh,
    TokenSpan,
    attended_in_segments,
    cut_spans,
    length_groups,
    offsets,
)
from megadit.models.shared.errors import UserError


@dataclass(frozen=True, eq=False)
class PackLayout:
    """The positions of tokens and text in a pack, or in several packs that form one micro-batch.

    Tokens are those of this rank's CP shard; `segments` and text are whole; only `rows` are of the SP shard.
    """

    segments: tuple[Segment, ...]
    mesh: TokenMesh = ONE_RANK
    spans: tuple[TokenSpan, ...] = ()
    """The modulation rows of the tokens; empty: those of the segments. Segment g has row g; the conditioning tokens of
    the j-th segment that has some have row G + j."""
    is_causal: bool = False
    """True: each token attends to itself and those before it in its segment; False: to all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without cached values."""
        return PackLayout, (self.segments, self.mesh, self.spans, self.is_causal)

    @classmethod
    def pack(cls, segments: Sequence[Segment], *, capacity: int, text_capacity: int) -> "PackLayout":
        """Lays out segments in order and fills the tail with one padding segment.

        The padding segment takes the remaining video tokens and text places.

        Raises:
            UserError: if the segments need more tokens or text places than the pack holds.
        """
        tokens = sum(segment.num_tokens for segment in segments)
        slots = sum(segment.text_places for segment in segments)
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
    def concatenate(cls, layouts: "Sequence[PackLayout]") -> "PackLayout":
        """Several packs as one micro-batch: one sequence, one after another."""
        return cls(tuple(segment for layout in layouts for segment in layout.segments))

    @cached_property
    def without_text(self) -> "PackLayout":
        """The same samples on this rank, with the null token in place of their texts."""
        segments = tuple(replace(segment, text_length=0) for segment in self.segments)
        return PackLayout(segments).shard(self.mesh)

    def shard(self, mesh: TokenMesh) -> "PackLayout":
        """This rank's layout of the same pack, divided by `mesh`."""
        if mesh == self.mesh:
            return self
        made = PackLayout(self.segments, mesh, is_causal=self.is_causal)
        vars(made)["_whole"] = self.whole
        return made

    @property
    def whole(self) -> "PackLayout":
        """All tokens of all segments, on one rank."""
        return self if self.mesh == ONE_RANK else self._whole

    @cached_property
    def _whole(self) -> "PackLayout":
        return PackLayout(self.segments, is_causal=self.is_causal)

    @cached_property
    def segment_bounds(self) -> tuple[tuple[int, int], ...]:
        """First and last token (excluded) of each segment that are in this shard, counted within the segment."""
        sizes = [segment.num_tokens for segment in self.segments]
        return tuple(self.mesh.span(*pair) for pair in zip(sizes, offsets(sizes), strict=True))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment in this shard."""
        return tuple(stop - first for first, stop in self.segment_bounds)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return offsets(self.lengths)

    @cached_property
    def text_places(self) -> tuple[int, ...]:
        # the padding segment may have no text place of its own
        return tuple(s.text_length if s.is_padding else s.text_places for s in self.segments)

    @cached_property
    def text_starts(self) -> tuple[int, ...]:
        return offsets(self.text_places)

    @cached_property
    def capacity(self) -> int:
        """Tokens in this shard."""
        return sum(self.lengths)

    @cached_property
    def text_capacity(self) -> int:
        return sum(self.text_places)

    @property
    def num_segments(self) -> int:
        return len(self.segments)

    @cached_property
    def segment_of_row(self) -> tuple[int, ...]:
        """The segment of each modulation row."""
        return (*range(self.num_segments), *(index for index, segment in enumerate(self.segments) if segment.clean))

    @property
    def has_conditioning(self) -> bool:
        return len(self.segment_of_row) > self.num_segments

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in this shard that belong to samples."""
        pairs = zip(self.lengths, self.segments, strict=True)
        return sum(length for length, segment in pairs if not segment.is_padding)

    @cached_property
    def num_targets(self) -> int:
        """Number of this rank's tokens that are neither padding nor conditioning."""
        spans = (span for spans in self._segment_spans for span in spans)
        return sum(num for row, num, is_padding in spans if row < self.num_segments and not is_padding)

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths)

    @property
    def longest_text(self) -> int:
        return max(self.text_places)

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """The segments as length groups, which attention batches."""
        items = enumerate(zip(self.lengths, self.segments, strict=True))
        return length_groups([(TokenSpan(index, length, segment.is_padding),) for index, (length, segment) in items])

    @cached_property
    def rows(self) -> ConditionRows:
        """The modulation rows of the tokens of this rank's SP shard."""
        length, rest = divmod(self.capacity, self.mesh.slices)
        assert rest == 0, f"{self.capacity} tokens do not split over {self.mesh.slices} ranks"
        spans = [(span,) for span in self.spans] or self._segment_spans
        first = self.mesh.slice * length
        return ConditionRows(length_groups(cut_spans(spans, first, first + length)))

    @cached_property
    def _segment_spans(self) -> tuple[tuple[TokenSpan, ...], ...]:
        clean_row = {index: row for row, index in enumerate(self.segment_of_row)}  # the last row: conditioning
        items = enumerate(zip(self.segments, self.segment_bounds, strict=True))
        return tuple(segment.spans(span, index, clean_row[index]) for index, (segment, span) in items)

    def on(self, device: torch.device | str) -> "LayoutTensors":
        """Tensors of this layout on a device, each made at its first use and cached."""
        return LayoutTensors(self, torch.device(device))

    def attended(self, num_queries: int, num_keys: int, device: torch.device, *, cross: bool) -> Tensor:
        """bool [1, S, L or S]: see `Layout`."""
        tensors = self.on(device)
        bounds, is_causal = tensors.bounds, self.is_causal and not cross
        return attended_in_segments(bounds, tensors.text_bounds if cross else bounds, num_queries, num_keys, is_causal)

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any:
        """function(self, *args), computed once.

        Raises:
            TypeError: if another value could have the same key; see `memo_key`.
        """
        key = memo_key(function, args)
        if key not in self._memo:
            self._memo[key] = function(self, *args)
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        # no field of the dataclass: FSDP would search it for tensors, for every block
        return {}

    @cached_property
    def sent(self) -> dict[tuple[torch.device, Hashable], Any]:
        """Cached values of this layout on GPUs; see `Need`."""
        return {}

    def keep(self, device: torch.device, key: Hashable, there: Any) -> None:
        """Caches a value that is on a GPU now."""
        self.sent[device, key] = there
        if isinstance(there, Computed):
            self.rows.keep(device, there.row_of_token_S, there.starts_of_runs_P)

    def per_condition(self, function: Callable[..., Any], owner: Hashable, *inputs: Any) -> Any:
        """function(owner, *inputs), not cached: parameters and conditioning differ for every pack; see
        `DenseLayout`."""
        return function(owner, *inputs)


_COMPUTED: list[Callable[["LayoutTensors"], Tensor]] = []
"""The methods of `LayoutTensors` that compute a tensor."""


def _tensor(compute: Callable[["LayoutTensors"], Tensor]) -> property:
    """Turns a method that computes a tensor on the CPU into a property, cached and copied to each device once."""
    _COMPUTED.append(compute)
    return property(lambda tensors: tensors.layout.memo(_on, compute, tensors.device), doc=compute.__doc__)


def _on(layout: PackLayout, compute: Callable[["LayoutTensors"], Tensor], device: torch.device) -> Tensor:
    if device == CPU:
        return compute(layout.on(CPU))
    return computed(layout).on(device).tensors[_COMPUTED.index(compute)]


class Computed(NamedTuple):
    """All values that are computed for any layout."""

    tensors: tuple[Tensor, ...]
    """Results of the functions in `_COMPUTED`."""
    texts: GroupTexts
    row_of_token_S: Tensor
    starts_of_runs_P: Tensor


def _compute(layout: PackLayout) -> Computed:
    tensors, rows = tuple(layout.memo(_on, compute, CPU) for compute in _COMPUTED), layout.rows
    return Computed(tensors, layout.on(CPU).texts, rows.of_token(CPU), rows.starts_of_runs(CPU))


def computed(layout: PackLayout) -> Need:
    """The tensors of a layout, as one `Need`."""
    return Need(layout, _compute)


class LayoutTensors(NamedTuple):
    """Tensors of a pack layout on one device."""

    layout: PackLayout
    device: torch.device

    @_tensor
    def segment_of_token_S(self) -> Tensor:
        """int64: the index of each token's segment."""
        return torch.repeat_interleave(torch.tensor(self.layout.lengths, dtype=torch.long))

    @_tensor
    def segment_of_row_R(self) -> Tensor:
        """int64: the segment of each modulation row."""
        return torch.tensor(self.layout.segment_of_row)

    @_tensor
    def row_of_token_S(self) -> Tensor:
        """int64: each token's modulation row."""
        spans = [span for spans in self.layout._segment_spans for span in spans]
        rows, lengths, _ = torch.tensor(spans).unbind(-1)
        return rows.repeat_interleave(lengths)

    @_tensor
    def is_target_S(self) -> Tensor:
        """bool: True for generated tokens: neither padding nor conditioning."""
        return self.is_sample_S & ~self.is_clean_S

    @_tensor
    def is_clean_S(self) -> Tensor:
        """bool: True for conditioning tokens."""
        return self.row_of_token_S >= self.layout.num_segments

    @_tensor
    def position_in_segment_S(self) -> Tensor:
        """int64: each token's index within its segment, in (t, h, w) order."""
        pairs = zip(self.layout.starts, self.layout.segment_bounds, strict=True)
        offset_G = torch.tensor([first - start for start, (first, _) in pairs], dtype=torch.long)
        return torch.arange(self.layout.capacity) + offset_G[self.segment_of_token_S]

    @_tensor
    def index_S(self) -> Tensor:
        """int64: the index of each token in the whole sequence."""
        starts_G = torch.tensor(self.layout.whole.starts, dtype=torch.long)
        return starts_G[self.segment_of_token_S] + self.position_in_segment_S

    @_tensor
    def is_sample_S(self) -> Tensor:
        """bool: True for the tokens of samples, False for padding."""
        is_sample_G = torch.tensor([not segment.is_padding for segment in self.layout.segments])
        return is_sample_G[self.segment_of_token_S]

    @_tensor
    def positions_S3(self) -> Tensor:
        """Each token's (t, h, w) in the grid of its segment: int64, or float32 where frames have times of their own."""
        _, height_G, width_G = self.grid_G3.unbind(-1)
        segment_S, index_S = self.segment_of_token_S, self.position_in_segment_S
        width_S, area_S = width_G[segment_S], (height_G * width_G)[segment_S]
        time_S = index_S // area_S
        if any(segment.times for segment in self.layout.segments):
            times = [segment.times or range(segment.grid[0]) for segment in self.layout.segments]
            first_G = torch.tensor(offsets(list(map(len, times))))
            time_S = torch.tensor([float(time) for frames in times for time in frames])[first_G[segment_S] + time_S]
        return torch.stack([time_S, index_S % area_S // width_S, index_S % width_S], dim=-1)

    @_tensor
    def null_text_L(self) -> Tensor:
        """bool: the text places of the learned null token."""
        pairs = zip(self.layout.text_starts, self.layout.segments, strict=True)
        slots = [start for start, segment in pairs if segment.text_length == 0 and not segment.is_padding]
        mask_L = torch.zeros(self.layout.text_capacity, dtype=torch.bool)
        mask_L[torch.tensor(slots, dtype=torch.long)] = True
        return mask_L

    @_tensor
    def first_text_G(self) -> Tensor:
        """int64: the first text place of each segment; arbitrary for padding without text."""
        return torch.tensor(self.layout.text_starts).clamp(max=self.layout.text_capacity - 1)

    @_tensor
    def first_token_G(self) -> Tensor:
        """int64: the first token of each segment; arbitrary for padding without tokens."""
        return torch.tensor(self.layout.starts).clamp(max=self.layout.capacity - 1)

    @_tensor
    def last_token_G(self) -> Tensor:
        """int64: the last token of each segment; arbitrary for padding without tokens."""
        ends = zip(self.layout.starts, self.layout.lengths, strict=True)
        return torch.tensor([start + length - 1 for start, length in ends]).clamp(min=0)

    @_tensor
    def has_no_text_G(self) -> Tensor:
        """bool: the segments without text."""
        return torch.tensor([segment.text_length == 0 or segment.is_padding for segment in self.layout.segments])

    @_tensor
    def bounds(self) -> Tensor:
        """int32 [G + 1]: the first token of each segment, and the total number."""
        return torch.tensor((0, *accumulate(self.layout.lengths)), dtype=torch.int32)

    @_tensor
    def text_bounds(self) -> Tensor:
        """int32 [G + 1]: the first text place of each segment, and the total number."""
        return torch.tensor((0, *accumulate(self.layout.text_places)), dtype=torch.int32)

    @_tensor
    def num_tokens_G(self) -> Tensor:
        """int64: the tokens of each segment on all ranks together; padding may have none."""
        return torch.tensor([segment.num_tokens for segment in self.layout.segments])

    @_tensor
    def grid_G3(self) -> Tensor:
        """int64: the grid of each segment."""
        return torch.tensor([segment.grid for segment in self.layout.segments])

    @_tensor
    def paired_N(self) -> Tensor:
        """int64: the segments that are samples with a text."""
        return self.has_no_text_G.logical_not().nonzero()[:, 0]

    @property
    def texts(self) -> GroupTexts:
        if self.device == CPU:
            return self.layout.memo(_group_texts)
        return computed(self.layout).on(self.device).texts


def _group_texts(layout: PackLayout) -> GroupTexts:
    return GroupTexts.of(layout.groups, layout.text_starts, layout.text_places)
