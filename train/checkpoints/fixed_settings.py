"""The settings that a run keeps from its first step to its last, compared before anything of it is changed."""

import json
from pathlib import Path
from typing import Any

from megadit.models.megatron.checkpoint import named_checkpoints, read_state
from megadit.models.shared.errors import UserError
from megadit.train.config.load import to_plain_values
from megadit.train.config.schema import RunConfig

FIXED_SETTINGS = (
    *("model", "optimizer.optimizer", "diffusion.learned_uncertainty", "ema.sigma_rels"),  # which tensors there are
    *("train.adapter", "train.distill"),  # which of them are trained, and to which end
    *("train.seed", "data.mock"),  # which noise a sample gets, and which samples there are
)
"""Settings that a resumed run cannot change; the reader adds those that decide the order of samples."""


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The values of `FIXED_SETTINGS` by their dotted names; those of a whole section one by one."""
    values, kept = to_plain_values(config), {}
    for name in FIXED_SETTINGS:
        section, _, field_name = name.partition(".")
        if field_name:
            kept[name] = values[section][field_name]
        else:
            kept |= {f"{section}.{key}": value for key, value in values[section].items()}
    return json.loads(json.dumps(kept))  # as they are read back


def check_fixed(config: RunConfig, path: Path, settings: dict[str, Any]) -> None:
    """Raises UserError if the checkpoint at `path`, written under `settings`, cannot be continued under `config`."""
    now = fixed_settings(config)
    for name, before in settings.items():
        if _differ(before, now.get(name)):
            raise UserError(
                f"{path} was written with {name}={before}, which is {now.get(name)} now; "
                "set it back, or start another train.output_dir from its weights with checkpoint.init_from"
            )


def check_continues(config: RunConfig) -> None:
    """Raises UserError if the newest readable checkpoint that a run would go on with forbids its settings."""
    places = [config.train.output_dir, config.checkpoint.load]
    for path in (path for place in places if place for path in reversed(named_checkpoints(Path(place, "checkpoints")))):
        try:
            settings = read_state(path).get("settings")
        except UserError:  # damaged: the run names it, and takes the one before it
            continue
        if isinstance(settings, dict):
            check_fixed(config, path, settings)
            return


def _differ(before: Any, now: Any) -> bool:
    """Whether a value of `fixed_settings` is another one; what a section has today and had not then is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(now.get(name) != value for name, value in before.items())
    return before != now
