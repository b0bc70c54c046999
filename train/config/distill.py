"""The part of a run's configuration that makes its network a student of another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.shared.cli.setting import check_settings, setting

ObjectiveName = Literal[
    "guidance",
    "progressive",
    "consistency",
    "continuous_consistency",
    "consistency_limit",
    "regression",
    "distribution_matching",
]
AT_ALL_LEVELS = ("guidance", "continuous_consistency", "consistency_limit")
"""Objectives that learn at noise levels drawn as those of samples are, not at a list of them."""
BY_TANGENT = ("continuous_consistency", "consistency_limit")
"""Objectives that differentiate the student along the teacher's ODE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Distillation: a student learns from a frozen teacher of the same shape, in place of the samples themselves."""

    teacher: str
    """A bundle. The student starts from its weights too, unless `checkpoint.init_from` names others."""
    teacher_adapter: str | None = None
    """Adapter of the teacher, from which those of student and fake-score network start, too (`train.adapter`)."""
    objective: ObjectiveName
    """Target of the student: at every noise level the output of the guided teacher (`guidance`, arXiv 2210.03142), the
    point that `teacher_steps` of its Euler steps reach (`progressive`, 2202.00512), the end of its ODE (`consistency`,
    2303.01469, between the levels of a list; `continuous_consistency`, 2410.11081, and `consistency_limit`, at all
    levels), the video that it made of that noise (`regression`, 2101.02388; of `megadit prepare trajectories`), or, of
    noise, videos distributed as the teacher's (`distribution_matching`, 2405.14867)."""
    guidance: float = setting(1.0, low=1)
    """Scale of the teacher's classifier-free guidance; 1 is a single pass, as for a guidance-distilled teacher. For a
    student with `model.guidance_embedding_range` a scale is drawn evenly from that instead."""
    sigmas: tuple[float, ...] = setting((), above=0)
    """Decreasing noise levels, without the final 0: those of the student's sampling steps, and of `consistency` those
    between which its teacher steps; empty for objectives at all levels."""
    teacher_steps: int = setting(2, low=1)
    """Euler steps of the teacher in one of the student's (`progressive`)."""
    tangent_warmup: int = setting(1000, low=0)
    """Steps in which the tangent through the student comes in, in place of its difference from the teacher
    (`continuous_consistency`; 2410.11081, section 4, where it is 10,000)."""
    critic_lr: float | None = setting(None, above=0)
    """Learning rate of the fake-score network, which learns the distribution of the student's videos
    (`distribution_matching`); None is twice `optimizer.lr`."""
    critic_updates: int = setting(2, low=1)
    """Updates of the fake-score network before each one of the student (2405.14867, section 4.2: two time scales)."""

    adversarial_weight: float = setting(0.0, low=0)
    """Weight of the adversarial loss (`distribution_matching`; 2405.14867, section 4.3), both in the critic's loss,
    whose head learns to tell real samples from generated ones, and in the student's; 0: no head."""

    def __post_init__(self) -> None:
        check_settings(self, "train.distill.")

    def is_at(self, place: str | None) -> bool:
        """Whether the teacher's weights are those of `place`; None is nothing else."""
        return place is None or Path(place).resolve() == Path(self.teacher).resolve()

    @property
    def has_adversary(self) -> bool:
        return self.adversarial_weight > 0

    @property
    def has_critic(self) -> bool:
        return self.objective == "distribution_matching"

    @property
    def needs_tangent(self) -> bool:
        """The student is differentiated along the teacher's ODE."""
        return self.objective in BY_TANGENT

    @property
    def is_regression(self) -> bool:
        """Whether it learns from pairs of noise and the teacher's video, in place of samples."""
        return self.objective == "regression"

    def asks_twice(self, student: NetworkConfig, teacher: NetworkConfig | None) -> bool:
        """Whether guidance takes two passes of the teacher: not if it is guidance-distilled. `teacher=None`:
        unknown."""
        has_guidance_embedding = teacher is not None and teacher.guidance_embedding_range is not None
        return not has_guidance_embedding and (self.guidance != 1 or student.guidance_embedding_range is not None)

    def forwards(self, is_guided: bool) -> float:
        """Forward passes per step besides the student's own forward and backward, a mean over the random draws; with
        those of the critic's updates, whose backward counts as two. `is_guided`: the teacher takes two passes."""
        of_teacher = 2 if is_guided else 1
        variant = (len(self.sigmas) - 1) / 2  # calls of the student before the one that learns
        head = 1.5 if self.has_adversary else 0  # through half of the critic, and back
        return {
            "guidance": of_teacher,
            "progressive": of_teacher * self.teacher_steps,
            "consistency": of_teacher + 1,
            **dict.fromkeys(BY_TANGENT, of_teacher + 2),
            "regression": 0,
            "distribution_matching": variant
            + of_teacher
            + 1
            + head
            + self.critic_updates * (variant + 1 + 3 + 2 * head),
        }[self.objective]
