"""Training models without a run around them."""

from types import SimpleNamespace

from megadit.train.config.schema import DiffusionConfig
from megadit.train.objectives.networks import TrainingModel
from megadit.train.objectives.registry import OBJECTIVES


def training_model(dit, **diffusion):
    """A network with the objective of its task."""
    config = SimpleNamespace(model=dit.config, diffusion=DiffusionConfig(**diffusion))
    return TrainingModel(dit, config, OBJECTIVES[dit.config.task])
