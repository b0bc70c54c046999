"""Attention over samples whose tokens are shared by context-parallel ranks.

    ulysses   all-to-all: each rank gets all tokens of some heads, and back (arXiv 2309.14509)
    ring      keys and values go round; each rank accumulates its tokens' softmax (arXiv 2310.01889)

Both at once: neighbouring ranks exchange heads, as far as there are enough of them, and groups of neighbours
pass keys and values round. Every rank holds an equal shard of every segment (`TokenMesh.span`), so that the work is
balanced; all of them know all boundaries, and no mask is built.

Shapes: S video tokens of this rank, N heads, K head dim, c segments of a block, s tokens of each.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.host_to_device import Need
from megadit.models.megatron.parallelism.block_attention import (
    attend_block,
    attend_block_backward,
    attend_block_tangent,
)
from megadit.models.networks.attention import AttentionCore
from megadit.models.ops.reference import attention
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import CPU, PackLayout, computed
from megadit.models.packing.segments import TokenMesh


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """The context-parallel ranks as a mesh: rank = ring.rank() * heads.size() + heads.rank()."""

    group: ProcessGroup
    """All context-parallel ranks."""
    heads: ProcessGroup
    """Neighbours, which exchange heads."""
    ring: ProcessGroup
    """Ranks with the same heads, which pass keys and values round."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def neighbours(self, mesh: TokenMesh, ring_rank: int) -> TokenMesh:
        """The CP shards of the neighbours of one ring rank, taken together."""
        width = self.heads.size()
        return mesh.at(ring_rank * width, width)


def shared_attention(groups: ContextGroups) -> AttentionCore:
    """`ops.attention` for self-attention, where context-parallel ranks may share the tokens of a sample."""

    def core(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool) -> Tensor:
        if layout.groups is None or layout.mesh.context == 1:  # every segment is on one rank
            return attention(q, k, v, layout, cross)
        return attend_shared(q, k, v, layout, groups)

    return core


def attend_shared(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, groups: ContextGroups) -> Tensor:
    """`ops.attention` [S, 1, N*K] of video tokens to one another: q [S, 1, N, K], k and v [S, 1, M, K].

    `layout` is this rank's CP shard.
    """
    is_exchanged = groups.heads.size() > 1
    if is_exchanged:
        order_S = _order_of(layout, groups).on(q.device)
        q, k, v = _Exchange.apply(torch.cat([q, k, v], dim=-1), order_S, groups.heads, True).chunk(3, dim=-1)
    if groups.ring.size() > 1:
        out_S1NK = _Ring.apply(q, k, v, layout, groups)
    else:
        out_S1NK = rearrange(attention(q, k, v, layout.whole, False), "S B (N K) -> S B N K", K=q.shape[-1])
    if is_exchanged:
        out_S1NK = _Exchange.apply(out_S1NK, order_S, groups.heads, False)
    return out_S1NK.flatten(2)


def context_needs(layout: PackLayout, groups: ContextGroups) -> list[Need]:
    """Return the tensors that `attend_shared` reads on a device."""
    whole = [computed(layout.whole)] if groups.ring.size() == 1 else []
    return whole + ([_order_of(layout, groups)] if groups.heads.size() > 1 else [])


def _order_of(layout: PackLayout, groups: ContextGroups) -> Need:
    return Need(layout, _order, (groups.ring.rank(), groups.heads.size()))


def _order(layout: PackLayout, ring_rank: int, width: int) -> Tensor:
    """int64: for each token of the neighbours in the order of the sequence, its index in rank order."""
    shards = [layout.shard(layout.mesh.at(ring_rank * width + rank)) for rank in range(width)]
    return torch.cat([shard.on(CPU).index_S for shard in shards]).argsort()


class _Exchange(torch.autograd.Function):
    """Exchange all heads of some tokens [s, 1, N, K] for some heads of all tokens [n s, 1, N/n, K], and back."""

    @staticmethod
    def forward(ctx, x, order, group, to_heads):
        ctx.order, ctx.group, ctx.to_heads = order, group, to_heads
        return _to_heads(x, order, group) if to_heads else _to_tokens(x, order, group)

    @staticmethod
    def backward(ctx, grad):
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(grad, ctx.order, ctx.group), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        there = _to_heads if ctx.to_heads else _to_tokens
        return there(tangent, ctx.order, ctx.group)


def _to_heads(x_S1NK: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    sent = rearrange(x_S1NK, "S 1 (n N) K -> n S N K", n=group.size()).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)[order][:, None]


