"""Gradients of one step with 8-bit products and without, on one rank; prints where they were and how far apart.

Usage: eight_bits.py OUT. Without CUDA a module in torch, with TransformerEngine's rules of sizes and its rounding of
whole tensors, stands in for it.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import nn

from megadit.models.megatron import cpu_shim

if __name__ == "__main__" and not torch.cuda.is_available():
    cpu_shim.install()

from layouts import gradients, randomise_initial_values, run_config, sampled  # noqa: E402

from megadit.models.megatron import extensions  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.networks import blocks
from megadit.models.ops import ledger  # noqa: E402
from megadit.train.engine.schedule import evaluation  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402

FORMATS = {"E4M3": (torch.float8_e4m3fn, torch.float8_e4m3fn), "HYBRID": (torch.float8_e4m3fn, torch.float8_e5m2)}
now = SimpleNamespace(recipe=None)
seen = SimpleNamespace(in_eight=0, otherwise=0)


def rounded(x, dtype):
    """x with the values that eight bits have, scaled so that the largest fits."""
    assert x.shape[-1] % 16 == 0 and x.shape[:-1].numel() % 16 == 0, x.shape
    scale = torch.finfo(dtype).max / x.float().abs().max().clamp(min=1e-12)
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, formats):
        x, weight = rounded(x, formats[0]), rounded(weight, formats[0])
        ctx.save_for_backward(x, weight)
        ctx.dtype = formats[1]
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = rounded(grad, ctx.dtype)
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1), None


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, bias, tp_size, params_dtype, device, **options):
        super().__init__()
        assert tp_size == 1 and not bias
        self.weight, self.use_bias = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype)), False

    def forward(self, x):
        if now.recipe is None:
            seen.otherwise += 1
            return nn.functional.linear(x, self.weight)
        seen.in_eight += 1
        return Product.apply(x, self.weight, FORMATS[now.recipe])


@contextmanager
def autocast(*, enabled, recipe):
    before, now.recipe = now.recipe, recipe if enabled else None
    try:
        yield
    finally:
        now.recipe = before


def stand_in():
    """Modules with the names that are called of TransformerEngine."""

    def has_it(return_reason):
        return True, ""

    engine, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    engine.pytorch, engine.common = ModuleType("transformer_engine.pytorch"), common
    vars(engine.pytorch).update(Linear=Linear, autocast=autocast, is_fp8_available=has_it)
    vars(engine.pytorch).update(is_fp8_block_scaling_available=has_it, is_mxfp8_available=has_it)
    common.recipe = ModuleType("transformer_engine.common.recipe")
    common.recipe.Format = {name: name for name in FORMATS}
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(common.recipe, name, lambda fp8_format: fp8_format)
    parts = (engine, engine.pytorch, common, common.recipe)
    sys.modules.update({module.__name__: module for module in parts})
    mock.patch.object(extensions, "has_transformer_engine", lambda: True).start()


def run(out, fp8, recompute_granularity="none"):
    """The gradients, how many products had eight bits and how many not, and a validation's of the latter two."""
    parallel = {"transformer_impl": "transformer_engine", "recompute_granularity": recompute_granularity}
    config = run_config(out, {"precision": "bf16", "parallel": parallel, "model": {"num_layers": 2}})
    config = replace(config, train=replace(config.train, fp8=fp8))
    training = build_training(config, start_processes(config))
    seen.in_eight = seen.otherwise = 0
    found = gradients(training)
    counts = {"in_eight": seen.in_eight, "otherwise": seen.otherwise}
    with evaluation(training), torch.no_grad():
        videos = sampled(training)
    counts["in_eight_when_sampling"] = seen.in_eight - counts["in_eight"]
    process_groups.release()
    return found, videos, counts


def distance(ours, theirs):
    return max(((ours[key] - theirs[key]).norm() / theirs[key].norm()).item() for key in theirs)


def main(out):
    if not torch.cuda.is_available():
        stand_in()
    randomise_initial_values()
    blocks.MLP_SLICE, ledger.SMALL = 64, 1  # as in a large network: several slices, norms computed again
    plain, videos, counts = run(out, "none")
    told = {"none": counts}
    for name, case in {"e4m3": ("e4m3",), "hybrid": ("hybrid",), "full": ("hybrid", "full")}.items():
        found, made, counts = run(out, *case)
        told[name] = counts | {"apart": distance(found, plain), "videos_equal": torch.equal(made, videos)}
        if name == "hybrid":
            hybrid = found
    told["full"]["from_hybrid"] = distance(found, hybrid)
    print(json.dumps(told), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
