"""Attention along time or space alone: the columns of time, or the frames, of every sample as lines of their own.

Where n ranks share the tokens of a sample, each has T H W / n of them in the order of the sequence ("home"). To attend
along one axis it needs whole lines, T columns of H W / n pixels ("time") or T / n frames of H W ("space"): the tokens
move from one of these arrangements to another, once, and the attention itself sends nothing. Lines that are left over
are dealt out one by one, on from the rank at which those of the sample before ended.

Sequence parallelism cuts the tokens of a context-parallel rank, in whatever arrangement, into equal slices; a rank of
the mesh is then rank = context-parallel rank * slices + slice.

Shapes: S video tokens of a rank, B batch, D width.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.segments import DenseLayout, Layout, Run, Segment, SegmentLayout, Share, find_runs

Axis = Literal["time", "space"]
Arrangement = Literal["home", "time", "space"]


class Mesh(NamedTuple):
    """The ranks among which the tokens of a pack are divided, and this one's place."""

    context: int = 1
    slices: int = 1
    """Equal parts of a context-parallel rank's tokens (sequence parallelism)."""
    rank: int = 0

    @property
    def size(self) -> int:
        return self.context * self.slices


ONE_RANK = Mesh()


class Lines(NamedTuple):
    """A rank's tokens while attention runs along one axis."""

    layout: Layout
    """Every line a segment. All slices of a context-parallel rank together: attention sees all of their tokens."""
    runs: tuple[Run, ...] | None
    """Which sample each of this slice's tokens belongs to; None in a dense batch."""
    positions_S3: Tensor
    """int64: (t, h, w) of each token in its sample's grid."""


def lines(layout: Layout, axis: Axis, mesh: Mesh = ONE_RANK) -> Lines:
    """What `attention.attend` and the modulation need to know along `axis`."""
    if isinstance(layout, DenseLayout):
        return Lines(replace(layout, over=axis), None, layout.grid_positions_S3)
    return layout.cached(("lines", axis, mesh), lambda: _lines(layout.whole, axis, mesh))


def _lines(whole: SegmentLayout, axis: Axis, mesh: Mesh) -> Lines:
    share, place = _share(mesh.rank // mesh.slices, mesh), mesh.rank % mesh.slices
    tokens, segments, parts = _gather_lines(whole, axis, share, mesh.slices)
    return Lines(
        SegmentLayout(tuple(segments)),
        find_runs((segment, count, False) for segment, count in _cut(parts, place, mesh.slices)),
        whole.grid_positions_S3[tokens.clamp(min=0)],
    )


def _share(context_rank: int, mesh: Mesh) -> Share:
    return Share(context_rank, context_rank + 1, mesh.context)


def _gather_lines(
    whole: SegmentLayout, axis: Axis, share: Share, slices: int
) -> tuple[Tensor, list[Segment], list[tuple[int, int]]]:
    """The lines of a share: (place of each token in the sequence, the lines as segments, (sample, tokens) pairs).

    The sequence's own padding is left out; tokens are added (place -1) until the slices are equal and not empty. They
    are counted with the last sample, to which they send no gradient, and attend to one another, so that a rank without
    lines has gradients, too (of zero).
    """
    tokens, segments, parts, dealt = [], [], [], 0
    for index, (segment, start) in enumerate(zip(whole.segments, whole.starts, strict=True)):
        if segment.is_padding:
            continue
        T, H, W = segment.grid
        count, line = (H * W, Segment((T, 1, 1), 0)) if axis == "time" else (T, Segment((1, H, W), 0))
        first, stop = share.span(count, dealt)
        dealt += count
        if stop > first:
            place = start + torch.arange(segment.num_tokens).view(T, H * W)
            tokens.append((place[:, first:stop].T if axis == "time" else place[first:stop]).flatten())
            segments += [line] * (stop - first)
            parts.append((index, len(tokens[-1])))
    total = sum(map(len, tokens))
    missing = -total % slices if total else slices
    if missing:
        tokens.append(torch.full((missing,), -1))
        segments.append(Segment((1, 1, missing), 0))
        sample, count = parts.pop() if parts else (0, 0)
        parts.append((sample, count + missing))
    return torch.cat(tokens), segments, parts


def _cut(parts: list[tuple[int, int]], place: int, size: int) -> list[tuple[int, int]]:
    """The `place`-th of `size` equal slices."""
    length = sum(count for _, count in parts) // size
    first, last, start, found = place * length, (place + 1) * length, 0, []
    for sample, count in parts:
        found.append((sample, min(start + count, last) - max(start, first)))
        start += count
    return [(sample, count) for sample, count in found if count > 0]


class Move(NamedTuple):
    """Which tokens a rank sends to which other when the arrangement changes."""

    sent_S: Tensor
    """int64: their places here, receiver after receiver."""
    num_sent: tuple[int, ...]
    """To each rank."""
    placed_S: Tensor
    """int64: where those that come are put, sender after sender."""
    num_received: tuple[int, ...]
    size: int
    """Tokens here afterwards; those that nobody sends are zero."""


def move(
    x_SBD: Tensor,
    layout: Layout,
    source: Arrangement,
    target: Arrangement,
    mesh: Mesh = ONE_RANK,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's tokens in another arrangement; `group` has the mesh's ranks in order, where there are several."""
    if isinstance(layout, DenseLayout):
        return x_SBD
    there, back = (
        _move_on(layout, one, other, mesh, x_SBD.device) for one, other in ((source, target), (target, source))
    )
    return _Moved.apply(x_SBD, there, back, group)


def _move_on(layout: SegmentLayout, source: Arrangement, target: Arrangement, mesh: Mesh, device: torch.device) -> Move:
    def compute() -> Move:
        found = find_move(layout, source, target, mesh)
        return found._replace(sent_S=found.sent_S.to(device), placed_S=found.placed_S.to(device))

    return layout.cached(("move", source, target, mesh, device), compute)


def find_move(layout: SegmentLayout, source: Arrangement, target: Arrangement, mesh: Mesh) -> Move:
    """What rank `mesh.rank` sends and receives."""
    here, there = ([_tokens(layout, at, rank, mesh) for rank in range(mesh.size)] for at in (source, target))
    owner_S = torch.full((layout.whole.capacity,), -1)
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


def _tokens(layout: SegmentLayout, at: Arrangement, rank: int, mesh: Mesh) -> Tensor:
    """int64: the place in the sequence of each token that a rank has; -1 for tokens added."""
    share = _share(rank // mesh.slices, mesh)
    if at == "home":
        tokens = layout.shared(share).token_index_S
    else:
        tokens, _, _ = layout.cached(
            ("line tokens", at, share, mesh.slices), lambda: _gather_lines(layout.whole, at, share, mesh.slices)
        )
    return tokens.chunk(mesh.slices)[rank % mesh.slices]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back, group):
        ctx.back, ctx.group = back, group
        return _send(x, there, group)

    @staticmethod
    def backward(ctx, grad):
        return _send(grad, ctx.back, ctx.group), None, None, None


def _send(x_SBD: Tensor, plan: Move, group: ProcessGroup | None) -> Tensor:
    sent = x_SBD[plan.sent_S]
    received = sent
    if group is not None:
        received = sent.new_empty(sum(plan.num_received), *sent.shape[1:])
        dist.all_to_all_single(received, sent, list(plan.num_received), list(plan.num_sent), group=group)
    moved = x_SBD.new_zeros(plan.size, *x_SBD.shape[1:])
    moved[plan.placed_S] = received
    return moved
