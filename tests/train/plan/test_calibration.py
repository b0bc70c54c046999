"""Two constants, fitted to two published throughputs, predict the other two.

NeMo's documentation publishes the throughputs, for DiT on 32 DGX H100 (256 GPUs) with fixed shapes and mock data. It
does not state the global batch size; 256 packs, as in its example command, are assumed.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest

from megadit.train.config.schema import RunConfig
from megadit.train.plan.estimate import H100_CALIBRATION, Calibration, estimate_step, tokens_per_second
from megadit.train.plan.hardware import Gpu, find_gpu
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
SHORT_7B, LONG_7B, SHORT_28B, LONG_28B = PUBLISHED


def predict(measurement: Measurement, calibration: Calibration) -> float:
    """Throughput that the planner predicts for the setup of `measurement`."""
    config, layout, gpu = _setup(measurement)
    return tokens_per_second(config, layout, estimate_step(config, layout, gpu, calibration).total)


@cache
def _setup(measurement: Measurement) -> tuple[RunConfig, Layout, Gpu]:
    """The run of a measurement, its layout and its hardware."""
    config = load_recipe(measurement.recipe)
    return config, Layout.of(config, measurement.num_gpus), find_gpu(measurement.gpu)


@cache
def fitted_to(short: Measurement, long: Measurement) -> Calibration:
    """Constants that reproduce two measurements: of short sequences, dominated by matrix products, and of long ones,
    dominated by attention. Each constant in turn is set by bisection until both agree.
    """
    calibration = Calibration(matmul=0.6, attention=0.4)
    for _ in range(20):
        calibration = _solve(short, calibration, "matmul")
        calibration = _solve(long, calibration, "attention")
    return calibration


def _solve(measurement: Measurement, calibration: Calibration, name: str) -> Calibration:
    """`calibration` with the constant `name` such that the prediction equals the measurement."""
    low, high = 0.05, 1.5
    for _ in range(40):
        middle = (low + high) / 2
        candidate = replace(calibration, **{name: middle})
        too_slow = predict(measurement, candidate) < measurement.tokens_per_second
        low, high = (middle, high) if too_slow else (low, middle)
    return candidate


def error(measurement, calibration):
    return abs(predict(measurement, calibration) / measurement.tokens_per_second - 1)


def test_constants_of_the_planner_are_the_fit():
    fitted = fitted_to(SHORT_7B, LONG_7B)
    assert fitted.matmul == pytest.approx(H100_CALIBRATION.matmul, rel=0.01)
    assert fitted.attention == pytest.approx(H100_CALIBRATION.attention, rel=0.01)


@pytest.mark.parametrize(
    ("fitted", "predicted"),
    [((SHORT_7B, LONG_7B), (SHORT_28B, LONG_28B)), ((SHORT_28B, LONG_7B), (SHORT_7B, LONG_28B))],
)
def test_two_rows_predict_the_others_within_10_percent(fitted, predicted):
    calibration = fitted_to(*fitted)
    assert max(error(row, calibration) for row in fitted) < 1e-3
    assert max(error(row, calibration) for row in predicted) < 0.1


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_neither_constant_is_idle(name):
    off = replace(H100_CALIBRATION, **{name: getattr(H100_CALIBRATION, name) * 0.6})
    assert max(error(row, off) for row in PUBLISHED) > 0.15
