"""Each solver's error on data whose ideal denoiser and ODE are known in closed form, relative to Euler's.

    python tests/benchmarks/solver_errors.py

The data are numbers, from one Gaussian or a mixture of them; figures: infer/BENCHMARKS.md.
"""

import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megadit.infer.sampling.samplers import SAMPLERS, num_denoiser_calls
from megadit.infer.sampling.schedules import karras_sigmas
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import CommandParser

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0
CALLS = (10, 20, 35)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Data ~ sum_k weight_k N(mean_k, deviation_k^2), each number on its own."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def denoise(self, x: Tensor, sigma_B: Tensor) -> Tensor:
        """E[x0 | x] = sum_k p(k | x) (s_k^2 x + sigma^2 mu_k) / (s_k^2 + sigma^2), float64; one sigma for all."""
        sigma, x = sigma_B.flatten()[0].double(), x.double()
        weights, means, deviations, variances = self._noisy(sigma)
        logs = weights.log() - variances.log() / 2 - (x[..., None] - means) ** 2 / (2 * variances)
        each = (deviations**2 * x[..., None] + sigma**2 * means) / variances
        return (logs.softmax(-1) * each).sum(-1)

    def solution(self, x: Tensor, sigma: float) -> Tensor:
        """x(sigma) of the ODE from x at SIGMA_MAX.

        In one dimension it keeps every point's quantile, F_sigma(x(sigma)) = F_SIGMA_MAX(x): by bisection.
        """
        wanted = self._distribution(x, SIGMA_MAX)
        low, high = torch.full_like(x, -10.0), torch.full_like(x, 10.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self._distribution(middle, sigma) < wanted
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return low

    def _distribution(self, x: Tensor, sigma: float) -> Tensor:
        weights, means, _, variances = self._noisy(torch.tensor(sigma, dtype=torch.float64))
        return (weights * torch.special.ndtr((x[..., None] - means) / variances.sqrt())).sum(-1)

    def _noisy(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights, means, deviations = (
            torch.tensor(values, dtype=torch.float64) for values in (self.weights, self.means, self.deviations)
        )
        return weights, means, deviations, deviations**2 + sigma**2


GAUSSIAN = Mixture((1.0,), (0.3,), (0.5,))
MIXTURE = Mixture((0.3, 0.7), (-1.0, 0.8), (0.3, 0.5))


def initial_state(count: int = 96) -> Tensor:
    """x at SIGMA_MAX, float64 [2, count / 2]."""
    generator = torch.Generator().manual_seed(0)
    return SIGMA_MAX * torch.randn(2, count // 2, dtype=torch.float64, generator=generator)


def error(name: str, data: Mixture, num_calls: int) -> float:
    """Root mean square error at sigma_min, of as many steps as take at most `num_calls` calls."""
    num_steps = max(n for n in range(1, num_calls + 1) if num_denoiser_calls(name, _levels(n)) <= num_calls)
    x = initial_state()
    return (
        (SAMPLERS[name](data.denoise, x, _levels(num_steps)) - data.solution(x, SIGMA_MIN))
        .square()
        .mean()
        .sqrt()
        .item()
    )


def _levels(num_steps: int) -> Tensor:
    return karras_sigmas(num_steps + 1, SIGMA_MIN, SIGMA_MAX)[:-1]


def _run(argv: list[str]) -> None:
    CommandParser(prog="python tests/benchmarks/solver_errors.py", description=__doc__.splitlines()[0]).parse_args(argv)
    names = [f"{kind}, {calls} calls" for kind in ("Gaussian", "mixture") for calls in CALLS]
    table = Table("solver", *names, title="error at sigma_min / Euler's")
    columns = [(data, calls) for data in (GAUSSIAN, MIXTURE) for calls in CALLS]
    for name in SAMPLERS:
        ratios = [error(name, data, calls) / error("euler", data, calls) for data, calls in columns]
        table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios))
    Console(width=140).print(table)


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    raise SystemExit(main())
