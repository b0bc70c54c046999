"""95 % confidence intervals of metrics by the bootstrap.

Prompts are resampled together with all of their videos, because videos of one prompt are correlated. The draws depend
only on the number of prompts, so that two models with the same prompts are resampled in the same way: the variation
between prompts cancels in the interval of their difference.

Shapes: N videos, R resamplings.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

NUM_RESAMPLINGS = 200
Z = 1.959964
"""Half width of a normal distribution's 95 % interval, in standard deviations."""
Side = Literal["made", "real"]
_SEEDS: dict[Side, int] = {"made": 0, "real": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Value of a metric, and its bootstrap distribution."""

    value: float
    resampled_R: Tensor
    """Value of each resampling, float64; they may be biased, so only their variation is used."""
    count: int
    """Number of videos."""
    noise: float = 0.0
    """Standard error of random draws in the estimate, in addition to the choice of videos."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest value of the metric."""
    low_high: tuple[float, float] | None = None
    """Interval from another method than the bootstrap."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional values to report, such as the metric without extrapolation."""

    @property
    def error(self) -> float:
        """Standard error."""
        found_R = self.resampled_R[self.resampled_R.isfinite()]  # with few videos, some draws have no value
        return math.hypot(found_R.std().item(), self.noise)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval."""
        if self.low_high is not None:
            return self.low_high
        low, high = self.value - Z * self.error, self.value + Z * self.error
        return max(low, min(self.bounds[0], self.value)), min(high, max(self.bounds[1], self.value))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """The difference, with an interval from paired resamplings."""
        return Estimate(
            value=self.value - other.value,
            resampled_R=self.resampled_R - other.resampled_R,
            count=min(self.count, other.count),
            noise=math.hypot(self.noise, other.noise),
        )


def resamplings(groups: Sequence[Hashable], side: Side, count: int = NUM_RESAMPLINGS) -> Tensor:
    """Number of draws of each video in each resampling, float64 [R, N].

    Args:
        groups: group of each video; videos of one group (prompt) are drawn together.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    group_N = torch.tensor([numbers[group] for group in groups])
    generator = torch.Generator().manual_seed(_SEEDS[side])
    drawn_RG = torch.randint(len(numbers), (count, len(numbers)), generator=generator)
    times_RG = torch.zeros(count, len(numbers), dtype=torch.float64)
    times_RG.scatter_add_(1, drawn_RG, torch.ones_like(drawn_RG, dtype=torch.float64))
    return times_RG[:, group_N]


def mean_estimate(value_N: Tensor, weight_RN: Tensor, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """Mean of one number per video, within `bounds`.

    For proportions (values 0 and 1) the interval is Wilson's (1927), which has a width even if all values are 1.
    """
    value_N = value_N.double()
    mean = value_N.mean().item()
    is_share = bool(((value_N == 0) | (value_N == 1)).all())
    return Estimate(
        value=min(max(mean, bounds[0]), bounds[1]),
        resampled_R=(weight_RN @ value_N) / weight_RN.sum(1),
        count=len(value_N),
        bounds=bounds,
        low_high=wilson(mean, len(value_N)) if is_share else None,
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion among `count` independent draws."""
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
