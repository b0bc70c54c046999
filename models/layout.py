"""Layouts: which sample, position and text each token of a sequence has, described by plain integers.

Everything a kernel reads about boundaries is computed here, once per pack and on the CPU; nothing asks the device for
it again and nothing builds an S x S mask.

Shapes: S video tokens, L text slots, B batch, G segments of a pack (padding included), c segments of a length group,
l slots of their longest text.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megadit.models.segments import ONE_RANK, ConditionRows, Grid, LengthGroup, Piece, Segment, TokenMesh, length_groups
from megadit.models.shared.errors import UserError

CPU = torch.device("cpu")


def memo_key(function: Callable[..., Any], args: tuple[Hashable, ...]) -> Hashable:
    """(function, args), by which two different values can never be found.

    Raises:
        TypeError: for a function that may capture what `args` does not say, and for arguments that are not hashable or
            compared by identity.
    """
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name:
        raise TypeError(f"{name} cannot be a key: give a function of the module or class, and its arguments")
    if any(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"a tensor cannot be a key of {name}: another one would be computed anew, or mistaken for it")
    hash(args)
    return function, args, tuple(map(type, args))  # 1 == 1.0 == True


class Kept:
    """What was computed for a dense batch, as long as there is room for it."""

    def __init__(self, room: int) -> None:
        """`room` is in bytes."""
        self._values: dict[Hashable, Any] = {}
        self._room = room

    def cached(self, key: Hashable, compute: Callable[..., Any], *args: Any) -> Any:
        """compute(*args), a tensor, a tuple of them or None: computed once if it fits, else at each call."""
        if key in self._values:
            return self._values[key]
        value = compute(*args)
        parts = value if isinstance(value, tuple) else (value,)
        size = sum(part.untyped_storage().nbytes() for part in parts if part is not None)
        if size <= self._room:
            self._room -= size
            self._values[key] = value
        return value


def grid_positions(grid: Grid, device: torch.device | str | None = None) -> Tensor:
    """int64 [T*H*W, 3]: the (t, h, w) of each token of one grid, in order."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


