"""Gradients with and without `gradient_accumulation_fusion`: prints how far apart they are in several layouts.

Usage: fused_gradients.py OUT CASES [FACTOR]; every rank runs it. CASES is {name: case}, see `layouts.py`. Without CUDA
a product of CPUs, times FACTOR, stands in for that of GPUs.
"""

import json
import sys
from pathlib import Path

import torch

from megadit.models.megatron import cpu_shim

if __name__ == "__main__" and not torch.cuda.is_available():
    cpu_shim.install()

from layouts import gradients, randomise_initial_values, run_config  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.megatron.linears import gradient_sums
from megadit.models.networks import blocks
from megadit.models.ops import ledger  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402


class StandIn:
    """What a GPU's product does, on CPUs; counts its calls."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def multiply_into(self, total, a, b, *, beta):
        self.calls += 1
        torch.addmm(total, a.float(), b.float(), beta=beta, alpha=self.factor, out=total)


def poison(training):
    for parameter in training.parameters():
        parameter.main_grad.fill_(torch.nan)


def named(training, is_so):
    return sorted(name for name, parameter in training.named_parameters() if is_so(parameter))


def run(out, case):
    """The gradients of a case, and which parameters' were added to their sums by the products themselves; which of
    these sums a step does not zero, and the largest of them after a step that adds nothing."""
    config = run_config(out, {**case, "model": {"num_layers": 2}})
    training = build_training(config, start_processes(config))
    poison(training)
    found = gradients(training)
    fused = named(training, lambda parameter: parameter.grad_added_to_main_grad)
    poison(training)
    [part] = training.parts
    part.zero_grad_buffer()
    unzeroed = named(training, lambda parameter: parameter.main_grad.isnan().all())
    if not part.ddp_config.overlap_grad_reduce:
        part.finish_grad_sync()
    largest = torch.stack([parameter.main_grad.abs().max() for parameter in training.parameters()]).max().item()
    process_groups.release()
    return found, fused, {"unzeroed": unzeroed, "of nothing": largest}


def main(out, cases, factor):
    stand_in = StandIn(factor)
    if not torch.cuda.is_available():
        gradient_sums.multiply_into = stand_in.multiply_into
    randomise_initial_values()
    blocks.MLP_SLICE = 64  # several products a micro-batch
    ledger.SMALL = 1  # as in a large network: what norms and activations give is computed again
    told = {}
    for name, case in cases.items():
        plain, none, _ = run(out, case)
        parallel = case.get("parallel", {}) | {"gradient_accumulation_fusion": True}
        found, fused, sums = run(out, {**case, "parallel": parallel})
        distances = {key: (found[key] - plain[key]).norm() / plain[key].norm() for key in plain}
        apart = max((distance.nan_to_num(torch.inf).item(), key) for key, distance in distances.items())
        told[name] = {"apart": apart[0], "which": apart[1], "fused": fused, "otherwise": none, **sums}
    print(json.dumps(told | {"calls": stand_in.calls}), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