def _to_tokens(x_S1NK: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    sent = torch.empty_like(x_S1NK[:, 0], memory_format=torch.contiguous_format)
    sent[order] = x_S1NK[:, 0]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return rearrange(received, "(n S) N K -> S 1 (n N) K", n=group.size())


class _Block(NamedTuple):
    """Neighbouring segments with equally many queries here and equally many keys there."""

    count: int
    num_queries: int
    num_keys: int
    query_start: int
    key_start: int

    def queries(self, x: Tensor) -> Tensor:
        """The block's rows of a tensor with a row per local query: a view [c, s, ...]."""
        return _rows(x, self.query_start, self.count, self.num_queries)

    def keys(self, x: Tensor) -> Tensor:
        """The block's rows of a tensor with a row per key of the other shard."""
        return _rows(x, self.key_start, self.count, self.num_keys)


def _rows(x: Tensor, start: int, count: int, length: int) -> Tensor:
    return x[start : start + count * length].unflatten(0, (count, length))


def _blocks(layout: PackLayout, own: TokenMesh, theirs: TokenMesh) -> list[_Block]:
    """Pair queries of one shard with the keys of another that they attend to; padding is left out."""
    queries, keys = layout.shard(own), layout.shard(theirs)
    items = [
        ((num_queries, num_keys), index)
        for index, (num_queries, num_keys) in enumerate(zip(queries.lengths, keys.lengths, strict=True))
        if num_queries and num_keys and not queries.segments[index].is_padding
    ]
    keyed = [((*lengths, index - place), index) for place, (lengths, index) in enumerate(items)]
    found = []
    for (num_queries, num_keys, _), group in groupby(keyed, key=lambda item: item[0]):
        members = [index for _, index in group]
        starts = queries.starts[members[0]], keys.starts[members[0]]
        found.append(_Block(len(members), num_queries, num_keys, *starts))
    return found


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ring ranks, [S, 1, N, K].

    The softmax is computed online: out and lse (the logarithm of the sum) are updated with each block of keys. The
    backward sends keys and values round once more, together with their gradients.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout, groups):
        q, kv = q[:, 0], torch.stack([k[:, 0], v[:, 0]])
        out = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
        for source, (k_now, v_now) in round_trip(kv, groups.ring):
            for pair in _blocks_with(source, layout, groups):
                part, block_lse = attend_block(pair.queries(q), pair.keys(k_now), pair.keys(v_now))
                _join(pair.queries(out), pair.queries(lse), part, block_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.save_for_forward(q, kv, out, lse)
        ctx.layout, ctx.groups = layout, groups
        return out[:, None]

    @staticmethod
    def backward(ctx, grad):
        q, kv, out, lse = ctx.saved_tensors
        grad, ring = grad[:, 0].contiguous(), ctx.groups.ring
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        grad_kv = torch.zeros_like(kv, dtype=torch.float32)
        for source, (k_now, v_now) in round_trip(kv, ring):
            for pair in _blocks_with(source, ctx.layout, ctx.groups):
                here = [pair.queries(x) for x in (grad, q, out, lse)]
                parts = attend_block_backward(*here, pair.keys(k_now), pair.keys(v_now))
                totals = pair.queries(grad_q), pair.keys(grad_kv[0]), pair.keys(grad_kv[1])
                for total, part in zip(totals, parts, strict=True):
                    total += part
            grad_kv = Shift(grad_kv, ring).wait()  # travels with its keys and values; the last shift brings it back
        grad_k, grad_v = grad_kv.to(kv.dtype)
        return grad_q.to(q.dtype)[:, None], grad_k[:, None], grad_v[:, None], None, None

    @staticmethod
    def jvp(ctx, q_tangent, k_tangent, v_tangent, *_):
        q, kv, out, lse = ctx.saved_tensors
        moving = torch.cat([kv, torch.stack([k_tangent[:, 0], v_tangent[:, 0]])])
        total, shift = torch.zeros_like(out, dtype=torch.float32), torch.zeros_like(lse)
        for source, (k, v, dk, dv) in round_trip(moving, ctx.groups.ring):
            for pair in _blocks_with(source, ctx.layout, ctx.groups):
                here, there = (pair.queries(x) for x in (q, q_tangent[:, 0], lse)), map(pair.keys, (k, v, dk, dv))
                part, block_shift = attend_block_tangent(*here, *there)
                pair.queries(total).add_(part)
                pair.queries(shift).add_(block_shift)
        return (total - shift[..., None] * out).to(q.dtype)[:, None]


def _join(out: Tensor, lse: Tensor, part: Tensor, block_lse: Tensor) -> None:
    """Adds attention to further keys, in place: [c, s, N, K] and [c, s, N]."""
    joined = torch.logaddexp(lse, block_lse)
    out.mul_((lse - joined).exp_()[..., None]).add_(part * (block_lse - joined).exp_()[..., None])
    lse.copy_(joined)


def _blocks_with(source: int, layout: PackLayout, groups: ContextGroups) -> list[_Block]:
    """Pair local queries with the keys of rank `source` of the ring that they attend to."""
    own, theirs = (groups.neighbours(layout.mesh, rank) for rank in (groups.ring.rank(), source))
    return layout.memo(_blocks, own, theirs)


def round_trip(kv: Tensor, ring: ProcessGroup):
    """(ring rank that it comes from, a tensor of any shape), the local one first; the next is received meanwhile."""
    for step in range(ring.size()):
        is_last = step == ring.size() - 1
        shift = None if is_last else Shift(kv, ring)
        yield (ring.rank() - step) % ring.size(), kv
        if shift is not None:
            kv = shift.wait()


class Shift:
    """A tensor that is being sent to the next rank of the ring."""

    def __init__(self, x: Tensor, ring: ProcessGroup) -> None:
        self._sent, self._received = x, torch.empty_like(x)
        size, rank = ring.size(), ring.rank()
        after, before = (dist.get_global_rank(ring, (rank + step) % size) for step in (1, -1))
        self._requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after, ring), dist.P2POp(dist.irecv, self._received, before, ring)]
        )

    def wait(self) -> Tensor:
        """Wait for the tensor from the previous rank of the ring; its shape is the same on all ranks."""
        for request in self._requests:
            request.wait()
        return self._received
