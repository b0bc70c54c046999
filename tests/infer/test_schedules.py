import math

import pytest
import torch

from megadit.infer.schedules import karras_sigmas
from megadit.models.support import UserError


def test_levels_follow_equation_5():
    sigmas = karras_sigmas(18, 0.002, 80.0, 7.0)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (19,)
    expected = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]
    torch.testing.assert_close(sigmas[:-1], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert sigmas[0] == 80 and sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_rho_1_is_linear_and_large_rho_is_geometric():
    linear = karras_sigmas(5, 1.0, 9.0, 1.0)[:-1]
    torch.testing.assert_close(linear, torch.tensor([9.0, 7, 5, 3, 1], dtype=torch.float64))
    ratios = karras_sigmas(5, 0.01, 100.0, 1e5)[:-1].log().diff()
    torch.testing.assert_close(ratios, torch.full_like(ratios, -math.log(10)), rtol=1e-3, atol=0)


def test_one_step_goes_straight_to_zero():
    assert karras_sigmas(1, 0.002, 80.0, 7.0).tolist() == [80.0, 0.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_steps": 0},
        {"num_steps": -3},
        {"num_steps": 2.5},
        {"sigma_min": 0.0},
        {"sigma_min": 80.0},
        {"sigma_max": math.inf},
        {"sigma_min": math.nan},
        {"rho": 0.0},
    ],
)
def test_bad_arguments_name_their_value(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(UserError, match=f"{name}={value}"):
        karras_sigmas(**({"num_steps": 18} | arguments))
