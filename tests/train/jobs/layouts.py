"""Trains a small network for a few steps under several layouts and leaves losses, norms and checkpoints to compare.

Usage: layouts.py OUT; every rank runs it. OUT/cases.json says what to run ({name: case}); of each, OUT/NAME.json has
the numbers and OUT/NAME the tensors of a checkpoint.
"""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from megadit.models.megatron import cpu_shim
from megadit.models.ops.crossover import CROSSOVERS

if __name__ == "__main__":
    cpu_shim.install()

import safetensors.torch  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402

from megadit.models.configs.adapter import AdapterConfig  # noqa: E402
from megadit.models.configs.block import ExpertConfig  # noqa: E402
from megadit.models.configs.config import (
    DiTConfig,  # noqa: E402
    TextTowerConfig,  # noqa: E402
)
from megadit.models.configs.families import CONDITIONING_MODES  # noqa: E402
from megadit.models.diffusion import parameterization
from megadit.models.diffusion.noise import latent_noise, seed_key  # noqa: E402
from megadit.models.lora.adapters import adapter_key  # noqa: E402
from megadit.models.lora.layers import LowRank, _identity  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.megatron.linears.fp8 import Fp8Linear  # noqa: E402
from megadit.models.megatron.parallelism import context as context_parallel
from megadit.models.megatron.parallelism import experts as expert_parallel
from megadit.models.megatron.shards import is_expert, splits  # noqa: E402
from megadit.models.networks import axial, experts, initialize
from megadit.models.networks.attention import WidthNorm  # noqa: E402
from megadit.models.networks.conditioning import CleanLatents, Conditioning  # noqa: E402
from megadit.models.networks.registry import build_network  # noqa: E402
from megadit.models.ops import ledger
from megadit.models.packing import pack_layout as layout
from megadit.train.config.distill import DistillConfig  # noqa: E402
from megadit.train.config.schema import EmaConfig, ParallelConfig  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.data.loader import build_train_loader  # noqa: E402
from megadit.train.data.packs import packed_batch
from megadit.train.engine import balance, setup
from megadit.train.engine.schedule import evaluation  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import _forward_backward, train_step  # noqa: E402
from megadit.train.engine.validation import ShardedDenoiser  # noqa: E402
from megadit.train.objectives import contrast as matching
from megadit.train.objectives import losses as loss
from megadit.train.objectives.networks import TrainingModel  # noqa: E402
from megadit.train.objectives.registry import objective_of  # noqa: E402
from megadit.train.optim.state import held  # noqa: E402
from megadit.train.recipes import load_recipe  # noqa: E402

NUM_STEPS = 2  # the first update of Adam hides much, the second does not
SHAPES = ((1, 4, 4), (3, 4, 4), (2, 3, 5), (1, 2, 3), (2, 5, 5))
"""Images and videos of 16, 48, 30, 6 and 50 tokens."""


def run_config(out, case):
    """Text, images, dropped text, learned uncertainty; heads wider than the network."""
    run = load_recipe("digits_tiny")
    data = {"mock": True, "mock_latent_shapes": SHAPES, "text_dropout": 0.4, "global_batch_size": 4}
    model = {key: tuple(value) if isinstance(value, list) else value for key, value in case.get("model", {}).items()}
    for name, kind in {"experts": ExpertConfig, "text_tower": TextTowerConfig}.items():
        if name in model:
            model[name] = kind(**model[name])
    train = {"output_dir": str(out), "precision": case.get("precision", "fp32"), "num_threads": 1}
    if "adapter" in case:
        train["adapter"] = AdapterConfig(**case["adapter"])
    if "distill" in case:
        distill = {key: tuple(value) if isinstance(value, list) else value for key, value in case["distill"].items()}
        train["distill"] = DistillConfig(**distill)
    if "conditioning" in case:
        data |= {"conditioning": tuple(case["conditioning"]), "seq_length": 128, "text_seq_length": 96}
        model["conditioning_sigma"] = 0.02
    data |= case.get("data", {})
    data["mock_latent_shapes"] = tuple(map(tuple, data["mock_latent_shapes"]))
    is_of_noise = "distill" not in case and model.get("family") not in ("vit", "clip")
    settings = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
    return replace(
        run,
        model=replace(run.model, **{"num_layers": 2, "num_attention_heads": 12, "head_dim": 8} | model),
        data=replace(run.data, **data),
        train=replace(run.train, **train | case.get("train", {})),
        optimizer=replace(run.optimizer, **settings | case.get("optimizer", {})),
        diffusion=replace(run.diffusion, **{"learned_uncertainty": is_of_noise} | case.get("diffusion", {})),
        checkpoint=replace(run.checkpoint, init_from=case.get("init_from")),
        parallel=ParallelConfig(**case.get("parallel", {})),
        ema=run.ema if case.get("averages", True) else EmaConfig(sigma_rels=()),
    )


