"""Table of the metrics: a row is a function of an extractor's features of generated and of real videos.

Shapes: N videos, F features of each, D width, R resamplings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megadit.infer.evaluate.metrics import distances
from megadit.infer.evaluate.metrics.distances import Features
from megadit.infer.evaluate.metrics.intervals import Estimate, mean_estimate

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    title: str
    sees: str
    """Kind of extractor that it needs."""
    better: Better
    estimate: Callable[[Features, Features], Estimate]
    """(generated, real) -> the metric."""


def _of_videos(value: Callable[[Tensor], Tensor], scale: float = 1.0) -> Callable[[Features, Features], Estimate]:
    """Metric that compares the distribution of one number per video with that of real videos (Wasserstein distance).

    The number alone would favour still pictures, which are perfectly consistent.
    """

    def estimate(made: Features, real: Features) -> Estimate:
        made_N, real_M = (scale * value(side.features_NFD).double() for side in (made, real))
        resampled = [
            wasserstein(made_N, real_M, *weights) for weights in zip(made.weight_RN, real.weight_RN, strict=True)
        ]
        ones = torch.ones_like(made_N), torch.ones_like(real_M)
        return Estimate(
            value=wasserstein(made_N, real_M, *ones).item(),
            resampled_R=torch.stack(resampled),
            count=len(made_N),
            bounds=(0.0, float("inf")),
            extra={"mean": made_N.mean().item(), "mean of real videos": real_M.mean().item()},
        )

    return estimate


def wasserstein(a_N: Tensor, b_M: Tensor, a_weight_N: Tensor, b_weight_M: Tensor) -> Tensor:
    """W1 of two weighted samples, a scalar: the area between their distribution functions."""
    values, order = torch.cat([a_N, b_M]).sort()
    steps = torch.cat([a_weight_N / a_weight_N.sum(), -b_weight_M / b_weight_M.sum()])[order]
    return (steps.cumsum(0)[:-1].abs() * values.diff()).sum()


def neighbour_likeness(features_NFD: Tensor) -> Tensor:
    """Mean cosine of the features of neighbouring frames, [N]."""
    return torch.cosine_similarity(features_NFD[:, 1:], features_NFD[:, :-1], dim=2).mean(1)


METRICS: dict[str, Metric] = {
    "fid": Metric("Fréchet distance of frames", "pictures", "lower", distances.frechet_estimate),
    "kid": Metric("kernel distance of frames", "pictures", "lower", distances.kernel_estimate),
    "fvd": Metric("Fréchet distance of clips", "clips", "lower", distances.frechet_estimate),
    "kvd": Metric("kernel distance of clips", "clips", "lower", distances.kernel_estimate),
    "precision": Metric("generated clips among real ones", "clips", "higher", distances.precision),
    "recall": Metric("real clips among generated ones", "clips", "higher", distances.recall),
    "density": Metric("real neighbourhoods per generated clip", "clips", "higher", distances.density),
    "coverage": Metric("real clips with a generated neighbour", "clips", "higher", distances.coverage),
    "consistency": Metric(
        "likeness of neighbouring frames (%), away from real", "pictures", "lower", _of_videos(neighbour_likeness, 100)
    ),
    "motion": Metric(
        "motion (% of the height per frame), away from real",
        "motion",
        "lower",
        _of_videos(lambda features_NFD: features_NFD[:, 0, 0]),
    ),
    "flicker": Metric(
        "change that no motion explains (%), away from real",
        "motion",
        "lower",
        _of_videos(lambda features_NFD: features_NFD[:, 0, 1], 100),
    ),
}
ADHERENCE = "clip"
"""The CLIP score, which needs texts instead of real videos."""


def clip_scores(frames_NFD: Tensor, text_ND: Tensor) -> Tensor:
    """100 cos(frame, text), the mean over frames, [N] (arXiv 2104.08718; there 2.5 max(cos, 0))."""
    return 100 * torch.cosine_similarity(frames_NFD, text_ND[:, None], dim=2).mean(1)


def clip_estimate(frames_NFD: Tensor, text_ND: Tensor, weight_RN: Tensor) -> Estimate:
    """The mean CLIP score, 0 where it is negative."""
    return mean_estimate(clip_scores(frames_NFD, text_ND), weight_RN, bounds=(0.0, 100.0))


def distance_to_real(made_NFD: Tensor, real_NFD: Tensor) -> Tensor:
    """Distance of each generated video to its nearest real one in feature space, [N], to find outliers."""
    made, real = (Features(side, torch.ones(1, len(side))).rows_ND for side in (made_NFD, real_NFD))
    return torch.cdist(made, real).amin(1)
