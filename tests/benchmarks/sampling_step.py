"""Sampling with our DiT beside diffusers' Cosmos transformer and DiT of the same sizes, in one run, as ratios.

    python tests/benchmarks/sampling_step.py [--rounds 9] [--threads 2] [--json FILE]

The networks have equal width, depth, heads, tokens, text length and hence FLOPs; a step is the same sampler behind the
same preconditioning. Figures: infer/BENCHMARKS.md.
"""

import sys
from collections.abc import Callable

import torch
from side_by_side import DTYPES, SETTINGS, Comparison, block_call, compare, show
from torch import Tensor

from megadit.infer.benchmarks.beside_diffusers import BenchmarkOptions, Inputs, Setting, networks
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.sampling.samplers import euler
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options

SIGMAS = torch.tensor([80.0, 60.0], dtype=torch.float64)


@torch.no_grad()
def compare_sampling(setting: Setting, dtype: torch.dtype, rounds: int) -> list[Comparison]:
    """One block, and one step of Euler's method with the whole network."""
    ours, theirs = networks(setting, dtype)
    inputs = Inputs.of(setting, dtype)
    what = f"{setting.num_tokens:,} tokens, {str(dtype).removeprefix('torch.')} / {setting.name}"
    our_block = block_call(ours.blocks["0"], lambda: ours(inputs.x_BCTHW, inputs.c_noise_B, inputs.conditioning))
    their_block = block_call(theirs.transformer_blocks[0], lambda: setting.call_theirs(theirs, inputs))
    denoiser = TorchDenoiser(ours, dtype=dtype)  # of many steps: text has been read by the first

    scalings = parameterization_of(setting.config).scalings

    def their_denoiser(x: Tensor, sigma_B: Tensor) -> Tensor:
        c_skip, c_out, c_in, c_noise = scalings(sigma_B.float().reshape(-1, 1, 1, 1, 1))
        noisy = Inputs((c_in * x).to(dtype), c_noise.flatten(), inputs.conditioning)
        return c_skip * x + c_out * setting.call_theirs(theirs, noisy).float()

    def step(denoise: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return euler(denoise, 80 * inputs.x_BCTHW.float(), SIGMAS)

    return [
        compare(
            f"block, {what}",
            lambda: our_block.run(our_block.tokens),
            lambda: their_block.run(their_block.tokens),
            8 * rounds,
        ),
        compare(
            f"step, {what}",
            lambda: step(lambda x, sigma: denoiser(x, sigma, inputs.conditioning)),
            lambda: step(their_denoiser),
            rounds,
        ),
    ]


def _run(argv: list[str]) -> None:
    options = read_options(
        BenchmarkOptions,
        argv,
        prog="python tests/benchmarks/sampling_step.py",
        description="Times sampling beside diffusers' transformers.",
    )
    options.set_threads()
    comparisons = [
        one for setting in SETTINGS for dtype in DTYPES for one in compare_sampling(setting, dtype, options.rounds)
    ]
    show("sampling: megadit / diffusers", comparisons, options.json)


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
