"""Gradients of a step with blocks that are replayed, and without: prints how far apart they are.

Usage: graphs.py OUT CASE...; one rank. With CUDA the recordings are CUDA graphs. Without, operations are traced, with
all that is not a tensor as it was, and repeated on tensors that stay in place, as CUDA graphs do: `Replayed`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megadit.models.megatron import cpu_shim

if __name__ == "__main__" and not torch.cuda.is_available():
    cpu_shim.install()

from layouts import gradients, randomise_initial_values, run_config  # noqa: E402

from megadit.models.megatron import graphed_blocks  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.ops import ledger  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402

CASES = {"all": 6, "some": 3, "none": 1}
"""Of `cuda_graph_max_segments`; packs here have three segments or four."""
MISTAKES = {"bounds of the first pack": ("token_bounds", "text_bounds"), "segments of the first pack": ("row",)}
calls = {"recorded": 0, "replayed": 0}


class Replayed(torch.autograd.Function):
    """One block's recording: inputs, output and gradients have places of their own, which the next call overwrites."""

    @staticmethod
    def forward(ctx, graph, *inputs):
        for place, given in zip(graph["places"], inputs, strict=True):
            place.data.copy_(given)
        graph["output"].copy_(graph["forward"](*graph["places"]))
        ctx.graph = graph
        calls["replayed"] += 1
        return graph["output"].detach()

    @staticmethod
    def backward(ctx, grad):
        graph = ctx.graph
        graph["grad"].copy_(grad)
        for place, value in zip(graph["grads"], graph["backward"](graph["grad"], *graph["places"]), strict=True):
            place.copy_(value)
        grads = iter(graph["grads"])
        return None, *(next(grads).detach() if is_wanted else None for is_wanted in graph["is_wanted"])


def record_by_tracing(functions, samples):
    """Stands in for torch.cuda.make_graphed_callables."""
    return tuple(record_one(function, places) for function, places in zip(functions, samples, strict=True))


def record_one(function, places):
    is_wanted = [place.requires_grad for place in places]

    def backward(grad, *inputs):
        inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, is_wanted, strict=True)]
        with torch.enable_grad():
            output = function(*inputs)
        return torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad)

    output = function(*places).detach()
    graph = {"places": places, "output": output, "grad": torch.zeros_like(output)}
    with torch.no_grad():
        graph["forward"] = make_fx(function)(*places)
    graph["backward"] = make_fx(backward)(graph["grad"], *places)
    graph["grads"] = [x.clone() for x in backward(graph["grad"], *places)]
    graph["is_wanted"] = is_wanted
    calls["recorded"] += 1
    return lambda *inputs: Replayed.apply(graph, *inputs)


def of_the_first_pack(tensors, names):
    """What a recording would read that is not given these tensors anew."""
    kept = {}

    def found(context, num_segments):
        given = tensors(context, num_segments)
        return given | {name: kept.setdefault(name, given[name]) for name in names}

    return found


def run(out, max_segments, *, num_steps=0):
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    case = {"precision": precision, "model": {"num_layers": 2}, "data": {"global_batch_size": 8}}
    config = run_config(out, case)
    groups = start_processes(config)
    # after the rules were checked: float32, which a GPU's kernel refuses, lets all differences be seen
    object.__setattr__(config, "parallel", replace(config.parallel, cuda_graph_max_segments=max_segments))
    training = build_training(config, groups)
    batches = TrainBatches(config, training.groups)
    segments = [next(batches).layout.num_segments for _ in range(training.num_micro_batches)]
    found = gradients(training)
    losses = [train_step(training, batches, step + 1).loss for step in range(num_steps)]
    process_groups.release()
    return found, losses, segments


def main(out, names):
    if not torch.cuda.is_available():
        graphed_blocks.GraphedBlocks.__init__.__defaults__ = (record_by_tracing,)
    randomise_initial_values()
    ledger.SMALL = 1  # as in a large network: what norms and activations give is computed again
    plain, plain_losses, segments = run(out, None, num_steps=2)
    told = {"segments": segments, "losses": plain_losses}
    tensors = graphed_blocks._tensors
    for name in names:
        calls.update(recorded=0, replayed=0)
        graphed_blocks._tensors = of_the_first_pack(tensors, MISTAKES.get(name, ()))
        found, losses, _ = run(out, CASES.get(name, 6), num_steps=2 * (name == "all"))
        apart = {key: ((found[key] - plain[key]).norm() / plain[key].norm()).item() for key in plain}
        told[name] = {"apart": max(apart.values()), "which": max(apart, key=apart.get), "losses": losses, **calls}
    print(json.dumps(told), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