def in_two_turns(config):
    """Of several ranks, each takes its packs in two turns: more are as exact, and take longer. Stages want more."""
    sizes = config.parallel.sizes
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1 or sizes.pipeline > 1 or config.data.micro_batch_size > 1:
        return config
    packs = config.data.global_batch_size * sizes.model_parallel_size // world_size
    return replace(config, data=replace(config.data, micro_batch_size=max(1, packs // 2)))


def random_value(name, shape, seed=0):
    """A value of no parameter in particular, the same for any layout: what starts at zero would hide mistakes."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    return torch.randn(shape, generator=generator, device="cpu") * 0.1 + ("layernorm" in name)


def randomise_initial_values():
    initialize.initial_value = random_value
    torch.nn.init.zeros_ = lambda tensor: tensor.data.copy_(random_value("uncertainty", tensor.shape))


class GivenTheStudents:
    """A teacher's chunk that goes on from the activations of the student."""

    def __init__(self, student, chunk):
        vars(self).update(student=student, chunk=chunk)

    def __setattr__(self, name, value):
        self.chunk.before = self.student.before


def break_it(what, training):
    """Mistakes that raise nothing."""
    config = training.network.config
    parameters = list(training.parameters())
    if what == "sequence parallel mark":
        for parameter in parameters:
            parameter.sequence_parallel = False
    elif what == "sum of norms":
        config.qk_layernorm = False
    elif what == "sum over stages":
        config.has_cond_embedder = False
    elif what == "counted once":
        for parameter in parameters:
            parameter.shared = False
    elif what == "batched sends":
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
    elif what in ("sum over copies", "sum over shares"):
        for part in training.parts:
            part.finish_grad_sync = lambda force_all_reduce=False: None
    elif what == "divided once":
        for module in training.network.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(None)
    elif what == "activations of the teacher":
        networks = training.network.networks
        networks.teachers_chunk = GivenTheStudents(networks.model, networks.teachers_chunk)
    elif what == "order of tokens":
        patch(context_parallel, "_order", _first_to_last)
    elif what == "exchange of eight bits":
        for module in training.network.modules():
            if isinstance(module, Fp8Linear):
                module.share = module.share._replace(leave=_identity)
    elif what == "exchange of adapters":
        for module in training.network.modules():
            if isinstance(module, LowRank):
                module.exchange = _identity
    elif what == "norm over the heads of all ranks":
        for module in training.network.modules():
            if isinstance(module, WidthNorm):
                module.sum_over_ranks = _identity
    elif what == "moved tokens":
        find_move = axial.find_move
        patch(axial, "find_move", lambda *args: _reversed(find_move(*args)))
    elif what == "scores of others":
        repeated = lambda score, layout, *groups: score.repeat(4, 1, 1)[: layout.whole.capacity]  # noqa: E731
        patch(expert_parallel, "all_tokens", repeated)
    elif what == "loads of others":
        patch(balance, "dist", SimpleNamespace(all_reduce=lambda counts: None))
    elif what == "sum over holders of an expert":
        for part in training.parts:
            part.expert_parallel_bucket_groups = []
    elif what == "weight of an expert":
        forward = experts.Experts.forward
        patch(experts.Experts, "forward", lambda self, x, weight, counts: forward(self, x, weight.flip(0), counts))
    elif what == "norm of experts":
        for parameter in filter(is_expert, parameters):
            parameter.shared = True
    elif what == "no loss on what is given":
        is_sample = property(lambda tensors: tensors.is_sample_S)
        patch(layout.LayoutTensors, "is_target_S", is_sample)
        patch(layout.PackLayout, "num_targets", property(lambda pack: pack.num_tokens))
    elif what == "a noise level of its own":
        patch(loss, "denoise_packed", _at_the_level_of_the_sample)
    elif what == "sum over the ranks of a sample":
        training.network.networks.context = None
    elif what == "text left out":
        patch(packed_batch.PackedBatch, "without_text", lambda batch: batch)
    elif what == "pairs of other ranks":
        training.network.networks.readers = None
    elif what == "gradient from other ranks":
        patch(matching, "gather_from_sequence_parallel_region", _with_own_gradient)
    elif what == "keys of others":
        wait = context_parallel.Shift.wait
        patch(context_parallel.Shift, "wait", lambda shift: (wait(shift), shift._sent)[1])
    else:
        raise ValueError(what)


def _with_own_gradient(x, tensor_parallel_output_grad, group):
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)


def _at_the_level_of_the_sample(dit, x, sigma_G, **conditions):
    form = property(lambda config: replace(CONDITIONING_MODES[config.conditioning_mode], has_own_level=False))
    with mock.patch.object(DiTConfig, "conditioning", form):
        return parameterization.denoise_packed(dit, x, sigma_G, **conditions)


def _first_to_last(layout, ring_rank, width):
    return torch.arange(width * layout.capacity)


def _reversed(found):
    return found._replace(placed_S=found.placed_S.flip(0))


_patched = []


def patch(module, name, function):
    """Until the end of the case."""
    _patched.append((module, name, getattr(module, name)))
    setattr(module, name, function)


def unpatch():
    while _patched:
        setattr(*_patched.pop())


def spread(training):
    """How far copies of the same elements have come apart, among ranks that hold the same."""
    distances = [torch.zeros(())]
    first = {}
    for name, parameter in training.named_parameters():
        value = held(parameter)[1].float()
        if not value.numel():  # of few rows some ranks have none
            continue
        if not splits(parameter):
            distances.append(_distance(value, training.groups.tensor))
        if is_expert(parameter) and training.config.parallel.data_parallel != "fsdp":
            distances.append(_distance(value, training.groups.expert_data))
        if getattr(parameter, "pipeline_parallel", False):
            distances.append(_distance(value, training.groups.pipeline))
            distances.append((value - first.setdefault(name, value)).abs().max())
    largest = torch.stack(distances).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _distance(value, group):
    of_first = value.clone()
    dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
    return (value - of_first).abs().max()


def note_decisions(training):
    """Notes from now on who chooses whom; a function that sums it up: the same for the same decisions on any ranks.

    Not where blocks are recomputed: they choose again, when another batch is on its way.
    """
    found, batch = {"sum": torch.zeros((), dtype=torch.long), "margin": math.inf}, []
    forward, choose = TrainingModel.forward, experts.ExpertMLP.choose
    layers = {mlp: index for index, mlp in balance._expert_mlps(training)}

    def noted_forward(model, packs, *args, **kwargs):
        batch[:] = [packs]
        return forward(model, packs, *args, **kwargs)

    def noted_choose(mlp, score, layout):
        chosen = choose(mlp, score, layout)
        is_trained = mlp in layers and torch.is_grad_enabled()
        if is_trained and training.config.parallel.recompute_granularity != "full":
            tensors = layout.on("cpu")
            key_S = batch[0].noise_key_G[tensors.segment_of_token_S] ^ (tensors.position_in_segment_S * 1_000_003)
            if training.config.parallel.sequence_parallel:
                group = training.groups.tensor
                key_S = key_S.chunk(group.size())[group.rank()]
            bits_S = (chosen[:, 0] << torch.arange(chosen.shape[-1])).sum(-1)
            found["sum"] += ((key_S ^ (layers[mlp] * 7_919)) * 2_654_435_761 * bits_S).sum()
            found["margin"] = min(found["margin"], margin(mlp.config, score, layout.rows.groups))
        return chosen

    patch(TrainingModel, "forward", noted_forward)
    patch(experts.ExpertMLP, "choose", noted_choose)

    def told():
        dist.all_reduce(found["sum"])
        return {"decisions": found["sum"].item(), "margin": found["margin"]}

    return told


def margin(config, score, groups):
    """How far the closest decision was from another one; of all tokens on one rank."""
    smallest = math.inf
    for group in groups:
        if group.is_padding:
            continue
        part, dim, count = score[group.start : group.stop, 0].unflatten(0, (group.count, group.length)), 2, config.top_k
        if config.routing == "expert_choice":
            dim, count = 1, config.capacity(group.length)
        if count < part.shape[dim]:
            best = part.topk(count + 1, dim=dim).values
            taken, left = best.narrow(dim, count - 1, 1), best.narrow(dim, count, 1)
            smallest = min(smallest, ((taken - left) / taken).min().item())
    return smallest


def sampled(training):
    """D of two noisy samples with and without text, whose tokens do not divide among ranks."""
    model = training.config.model
    noise_BCTHW = latent_noise(torch.tensor([seed_key(1), seed_key(2)]), (model.in_channels, 2, 3, 5))
    text_BLE = torch.randn(2, 4, model.crossattn_emb_size, generator=torch.Generator().manual_seed(0))
    given = None
    if model.conditioning_sigma is not None:
        is_given = torch.zeros(3, 3, 5, dtype=torch.bool)
        is_given[0, :2], is_given[2] = True, True
        given = CleanLatents(noise_BCTHW[:, :, [1, 0, 1]], is_given, (0.5,))
    told_B = None if model.guidance_embedding_range is None else torch.tensor([2.0, 5.0])
    fps_B = torch.tensor([8.0, 0.0])
    conditioning = Conditioning(text_BLE, torch.tensor([4, 0]), fps_B, clean=given, guidance_B=told_B)
    return ShardedDenoiser(training)(3 * noise_BCTHW, torch.tensor([3.0, 0.5]), conditioning)


def gradients(training):
    """The reduced gradients of one global batch on a single rank."""
    batches = TrainBatches(training.config, training.groups)
    _forward_backward(training, [next(batches) for _ in range(training.num_micro_batches)])
    return {f"grad.{name}": parameter.main_grad.clone() for name, parameter in training.named_parameters()}


def frozen(training):
    """What this rank holds of the parameters that are not trained."""
    named = [pair for part in training.parts for pair in part.module.named_parameters()]
    if training.teacher is not None:
        named += training.teacher.network.named_parameters()
    return {name: held(parameter)[1].clone() for name, parameter in named if not parameter.requires_grad}


def weights_apart(training):
    """Beside adapters: how many weights of the networks of teacher and critic do not lie where the student's do."""

    def places(network):
        own = [pair for pair in network.named_parameters() if "dit." in pair[0] and adapter_key(pair[0]) is None]
        named = [(name, held(value)[1]) for name, value in own]
        return [value.untyped_storage().data_ptr() for _, value in named if value.numel()]

    others = [training.teacher.network, *([] if training.critic is None else [training.critic.network])]
    own = {*places(training.network)}
    return sum(place not in own for other in others for place in places(other))


def bytes_held(training):
    """Bytes of parameters, gradients and optimizer state on this rank, and of the whole network in float32."""
    local = sum(held(parameter)[1].nbytes for parameter in training.parameters())
    grads = sum(held(parameter.grad)[1].nbytes for parameter in training.parameters() if parameter.grad is not None)
    state = sum(
        held(value)[1].nbytes
        for owned in training.tensors.ownership.slices
        for value in owned.optimizer.state[owned.key].values()
        if value.numel() > 1
    )
    whole = 4 * sum(parameter.numel() for parameter in training.parameters())
    return {"parameters": local, "gradients": grads, "state": state, "whole": whole}


def save(training, folder):
    if training.groups.is_first:
        folder.mkdir(parents=True)
    dist.barrier()
    training.tensors.save(folder)


def torch_reference(out, case):
    """The gradients of one global batch by plain torch layers, without Megatron."""
    config = run_config(out, case)
    model = TrainingModel(build_network(config.model), config, objective_of(config))
    initialize.initialize_(model.dit, 0)
    loader = iter(build_train_loader(config, rank=0, world_size=1))
    packs = [next(loader) for _ in range(config.data.global_batch_size)]
    num_tokens = sum(pack.num_tokens for pack in packs)
    sums = [model(pack) for pack in packs]
    sum(value.objective for value in sums).backward()  # divided afterwards, as experts balance the sum over tokens
    gradients = {f"grad.{name}": parameter.grad / num_tokens for name, parameter in model.named_parameters()}
    safetensors.torch.save_file(gradients, out / "gradients.safetensors")
    return {"loss": [sum(value.weighted.item() for value in sums) / num_tokens]}


def run(out, case):
    """Numbers of one case; its checkpoint lies in `out`."""
    config = in_two_turns(run_config(out, case))
    if case.get("products") == "onednn":
        for crossover in CROSSOVERS.values():
            patch(crossover, "size", 1)
    if case.get("is_large"):
        patch(ledger, "SMALL", 1)
    processes = start_processes(config)
    if case.get("apart"):
        build_chunks = setup.build_chunks
        apart = lambda config, groups, weights, form: build_chunks(config, groups, weights, replace(form, base=None))  # noqa: E731
        patch(setup, "build_chunks", apart)
    training = build_training(config, processes)
    if "broken" in case:
        break_it(case["broken"], training)
    if case.get("gradients"):
        safetensors.torch.save_file(gradients(training), out / "gradients.safetensors")
    decisions = note_decisions(training)
    batches = TrainBatches(config, processes)
    before = frozen(training)
    steps = range(case.get("steps", NUM_STEPS))
    results = [train_step(training, batches, step + 1, must_stop=False) for step in steps]
    numbers = {
        "loss": [result.loss for result in results],
        "critic_loss": [result.critic_loss for result in results if result.critic_loss is not None],
        "grad_norm": [result.grad_norm for result in results],
        "tokens": [result.tokens for result in results],
        "samples": [result.samples for result in results],
        "flops": [result.flops for result in results],
        "changed": [name for name, value in frozen(training).items() if not torch.equal(value, before[name])],
        "num_bytes": 4 * sum(parameter.numel() for parameter in training.parameters()),
    }
    numbers |= decisions()
    with evaluation(training):
        is_denoiser = config.model.denoises
        numbers |= {"spread": spread(training), "sampled": sampled(training).flatten().tolist() if is_denoiser else []}
    if config.train.adapter is not None and training.teacher is not None:
        numbers["apart"] = weights_apart(training)
    if config.parallel.data_parallel == "fsdp":
        numbers["bytes"] = bytes_held(training)
    if "broken" not in case:
        save(training, out / "tensors")
    unpatch()
    process_groups.release()
    return numbers


def main():
    folder = Path(sys.argv[1])
    randomise_initial_values()
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        out = folder / name
        out.mkdir(exist_ok=True)
        numbers = (torch_reference if case.get("is_torch") else run)(out, case)
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(numbers))
    process_groups.destroy()


if __name__ == "__main__":
    main()
