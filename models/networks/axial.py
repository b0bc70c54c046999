"""Attention along time or space only: every column of pixels over time, or every frame, is a segment ("line").

Where n ranks share the tokens of a sample, each has T H W / n of them in the order of the sequence ("home"). Attention
along one axis needs whole lines: T tokens each of H W / n columns ("time"), or H W tokens each of T / n frames
("space"). The tokens move from one of these arrangements to another, once, and the attention itself sends nothing.
Lines are distributed like tokens (`TokenMesh.span`): remainders go to ranks round-robin, continuing after the last
sample's rank.

Sequence parallelism cuts the tokens of a context-parallel rank, in whatever arrangement, into equal slices.

Shapes: S video tokens of a rank, B batch, D width.
"""

from dataclasses import replace
from itertools import permutations
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.configs.config import DiTConfig
from megadit.models.host_to_device import Need
from megadit.models.networks.attention import AxialInputs, Rotary
from megadit.models.networks.embeddings import rotary_table
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import CPU, PackLayout, computed
from megadit.models.packing.segments import Segment, TokenMesh, TokenSpan

Axis = Literal["time", "space"]
Arrangement = Literal["home", "time", "space"]
AXES: tuple[Axis, ...] = get_args(Axis)
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)


def axial_inputs(
    layout: Layout, axis: Axis, rotary: Rotary | None, config: DiTConfig, device: torch.device, dtype: torch.dtype
) -> AxialInputs:
    """Layout and rotary for attention along `axis`; `rotary` is in "home" order, None without rotary positions."""
    along = axial_layout(layout, axis)
    if rotary is not None and not isinstance(layout, DenseLayout):
        rotary = layout.memo(_axial_rotary, axis, config, device, dtype)
    return AxialInputs(layout=along, rotary=rotary)


def axial_layout(layout: Layout, axis: Axis) -> Layout:
    """The layout whose segments are the lines along `axis`; its modulation rows are still those of the samples.

    It has all SP shards of a context-parallel rank: attention needs all of their tokens.
    """
    if isinstance(layout, DenseLayout):
        return replace(layout, over=axis)
    return layout.memo(_axial_layout, axis)


def _axial_layout(layout: PackLayout, axis: Axis) -> PackLayout:
    found, mesh = _lines(layout, axis), layout.mesh
    return PackLayout(found.segments, TokenMesh(slices=mesh.slices, rank=mesh.slice), found.spans)


def _axial_rotary(
    layout: PackLayout, axis: Axis, config: DiTConfig, device: torch.device, dtype: torch.dtype
) -> Rotary:
    """Rotary embedding of each token by its position in its sample, not in its line."""
    return rotary_table(Need(layout, _plan).on(device).position_of_axis[axis], config, dtype)


class _Lines(NamedTuple):
    """The lines of a context-parallel rank."""

    index_S: Tensor
    """int64: the index of each token in the whole sequence; -1 for padding tokens."""
    segments: tuple[Segment, ...]
    """Every line."""
    spans: tuple[TokenSpan, ...]
    """The tokens of each modulation row."""


def _lines(layout: PackLayout, axis: Axis) -> _Lines:
    return layout.whole.memo(_gather_lines, axis, _of_all_slices(layout.mesh))


def _of_all_slices(mesh: TokenMesh) -> TokenMesh:
    """The mesh as the first SP rank sees it: one key for all SP shards of a context-parallel rank."""
    return replace(mesh, rank=mesh.context_rank * mesh.slices)


def _gather_lines(whole: PackLayout, axis: Axis, mesh: TokenMesh) -> _Lines:
    """The lines of one context-parallel rank.

    The sequence's own padding is left out; tokens are added until the SP shards are equal and not empty. Added tokens
    have the modulation row of the last sample, to which they send no gradient, and attend to one another, so that a
    rank without lines has gradients, too (of zero).
    """
    tokens, segments, dealt = [torch.empty(0, dtype=torch.long)], [], 0
    for segment, start in zip(whole.segments, whole.starts, strict=True):
        if segment.is_padding:
            continue
        T, H, W = segment.grid
        count, line = (H * W, Segment((T, 1, 1), 0)) if axis == "time" else (T, Segment((1, H, W), 0))
        first, stop = mesh.span(count, dealt)
        dealt += count
        if stop > first:
            index = start + torch.arange(segment.num_tokens).view(T, H * W)
            tokens.append((index[:, first:stop].T if axis == "time" else index[first:stop]).flatten())
            segments += [line] * (stop - first)
    index_S = torch.cat(tokens)
    row_S = whole.on(CPU).row_of_token_S[index_S]
    missing = -len(index_S) % mesh.slices if len(index_S) else mesh.slices
    if missing:
        index_S = F.pad(index_S, (0, missing), value=-1)
        row_S = F.pad(row_S, (0, missing), value=int(row_S[-1]) if len(row_S) else 0)
        segments.append(Segment((1, 1, missing), 0))
    rows, lengths = row_S.unique_consecutive(return_counts=True)
    spans = tuple(map(TokenSpan, rows.tolist(), lengths.tolist()))
    return _Lines(index_S, tuple(segments), spans)


