"""The objectives: one row each."""

from functools import partial

from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.train.config.distill import ObjectiveName
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives import distillation, rewards
from megadit.train.objectives.classify import classify
from megadit.train.objectives.contrast import match
from megadit.train.objectives.denoise import denoise
from megadit.train.objectives.losses import LossSums
from megadit.train.objectives.networks import Networks, Objective


def _at_drawn_scales(objective: Objective, networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """`objective` of a pack with guidance scales, if the student is guidance-distilled."""
    return objective(networks, distillation.with_scale(batch, networks.config.model))


OF_STUDENTS: dict[ObjectiveName, Objective] = {
    "guidance": distillation.guidance,
    "progressive": distillation.progressive,
    "consistency": distillation.consistency,
    "continuous_consistency": distillation.continuous_consistency,
    "consistency_limit": distillation.consistency_limit,
    "regression": distillation.regression,
    "distribution_matching": distillation.distribution_matching,
    "diffusion_nft": rewards.diffusion_nft,
    "dpo": rewards.dpo,
    "flow_grpo": rewards.flow_grpo,
}
"""`train.distill.objective` -> its function, for packs with guidance scales (`with_scale`)."""

OBJECTIVES: dict[str, Objective] = {
    "denoise": denoise,
    "classify": classify,
    "match": match,
    **{name: partial(_at_drawn_scales, objective) for name, objective in OF_STUDENTS.items()},
}
"""Name, of a network's task or for `train.objective` and `train.distill.objective`, -> its function."""


def objective_of(config: RunConfig) -> Objective:
    """The objective of a run.

    Raises:
        UserError: if `train.objective` is unknown.
    """
    train = config.train
    name = train.objective or (config.model.task if train.distill is None else train.distill.objective)
    if name not in OBJECTIVES:
        raise UserError(f"train.objective={name} is unknown; the objectives are: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