class DenseTensors(NamedTuple):
    """Tensors of a dense layout on one device."""

    layout: "DenseLayout"
    device: torch.device

    @property
    def positions_S3(self) -> Tensor:
        """int64: each token's (t, h, w)."""
        return grid_positions(self.layout.grid, self.layout.device).to(self.device)


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
    def groups(self) -> None:
        """No length groups: attention batches over all samples."""
        return None

    @property
    def rows(self) -> None:
        """No condition rows: modulation broadcasts over the batch."""
        return None

    def on(self, device: torch.device) -> DenseTensors:
        return DenseTensors(self, device)

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any:
        """function(self, *args); see `PackLayout.memo`. Computed again where the batch is seen once."""
        if self.kept is None:
            return function(self, *args)
        return self.kept.cached(memo_key(function, args), function, self, *args)

    def per_condition(self, function: Callable[..., Any], owner: Hashable, *inputs: Any) -> Any:
        """function(owner, *inputs), which the parameters of `owner`, sizes and conditions decide: the same at every
        noise level.

        For one layout `inputs` must always be the same values: they are not part of the key.
        """
        if self.kept is None:
            return function(owner, *inputs)
        return self.kept.cached(("per condition", memo_key(function, (owner,))), function, owner, *inputs)


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Where everything is in a pack, or in several packs that form one micro-batch.

    What is said of tokens is said of those of this rank's CP shard; `segments` and text are whole. `rows` alone is
    about its SP shard.
    """

    segments: tuple[Segment, ...]
    mesh: TokenMesh = ONE_RANK
    pieces: tuple[Piece, ...] = ()
    """The condition rows of the tokens; empty means that every segment is one piece, with its own index as row."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves behind, when sent to another process, what was computed here."""
        return PackLayout, (self.segments, self.mesh, self.pieces)

    @classmethod
    def pack(cls, segments: Sequence[Segment], *, capacity: int, text_capacity: int) -> "PackLayout":
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
    def concatenate(cls, layouts: "Sequence[PackLayout]") -> "PackLayout":
        """Several packs as one micro-batch: one sequence, one after another."""
        return cls(tuple(segment for layout in layouts for segment in layout.segments))

    def shard(self, mesh: TokenMesh) -> "PackLayout":
        """The same pack as `mesh` divides it."""
        if mesh == self.mesh:
            return self
        made = PackLayout(self.segments, mesh)
        vars(made)["_whole"] = self.whole
        return made

    @property
    def whole(self) -> "PackLayout":
        """All tokens of all segments, on one rank."""
        return self if self.mesh == ONE_RANK else self._whole

    @cached_property
    def _whole(self) -> "PackLayout":
        return PackLayout(self.segments)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last token (excluded) of each segment that are in this shard, counted within the segment."""
        sizes = [segment.num_tokens for segment in self.segments]
        return tuple(self.mesh.span(*pair) for pair in zip(sizes, _offsets(sizes), strict=True))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment in this shard."""
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
        """Tokens in this shard."""
        return sum(self.lengths)

    @cached_property
    def text_capacity(self) -> int:
        return sum(self.text_slots)

    @property
    def num_segments(self) -> int:
        return len(self.segments)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in this shard that belong to samples."""
        return sum(piece.num_tokens for piece in self._segment_pieces if not piece.is_padding)

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths)

    @property
    def longest_text(self) -> int:
        return max(self.text_slots)

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """The segments as length groups: what attention batches."""
        return length_groups(self._segment_pieces)

    @cached_property
    def rows(self) -> ConditionRows:
        """The condition rows of the tokens of this rank's SP shard: what modulation reads."""
        pieces = self.pieces or self._segment_pieces
        length, rest = divmod(sum(piece.num_tokens for piece in pieces), self.mesh.slices)
        assert rest == 0, f"{self.capacity} tokens do not split over {self.mesh.slices} ranks"
        return ConditionRows(length_groups(_cut(pieces, self.mesh.slice * length, (self.mesh.slice + 1) * length)))

    @cached_property
    def _segment_pieces(self) -> tuple[Piece, ...]:
        items = enumerate(zip(self.lengths, self.segments, strict=True))
        return tuple(Piece(index, length, segment.is_padding) for index, (length, segment) in items)

    def text_of_group(self, group: LengthGroup) -> tuple[Tensor, Tensor]:
        """A group's text slots, made rectangular: (indices int64, is valid bool), [c, l]; none of padding."""
        slots_c1 = torch.tensor(self.text_slots[group.members])[:, None]
        starts_c1 = torch.tensor(self.text_starts[group.members])[:, None]
        offset_l = torch.arange(0 if group.is_padding else int(slots_c1.max()))
        is_valid_cl = offset_l < slots_c1
        return torch.where(is_valid_cl, starts_c1 + offset_l, starts_c1), is_valid_cl

    def on(self, device: torch.device | str) -> "LayoutTensors":
        """Tensors of this layout on a device, each made at its first use and kept."""
        return LayoutTensors(self, torch.device(device))

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

    def per_condition(self, function: Callable[..., Any], owner: Hashable, *inputs: Any) -> Any:
        """function(owner, *inputs): parameters and conditions are others for every pack; see `DenseLayout`."""
        return function(owner, *inputs)


Layout = PackLayout | DenseLayout


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))[:-1]


def _cut(pieces: Sequence[Piece], first: int, last: int) -> Iterator[Piece]:
    """The pieces of the tokens `first` to `last` (excluded); others have no tokens left."""
    for piece, start in zip(pieces, _offsets([piece.num_tokens for piece in pieces]), strict=True):
        yield piece._replace(num_tokens=min(start + piece.num_tokens, last) - max(start, first))


