"""Configuration section of distillation."""

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
    "diffusion_nft",
    "dpo",
    "flow_grpo",
]
AT_ALL_LEVELS = ("guidance", "continuous_consistency", "consistency_limit", "diffusion_nft", "dpo", "flow_grpo")
"""Objectives trained at noise levels drawn from `diffusion.noise_levels`, or stored with the samples, not at a list."""
BY_TANGENT = ("continuous_consistency", "consistency_limit")
"""Objectives that differentiate the student along the teacher's ODE."""
WITH_TEACHERS = ("diffusion_nft", "dpo", "flow_grpo")
"""Objectives of the outputs of student and teacher for one input, which pass through pipeline stages together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Distillation: a student learns from a frozen teacher of the same shape."""

    teacher: str
    """Bundle or run of the teacher. The student starts from its weights too, unless `checkpoint.init_from` is set."""
    teacher_adapter: str | None = None
    """Adapter of the teacher, with which the adapters of student and fake-score network (`train.adapter`) start."""
    objective: ObjectiveName
    """Distillation method, by the target of the student: `guidance`, the output of the guided teacher (arXiv
    2210.03142); `progressive`, the result of `teacher_steps` Euler steps of the teacher (2202.00512); `consistency`,
    the end of the teacher's ODE, between the levels of `sigmas` (2303.01469); `continuous_consistency` (2410.11081)
    and `consistency_limit`, the same at all levels; `regression`, the teacher's video for the same noise (2101.02388;
    data of `megadit prepare trajectories`); `distribution_matching`, videos distributed as the teacher's (DMD2,
    2405.14867); `diffusion_nft`, videos of higher reward than the teacher's own (2509.16117; data of `megadit prepare
    rollouts`); `dpo`, the chosen of two videos rather than the rejected one (2311.12908; data of `megadit prepare
    preferences`); `flow_grpo`, steps of sampling that led to a higher reward (2505.05470; data of `megadit prepare
    rollouts --states`)."""
    guidance: float = setting(1.0, low=1)
    """Classifier-free guidance scale of the teacher; 1: no guidance, or a guidance-distilled teacher. For a student
    with `model.guidance_embedding_range`, scales are drawn uniformly from that range instead."""
    sigmas: tuple[float, ...] = setting((), above=0)
    """Decreasing noise levels, without the final 0: those of the student's sampling steps, or for `consistency` those
    between which the teacher steps. Empty for objectives at all levels."""
    teacher_steps: int = setting(2, low=1)
    """Euler steps of the teacher per step of the student (`progressive`)."""
    tangent_warmup: int = setting(1000, low=0)
    """Warm-up steps over which the student's tangent replaces its difference from the teacher in the target
    (`continuous_consistency`; arXiv 2410.11081, section 4, uses 10,000)."""
    critic_lr: float | None = setting(None, above=0)
    """Learning rate of the fake-score network, which learns the distribution of the student's videos
    (`distribution_matching`); None: twice `optimizer.lr`."""
    critic_updates: int = setting(2, low=1)
    """Updates of the fake-score network before each update of the student (arXiv 2405.14867, section 4.2)."""
    adversarial_weight: float = setting(0.0, low=0)
    """Weight of the adversarial loss (`distribution_matching`; arXiv 2405.14867, section 4.3) for the critic, whose
    discriminator head learns to tell real from generated samples, and for the student; 0: no such head."""

    nft_beta: float = setting(1.0, above=0)
    """Guidance strength beta of `diffusion_nft` (arXiv 2509.16117, eq. 5): a lower one moves the student further from
    the policy that made the rollouts."""
    dpo_beta: float = setting(2500.0, above=0)
    """Strength beta of `dpo` (arXiv 2311.12908, eq. 14, with T and the factor of the weight in it): a higher one keeps
    the student nearer to its teacher."""
    grpo_clip: float = setting(1e-4, above=0)
    """Clip range of `flow_grpo` (arXiv 2505.05470, eq. 5): a step of sampling teaches nothing more once its likelihood,
    by the mean over all numbers of its latents, has changed by this part."""

    def __post_init__(self) -> None:
        check_settings(self, "train.distill.")

    def is_at(self, place: str | None) -> bool:
        """Whether the teacher's weights are those of `place` (None: yes)."""
        return place is None or Path(place).resolve() == Path(self.teacher).resolve()

    @property
    def has_adversary(self) -> bool:
        return self.adversarial_weight > 0

    @property
    def has_critic(self) -> bool:
        return self.objective == "distribution_matching"

    @property
    def needs_tangent(self) -> bool:
        """Whether the student is differentiated along the teacher's ODE."""
        return self.objective in BY_TANGENT

    @property
    def extras(self) -> tuple[str, ...]:
        """Values that samples must have: names of `packs.packed_batch.EXTRAS`."""
        return {
            "regression": ("seed_key",),
            "diffusion_nft": ("reward",),
            "dpo": ("preference",),
            "flow_grpo": ("seed_key", "reward", "noise_index", "sigma", "sigma_down", "sigma_up"),
        }.get(self.objective, ())

    def passes_through_stages(self, student: NetworkConfig) -> bool:
        """Whether pipeline stages can compute the objective: networks are asked once for each pack, at one input."""
        return self.objective == "regression" or (
            self.objective in WITH_TEACHERS and not self.needs_two_passes(student, None)
        )

    @property
    def num_networks_sent(self) -> int:
        """Networks whose activations pipeline stages exchange."""
        return 2 if self.objective in WITH_TEACHERS else 1

    def needs_two_passes(self, student: NetworkConfig, teacher: NetworkConfig | None) -> bool:
        """Whether guidance takes two forward passes of the teacher (not if it is guidance-distilled; None: unknown)."""
        has_guidance_embedding = teacher is not None and teacher.guidance_embedding_range is not None
        return not has_guidance_embedding and (self.guidance != 1 or student.guidance_embedding_range is not None)

    def forwards(self, is_guided: bool) -> float:
        """Mean forward passes per step in addition to the student's forward and backward, including those of the
        critic's updates, whose backward counts as two. `is_guided`: the teacher takes two passes."""
        of_teacher = 2 if is_guided else 1
        variant = (len(self.sigmas) - 1) / 2  # mean sampling steps of the student before the one that is trained
        head = 1.5 if self.has_adversary else 0  # forward and backward through half of the critic
        return {
            "guidance": of_teacher,
            "progressive": of_teacher * self.teacher_steps,
            "consistency": of_teacher + 1,
            **dict.fromkeys(BY_TANGENT, of_teacher + 2),
            "regression": 0,
            **dict.fromkeys(("diffusion_nft", "dpo", "flow_grpo"), of_teacher),
            "distribution_matching": variant
            + of_teacher
            + 1
            + head
            + self.critic_updates * (variant + 1 + 3 + 2 * head),
        }[self.objective]
