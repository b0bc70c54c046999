"""Bytes that a rank sends in one block: to move tokens for attention along time and space, and in a ring.

Usage: moved_bytes.py OUT; every rank runs it. OUT/RANK.json has {video: {"moves": ..., "ring": ...}}, of forward and
backward. Attention itself is left out: its result decides no byte, and on long videos it would take minutes.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megadit.models.configs.config import DiTConfig
from megadit.models.megatron.parallelism import context as context_parallel
from megadit.models.megatron.parallelism.context import ContextGroups, attend_shared
from megadit.models.networks.attention import AxialInputs
from megadit.models.networks.axial import axial_layout, move
from megadit.models.networks.blocks import BlockInputs, STDiTBlock
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment, TokenMesh

GRIDS = {"256 px": (32, 16, 16), "768 px": (32, 48, 48)}
CONFIG = DiTConfig(family="st_dit", num_layers=1, hidden_size=16, num_attention_heads=2, qk_layernorm=False)


def shared_block(group):
    """A block whose tokens the ranks of `group` share."""
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    groups, block = ContextGroups(group, alone, group), STDiTBlock(CONFIG)

    def attend(q, k, v, layout, cross):
        if not cross and layout.mesh.context > 1:
            return attend_shared(q, k, v, layout, groups)
        return (q + v.mean() + k.mean()).flatten(2)

    for attention in (block.self_attention, block.temporal_attention, block.spatial_attention, block.cross_attention):
        attention.core = attend
    block.move = partial(move, group=group)
    return block


sent = {"moves": 0, "ring": 0}


def count_sent():
    """From now on, bytes that leave this rank are counted."""
    all_to_all, send_receive = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_all_to_all(received, x, num_received, num_sent, group):
        others = sum(num_sent) - num_sent[group.rank()]
        sent["moves"] += others * x[0].numel() * x.element_size()
        return all_to_all(received, x, num_received, num_sent, group=group)

    def counted_send_receive(operations):
        sent["ring"] += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return send_receive(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_all_to_all, counted_send_receive


def without_attention():
    context_parallel.attend_block = lambda q, k, v: (torch.zeros_like(q), torch.zeros(q.shape[:3]))
    context_parallel.attend_block_backward = lambda grad, q, out, lse, k, v: (q * 0, k * 0, v * 0)


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    count_sent()
    without_attention()
    block, mesh = shared_block(dist.group.WORLD), TokenMesh(context=dist.get_world_size(), rank=dist.get_rank())
    found = {}
    for video, grid in GRIDS.items():
        sent.update(moves=0, ring=0)
        pack = PackLayout.pack([Segment(grid, 1)], capacity=grid[0] * grid[1] * grid[2], text_capacity=1)
        layout = pack.shard(mesh)
        along = {axis: AxialInputs(layout=axial_layout(layout, axis)) for axis in ("time", "space")}
        inputs = BlockInputs(condition_GD=torch.zeros(1, 16), text_LBD=torch.zeros(1, 1, 16), layout=layout, **along)
        x = torch.zeros(layout.capacity, 1, 16, requires_grad=True)
        block(x, inputs).sum().backward()
        found[video] = dict(sent)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