class GroupTexts(NamedTuple):
    """The text of every length group, made rectangular."""

    slots: Tensor
    """int64: the text slots of all groups, one group after another."""
    shapes: tuple[torch.Size, ...]
    """(c, l) of each group."""
    masks: tuple[Tensor | None, ...]
    """bool [c, 1, 1, l] of each group: which of its slots have text; None: all."""


def _tensor(compute: Callable[["LayoutTensors"], Tensor]) -> property:
    """Makes a method that computes a tensor on the CPU a property: computed once, copied to each device once."""
    return property(lambda tensors: tensors.layout.memo(_copy, compute, tensors.device), doc=compute.__doc__)


def _copy(layout: PackLayout, compute: Callable[["LayoutTensors"], Tensor], device: torch.device) -> Tensor:
    if device == CPU:
        return compute(layout.on(CPU))
    return layout.memo(_copy, compute, CPU).to(device, non_blocking=True)


class LayoutTensors(NamedTuple):
    """Tensors of a pack layout on one device."""

    layout: PackLayout
    device: torch.device

    @_tensor
    def segment_of_token_S(self) -> Tensor:
        """int64: the index of each token's segment."""
        return torch.repeat_interleave(torch.tensor(self.layout.lengths, dtype=torch.long))

    @_tensor
    def position_in_segment_S(self) -> Tensor:
        """int64: each token's index within its segment, in (t, h, w) order."""
        pairs = zip(self.layout.starts, self.layout.spans, strict=True)
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
        """int64: each token's (t, h, w) in the grid of its segment."""
        grids = [segment.grid for segment in self.layout.segments]
        _, height_G, width_G = torch.tensor(grids, dtype=torch.long).unbind(-1)
        segment_S, index_S = self.segment_of_token_S, self.position_in_segment_S
        width_S, area_S = width_G[segment_S], (height_G * width_G)[segment_S]
        return torch.stack([index_S // area_S, index_S % area_S // width_S, index_S % width_S], dim=-1)

    @_tensor
    def null_text_L(self) -> Tensor:
        """bool: the text slots where the learned null token stands."""
        pairs = zip(self.layout.text_starts, self.layout.segments, strict=True)
        slots = [start for start, segment in pairs if segment.text_length == 0 and not segment.is_padding]
        mask_L = torch.zeros(self.layout.text_capacity, dtype=torch.bool)
        mask_L[torch.tensor(slots, dtype=torch.long)] = True
        return mask_L

    @_tensor
    def first_text_G(self) -> Tensor:
        """int64: the first text slot of each segment; padding may have none, and gets any."""
        return torch.tensor(self.layout.text_starts).clamp(max=self.layout.text_capacity - 1)

    @_tensor
    def has_no_text_G(self) -> Tensor:
        """bool: the segments without text."""
        return torch.tensor([segment.text_length == 0 or segment.is_padding for segment in self.layout.segments])

    @_tensor
    def bounds(self) -> Tensor:
        """int32 [G + 1]: the first token of each segment, and the number of all."""
        return torch.tensor((0, *accumulate(self.layout.lengths)), dtype=torch.int32)

    @_tensor
    def text_bounds(self) -> Tensor:
        """int32 [G + 1]: the first text slot of each segment, and the number of all."""
        return torch.tensor((0, *accumulate(self.layout.text_slots)), dtype=torch.int32)

    @property
    def texts(self) -> GroupTexts:
        return self.layout.memo(_group_texts, self.device)


def _group_texts(layout: PackLayout, device: torch.device) -> GroupTexts:
    slots, are_valid = zip(*map(layout.text_of_group, layout.groups), strict=True)
    return GroupTexts(
        torch.cat([slots_cl.flatten() for slots_cl in slots]).to(device, non_blocking=True),
        tuple(slots_cl.shape for slots_cl in slots),
        tuple(None if valid.all() else valid[:, None, None].to(device, non_blocking=True) for valid in are_valid),
    )
