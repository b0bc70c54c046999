"""Stages of `megadit distill`: their overrides of a recipe, and sampling settings of students."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megadit.infer.sampling.schedules import highest_sigma, karras_sigmas, log_linear_sigmas
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import OF_TWO_CALLS, SamplingSettings
from megadit.train.config.schema import RunConfig

MIDDLE_SIGMA, LOWEST_SIGMA = 6.0, 0.7
"""Noise levels for data of unit standard deviation: the student's second (above it the data are almost invisible), and
its last (one step from it removes all noise)."""
CONSISTENCY_LEVELS = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Overrides and sampler of one objective."""

    overrides: Callable[[RunConfig, tuple[float, ...]], list[str]]
    """(the recipe's run, the student's noise levels) -> section.key=value."""
    sampler: str = "consistency"
    """Sampler of the student."""
    is_regression: bool = False
    """Whether it learns from videos of the original teacher in place of --data, with the overrides `OF_PAIRS`."""


REGRESSION_OVERRIDES = (
    "data.conditioning=[]",
    "data.encode=precached",
    "data.min_aesthetic_score=null",
    "data.max_frames=null",
    "data.keep=[]",
)
"""Overrides to read these videos, whatever the recipe sets for --data: they are latents generated from noise and text
alone, without scores, and must not be cut, because their noise is not."""


def _levels(sigmas: Sequence[float]) -> str:
    return f"train.distill.sigmas=[{','.join(f'{sigma:.6g}' for sigma in sigmas)}]"


def _gently(run: RunConfig, share: float, steps: float) -> list[str]:
    """Overrides for fractions of the recipe's learning rate and steps."""
    count = max(1, round(steps * run.train.train_iters))
    return [
        f"optimizer.lr={share * run.optimizer.lr:.6g}",
        f"optimizer.min_lr={min(run.optimizer.min_lr, share * run.optimizer.lr):.6g}",
        f"optimizer.lr_warmup_iters={min(20, count // 2)}",
        f"train.train_iters={count}",
    ]


STAGES = {
    "guidance": Stage(overrides=lambda run, sigmas: _gently(run, 1 / 3, 0.4)),
    "progressive": Stage(overrides=lambda run, sigmas: [*_gently(run, 1 / 3, 0.2), _levels(sigmas)], sampler="euler"),
    "consistency": Stage(
        overrides=lambda run, sigmas: [
            *_gently(run, 1 / 6, 0.2),
            _levels(karras_sigmas(CONSISTENCY_LEVELS, sigmas[-1], sigmas[0]).tolist()[:-1])
            if len(sigmas) > 1
            else _levels(karras_sigmas(CONSISTENCY_LEVELS, LOWEST_SIGMA / 10 * run.model.sigma_data, sigmas[0])[:-1]),
        ]
    ),
    "continuous_consistency": Stage(
        overrides=lambda run, sigmas: [
            *_gently(run, 1 / 6, 0.2),
            f"train.distill.tangent_warmup={run.train.train_iters // 20}",
            "diffusion.learned_uncertainty=true",
        ]
    ),
    "consistency_limit": Stage(overrides=lambda run, sigmas: _gently(run, 1 / 24, 0.2)),
    "regression": Stage(overrides=lambda run, sigmas: [*_gently(run, 1 / 3, 0.3), _levels(sigmas)], is_regression=True),
    "distribution_matching": Stage(
        overrides=lambda run, sigmas: [
            *_gently(run, 1 / 24, 0.2),
            f"train.distill.critic_lr={run.optimizer.lr / 4:.6g}",
            "train.distill.critic_updates=3",
            *("optimizer.adam_beta1=0.5", "optimizer.muon_momentum=0.5"),  # old gradients mislead both networks
            _levels(sigmas),
        ]
    ),
}
"""Value of `--stages` -> stage."""


def student_sigmas(teacher: Bundle, calls: int) -> tuple[float, ...]:
    """Noise levels of `calls` sampling steps: the teacher's highest, then evenly spaced in their logarithm."""
    highest, unit = highest_sigma(teacher.defaults), teacher.config.sigma_data
    if calls == 1:
        return (highest,)
    if calls == 2:
        return (highest, (MIDDLE_SIGMA * LOWEST_SIGMA) ** 0.5 * unit)
    return (highest, *log_linear_sigmas(calls - 1, LOWEST_SIGMA * unit, MIDDLE_SIGMA * unit).tolist()[:-1])


def student_settings(
    sampler: str, sigmas: tuple[float, ...], guidance: float = 1.0, noise_scale: float = 1.0
) -> dict[str, Any]:
    """Sampling settings of a student: one function evaluation per step, without guidance or guidance-distilled, at its
    own noise levels; others are the teacher's."""
    levels = {"sigmas": sigmas, "num_steps": len(sigmas), "shift": 1.0, "noise_scale": noise_scale}
    plain = {**OF_TWO_CALLS, "second_guidance": 0.0, "churn": 0.0, "eta": 0.0, "cache_budget": 0.0}
    return {"sampler": sampler, "guidance": guidance, **levels, **plain}


def embedded_scale(teacher: SamplingSettings, guidance_embedding_range: tuple[float, float] | None) -> float:
    """Return the guidance scale within the range that is nearest to the teacher's; 1 (no guidance) without a range."""
    return (
        1.0
        if guidance_embedding_range is None
        else min(max(guidance_embedding_range[0], teacher.guidance), guidance_embedding_range[1])
    )


def model_overrides(teacher: DiTConfig, run: RunConfig) -> list[str]:
    """Overrides that give a run the teacher's network."""
    theirs, ours = teacher.to_dict(), run.model.to_dict()
    return [f"model.{name}={json.dumps(value)}" for name, value in theirs.items() if value != ours[name]]


def overrides_of(overrides: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Overrides for all stages and those for stage `name`."""
    of_all, of_stage = [], []
    for override in overrides:
        stage, _, rest = override.partition(".")
        if stage == name:
            of_stage.append(rest)
        elif stage not in STAGES:
            of_all.append(override)
    return of_all, of_stage
