"""Losses of pairs of images and texts, and their gradients, on ranks that have unequally many.

Usage: matching.py OUT; every rank runs it and leaves what it has in OUT/RANK.safetensors.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

import safetensors.torch  # noqa: E402

from megadit.train.objectives.contrast import pairwise_loss, softmax_loss  # noqa: E402

COUNTS = {1: [10], 2: [7, 3], 4: [4, 3, 0, 3]}
"""Ranks -> pairs of each."""
LOSSES = {
    "softmax": lambda images, texts, scale, offset, group: softmax_loss(images, texts, scale, group),
    "chunks": lambda images, texts, scale, offset, group: softmax_loss(images, texts, scale, group, 2),
    "pairwise": pairwise_loss,
}


def main():
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, counts = dist.get_rank(), COUNTS[dist.get_world_size()]
    generator, own, found = torch.Generator().manual_seed(0), slice(sum(counts[:rank]), sum(counts[: rank + 1])), {}
    every = [F.normalize(torch.randn(10, 6, dtype=torch.float64, generator=generator), dim=-1) for _ in "it"]
    for name, loss in LOSSES.items():
        inputs = [x[own].clone().requires_grad_() for x in every]
        inputs += [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (3.0, -2.0)]
        loss_N, is_wrong_N = loss(*inputs, dist.group.WORLD)
        weight_N = torch.arange(1.0, 11.0, dtype=torch.float64)[own]  # losses that count unequally
        gradients = torch.autograd.grad((weight_N * loss_N).sum(), inputs, allow_unused=True)
        kinds = ("images", "texts", "scale", "offset")
        found |= {f"{name} {kind}": x for kind, x in zip(kinds, gradients, strict=True) if x is not None}
        found |= {f"{name} loss": loss_N.detach(), f"{name} wrong": is_wrong_N.detach()}
    safetensors.torch.save_file(found, Path(sys.argv[1]) / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
