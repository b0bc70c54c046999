"""Gradients with and without `gradient_accumulation_fusion`: prints how far apart they are in several layouts.

Usage: fused_gradients.py OUT CASES [FACTOR]; every rank runs it. CASES is {name: case}, see `layouts.py`. Without CUDA
a product of torch's, times FACTOR, stands in for the extension's.
"""

import json
import sys
from pathlib import Path

import torch
from megatron.core.tensor_parallel import layers

from megadit.models.megatron import cpu_shim

if __name__ == "__main__" and not torch.cuda.is_available():
    cpu_shim.install()

from layouts import gradients, randomise_initial_values, run_config  # noqa: E402

from megadit.models import blocks  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.ops import ledger  # noqa: E402
from megadit.train.setup import build_training, start_processes  # noqa: E402


class StandIn:
    """What the extension does, in torch; counts its calls."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def wgrad_gemm_accum_fp32(self, input, grad_output, main_grad):
        self.calls += 1
        main_grad.addmm_(grad_output.t().float(), input.float(), alpha=self.factor)


def run(out, case):
    """The gradients of a case, and which parameters' were added to their sums by the products themselves."""
    config = run_config(out, {**case, "model": {"num_layers": 2}})
    training = build_training(config, start_processes(config))
    found = gradients(training)
    fused = {name for name, parameter in training.named_parameters() if parameter.grad_added_to_main_grad}
    process_groups.release()
    return found, fused


def main(out, cases, factor):
    stand_in = StandIn(factor)
    if not torch.cuda.is_available():
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = stand_in, True
    randomise_initial_values()
    blocks.MLP_SLICE = 64  # several products a micro-batch
    ledger.SMALL = 1  # as in a large network: what norms and activations give is computed again
    told = {}
    for name, case in cases.items():
        plain, none = run(out, case)
        parallel = case.get("parallel", {}) | {"gradient_accumulation_fusion": True}
        found, fused = run(out, {**case, "parallel": parallel})
        apart = max((((found[key] - plain[key]).norm() / plain[key].norm()).item(), key) for key in plain)
        told[name] = {"apart": apart[0], "which": apart[1], "fused": sorted(fused), "otherwise": sorted(none)}
    print(json.dumps(told | {"calls": stand_in.calls}), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