class Move(NamedTuple):
    """The tokens that a rank sends to and receives from each other rank when the arrangement changes."""

    sent_S: Tensor
    """int64: local indices of the tokens to send, receiver after receiver."""
    num_sent: tuple[int, ...]
    """Tokens for each rank."""
    placed_S: Tensor
    """int64: new local indices of the tokens received, sender after sender."""
    num_received: tuple[int, ...]
    size: int
    """Local tokens after the move; those that no rank sends are zero."""


def move(
    x_SBD: Tensor, layout: Layout, source: Arrangement, target: Arrangement, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's tokens [S', B', D] in another arrangement.

    `group` has the ranks of `layout.mesh` in order; None for one rank.
    """
    if isinstance(layout, DenseLayout):
        return x_SBD
    moves = Need(layout, _plan).on(x_SBD.device).move_of_ends
    return _Moved.apply(x_SBD, moves[source, target], moves[target, source], group)


def axial_needs(layout: PackLayout) -> list[Need]:
    """Return the tensors that axial attention reads on a device."""
    return [Need(layout, _plan), *(computed(axial_layout(layout, axis)) for axis in AXES)]


class _Plan(NamedTuple):
    """Tensors of axial attention that no layout holds: moves between arrangements, and positions."""

    move_of_ends: dict[tuple[Arrangement, Arrangement], Move]
    position_of_axis: dict[Axis, Tensor]
    """[S, 3] each: the positions of a line's tokens in their samples."""


def _plan(layout: PackLayout) -> _Plan:
    moves = {ends: find_move(layout, *ends) for ends in permutations(ARRANGEMENTS, 2)}
    position_S3 = layout.whole.on(CPU).positions_S3
    positions = {axis: position_S3[_lines(layout, axis).index_S.clamp(min=0)] for axis in AXES}
    return _Plan(moves, positions)


def find_move(layout: PackLayout, source: Arrangement, target: Arrangement) -> Move:
    """Find the tokens that this rank of `layout.mesh` sends and receives."""
    mesh, whole = layout.mesh, layout.whole
    ranks = [replace(mesh, rank=rank) for rank in range(mesh.size)]
    here, there = ([_tokens(whole, at, rank) for rank in ranks] for at in (source, target))
    owner_S = torch.full((whole.capacity,), -1)
    place_S = owner_S.clone()
    for rank, tokens in enumerate(there):
        is_token = tokens >= 0
        owner_S[tokens[is_token]] = rank
        place_S[tokens[is_token]] = is_token.nonzero()[:, 0]
    receiver_S = torch.where(here[mesh.rank] >= 0, owner_S[here[mesh.rank]], -1)
    sent_S = receiver_S.argsort(stable=True)
    sent_S = sent_S[receiver_S[sent_S] >= 0]
    coming = [tokens[(tokens >= 0) & (owner_S[tokens] == mesh.rank)] for tokens in here]
    return Move(
        sent_S=sent_S,
        num_sent=tuple(receiver_S[sent_S].bincount(minlength=mesh.size).tolist()),
        placed_S=place_S[torch.cat(coming)],
        num_received=tuple(map(len, coming)),
        size=len(there[mesh.rank]),
    )


def _tokens(whole: PackLayout, at: Arrangement, mesh: TokenMesh) -> Tensor:
    """int64: the index in the sequence of each token that the rank of `mesh` has; -1 for padding tokens."""
    first = _of_all_slices(mesh)
    tokens_S = whole.memo(_home_tokens, first) if at == "home" else whole.memo(_gather_lines, at, first).index_S
    return tokens_S.chunk(mesh.slices)[mesh.slice]


def _home_tokens(whole: PackLayout, mesh: TokenMesh) -> Tensor:
    return whole.shard(mesh).on(CPU).index_S


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back, group):
        ctx.there, ctx.back, ctx.group = there, back, group
        return _send(x, there, group)

    @staticmethod
    def backward(ctx, grad):
        return _send(grad, ctx.back, ctx.group), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _send(tangent, ctx.there, ctx.group)


def _send(x_SBD: Tensor, plan: Move, group: ProcessGroup | None) -> Tensor:
    sent = x_SBD[plan.sent_S]
    received = sent
    if group is not None:
        received = sent.new_empty(sum(plan.num_received), *sent.shape[1:])
        dist.all_to_all_single(received, sent, list(plan.num_received), list(plan.num_sent), group=group)
    moved = x_SBD.new_zeros(plan.size, *x_SBD.shape[1:])
    moved[plan.placed_S] = received
    return moved
