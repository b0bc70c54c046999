"""Two constants, fitted to two published throughputs, predict the other two."""

from dataclasses import replace
from functools import cache

import pytest

from megadit.train.plan.estimate import H100_CALIBRATION
from megadit.train.plan.tune import PUBLISHED, fit, predict

SHORT_7B, LONG_7B, SHORT_28B, LONG_28B = PUBLISHED


fitted_to = cache(fit)


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
