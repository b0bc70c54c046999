"""Settings that cannot change when a run is resumed, and their check."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megadit.models.megatron.checkpoint import named_checkpoints, read_state
from megadit.models.shared.errors import UserError
from megadit.train.config.schema import RunConfig

FIXED_SETTINGS = (
    *("model", "optimizer.optimizer", "diffusion.learned_uncertainty", "ema.sigma_rels"),  # which tensors exist
    *("train.adapter", "train.distill"),  # which of them are trained, and with which objective
    *("train.seed", "data.mock"),  # noise of a sample, and the samples
)
"""Settings that a resumed run cannot change; the reader adds those that determine the order of samples."""


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Values of `FIXED_SETTINGS` by their dotted names; sections are expanded to their keys."""
    values, kept = asdict(config), {}
    for name in FIXED_SETTINGS:
        section, _, field_name = name.partition(".")
        if field_name:
            kept[name] = values[section][field_name]
        else:
            kept |= {f"{section}.{key}": value for key, value in values[section].items()}
    return json.loads(json.dumps(kept))  # as JSON reads them back


def check_fixed(config: RunConfig, path: Path, settings: dict[str, Any]) -> None:
    """Raises UserError if the checkpoint at `path`, written with `settings`, cannot be resumed with `config`."""
    now = fixed_settings(config)
    for name, before in settings.items():
        if _differ(before, now.get(name)):
            raise UserError(
                f"{path} was written with {name}={before}, which is {now.get(name)} now; "
                "set it back, or start another train.output_dir from its weights with checkpoint.init_from"
            )


def check_continues(config: RunConfig) -> None:
    """Raises UserError if the newest readable checkpoint of a run cannot be resumed with its settings."""
    places = [config.train.output_dir, config.checkpoint.load]
    for path in (path for place in places if place for path in reversed(named_checkpoints(Path(place, "checkpoints")))):
        try:
            settings = read_state(path).get("settings")
        except UserError:  # damaged: the run reports it, and uses the one before
            continue
        if isinstance(settings, dict):
            check_fixed(config, path, settings)
            return


def _differ(before: Any, now: Any) -> bool:
    """Whether a value of `fixed_settings` has changed; keys that a section did not have then are ignored."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(now.get(name) != value for name, value in before.items())
    return before != now
