"""Trains a small network for a few steps under several layouts and leaves gradients, losses and weights to compare.

Usage: layouts.py OUT NAME...; every rank runs it, and writes OUT/NAME.safetensors and OUT/NAME.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

import safetensors.torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megadit.models.dit import DiT  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.megatron.mcore_layers import full_shape, shard, split_dim  # noqa: E402
from megadit.train.batches import TrainBatches  # noqa: E402
from megadit.train.config import ParallelConfig  # noqa: E402
from megadit.train.data.loader import build_train_loader  # noqa: E402
from megadit.train.loss import TrainingModel  # noqa: E402
from megadit.train.recipes import load_recipe  # noqa: E402
from megadit.train.setup import build_training, start_processes  # noqa: E402
from megadit.train.step import _forward_backward, train_step  # noqa: E402

NUM_STEPS = 3
LAYOUTS = {
    "ddp": {},
    "distributed_optimizer": {"data_parallel": "distributed_optimizer"},
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def run_config(out, *, optimizer="adamw", parallel=None):
    """A network with text, images, dropped text and learned uncertainty, in float32."""
    run = load_recipe("digits_tiny")
    return replace(
        run,
        data=replace(run.data, mock=True, text_dropout=0.4),
        train=replace(run.train, output_dir=str(out), precision="fp32", num_threads=1),
        optimizer=replace(run.optimizer, optimizer=optimizer, lr=1e-3, weight_decay=0.1, clip_grad=0.5),
        parallel=ParallelConfig(**(parallel or {})),
    )


def random_value(name, shape):
    """A value of no parameter in particular, the same for any layout."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    return torch.randn(shape, generator=generator) * 0.1 + ("layernorm" in name)


def randomise(training):
    """Every tensor, those that start at zero included: a wrong attention must be seen in the loss."""
    group = training.groups.tensor
    with torch.no_grad():
        for name, parameter in training.network.named_parameters():
            whole = random_value(name, full_shape(parameter, group.size()))
            parameter.copy_(shard(parameter, whole, group.rank()))


def whole(tensor, parameter, training):
    dim, group = split_dim(parameter), training.groups.tensor
    if dim is None or group.size() == 1:
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def replica_spread(parameter, group):
    """How far the copies of a parameter have come apart that tensor-parallel ranks each hold whole."""
    if split_dim(parameter) is not None:
        return 0.0
    of_first = parameter.detach().clone()
    dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
    distance = (parameter - of_first).abs().max()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return distance.item()


def gradients(training):
    """The reduced gradients of one global batch; with the distributed optimizer each rank has its share of them."""
    _forward_backward(training, iter(TrainBatches(training.config, training.groups)), [])
    return {
        name: whole(parameter.main_grad, parameter, training) for name, parameter in training.network.named_parameters()
    }


def torch_reference(out):
    """The gradients of one global batch by plain torch layers, without Megatron."""
    config = run_config(out)
    model = TrainingModel(DiT(config.model), config.diffusion, None, None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_value(name, parameter.shape))
    loader = iter(build_train_loader(config, rank=0, world_size=1))
    packs = [next(loader) for _ in range(config.data.global_batch_size)]
    loss = sum(model(pack).objective for pack in packs) / sum(pack.num_tokens for pack in packs)
    loss.backward()
    gradients = {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    safetensors.torch.save_file(gradients, out / "torch.safetensors")
    weighted = sum(model(pack).weighted.item() for pack in packs) / sum(pack.num_tokens for pack in packs)
    (out / "torch.json").write_text(json.dumps({"loss": [weighted]}))


def run(name, out):
    layout, _, variant = name.partition("-")
    optimizer = "muon" if variant == "muon" else "adamw"
    config = run_config(out / name, optimizer=optimizer, parallel=LAYOUTS[layout])
    processes = start_processes(config)
    training = build_training(config, processes)
    randomise(training)
    if variant == "unmarked":  # a mistake that raises nothing
        for parameter in training.network.parameters():
            parameter.sequence_parallel = False
    if variant == "unsummed":
        training.network.config.qk_layernorm = False
    tensors = {f"grad.{key}": value for key, value in gradients(training).items()}
    batches = TrainBatches(config, processes)
    results = [train_step(training, batches, step + 1, must_stop=False) for step in range(NUM_STEPS)]
    tensors |= {
        f"weight.{key}": whole(parameter, parameter, training) for key, parameter in training.network.named_parameters()
    }
    spread = max(replica_spread(parameter, processes.tensor) for parameter in training.network.parameters())
    if processes.is_first:
        safetensors.torch.save_file(tensors, out / f"{name}.safetensors")
        numbers = {"loss": [r.loss for r in results], "grad_norm": [r.grad_norm for r in results], "spread": spread}
        (out / f"{name}.json").write_text(json.dumps(numbers))
    parallel_state.destroy_model_parallel()


def main():
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        torch_reference(out) if name == "torch" else run(name, out)
    process_groups.destroy()


if __name__ == "__main__":
    main()
