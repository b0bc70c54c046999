"""Fits the planner's two constants to measured throughputs.

The measurements are those that NeMo's documentation publishes for DiT on 32 DGX H100 (256 GPUs) with fixed shapes and
mock data. It does not state the global batch size; 256 packs, as in its example command, are assumed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megadit.train.plan.estimate import Calibration, estimate_step, tokens_per_second
from megadit.train.plan.hardware import find_gpu
from megadit.train.plan.layout import Layout
from megadit.train.recipes import load_recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A recipe's throughput on some GPUs."""

    recipe: str
    gpu: str
    num_gpus: int
    tokens_per_second: float
    """Per GPU."""


PUBLISHED = (
    Measurement(recipe="performance_7b_8k", gpu="h100-80gb", num_gpus=256, tokens_per_second=10_052),
    Measurement(recipe="performance_7b_74k", gpu="h100-80gb", num_gpus=256, tokens_per_second=3_409),
    Measurement(recipe="performance_28b_8k", gpu="h100-80gb", num_gpus=256, tokens_per_second=2_510),
    Measurement(recipe="performance_28b_64k", gpu="h100-80gb", num_gpus=256, tokens_per_second=1_386),
)


def predict(measurement: Measurement, calibration: Calibration) -> float:
    """Throughput that the planner predicts for the setup of `measurement`."""
    config, gpu = load_recipe(measurement.recipe), find_gpu(measurement.gpu)
    layout = Layout.of(config, measurement.num_gpus)
    return tokens_per_second(config, layout, estimate_step(config, layout, gpu, calibration).total)


def fit(short: Measurement, long: Measurement) -> Calibration:
    """Constants that reproduce two measurements: of short sequences, dominated by matrix products, and of long ones,
    dominated by attention. Each constant in turn is set by bisection until both agree.
    """
    calibration = Calibration(matmul=0.6, attention=0.4)
    for _ in range(20):
        calibration = _solve(short, calibration, "matmul")
        calibration = _solve(long, calibration, "attention")
    return calibration


def fit_measured(predict: Callable[[Calibration], Sequence[float]], measured: Sequence[float]) -> Calibration:
    """Constants with the least squared error of log seconds (Gauss-Newton in their logarithms).

    If the measurements do not determine both, they change by the same factor.

    Args:
        predict: function from constants to the seconds of all measurements.
    """

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(_constants(logs))) - np.log(measured)

    logs = np.log([0.5, 0.5])
    for _ in range(10):
        now = errors(logs)
        slopes = np.stack([(errors(logs + step) - now) / 1e-3 for step in 1e-3 * np.eye(2)], axis=1)
        change = np.linalg.lstsq(slopes, -now, rcond=1e-2)[0]
        logs = np.clip(logs + np.clip(change, -1, 1), math.log(1e-4), math.log(2.0))
        if np.abs(change).max() < 1e-4:
            break
    return _constants(logs)


def _constants(logs: np.ndarray) -> Calibration:
    return Calibration(matmul=math.exp(logs[0]), attention=math.exp(logs[1]))


def _solve(measurement: Measurement, calibration: Calibration, name: str) -> Calibration:
    """`calibration` with the constant `name` such that the prediction equals the measurement."""
    low, high = 0.05, 1.5
    for _ in range(40):
        middle = (low + high) / 2
        candidate = replace(calibration, **{name: middle})
        too_slow = predict(measurement, candidate) < measurement.tokens_per_second
        low, high = (middle, high) if too_slow else (low, middle)
    return candidate
