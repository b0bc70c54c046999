"""Conversion between scheduler_config.json of diffusers' pipelines and our sampling settings."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadit.models.convert.stable_diffusion import NOISE_SCHEDULE
from megadit.models.diffusion.parameterization import BETAS, DDPM_STEPS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_json

FILE = "scheduler/scheduler_config.json"
"""Path of the scheduler's configuration in a pipeline."""
Values = Mapping[str, Any]
_OTHER_LEVELS = dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"), False)
_OF_BETAS = {"beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"}
_OF_DYNAMIC_SHIFT = {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """Use of each field of a scheduler's configuration."""

    used: Callable[[Values], dict[str, Any]]
    """Returns settings for fields, with diffusers' defaults."""
    defaults: Values
    """diffusers' defaults of the fields that are read, or have another value in `only`."""
    only: Values
    """Fields with a single supported value."""
    without_effect: frozenset[str] = field(default_factory=frozenset)
    """Fields that other fields switch off, or that no pipeline uses for sampling."""


_UNIPC = {
    "num_train_timesteps": DDPM_STEPS,
    "solver_order": 2,
    "prediction_type": "flow_prediction",
    "thresholding": False,
    "predict_x0": True,
    "solver_type": "bh2",
    "lower_order_final": True,
    "disable_corrector": [],
    "solver_p": None,
    "use_flow_sigmas": True,
    "final_sigmas_type": "zero",
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}
_UNIPC_DEFAULTS = {"prediction_type": "epsilon", "use_flow_sigmas": False, "flow_shift": 1.0}
_UNIPC_UNUSED = frozenset(
    {
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "timestep_spacing",
        "steps_offset",
        "time_shift_type",
        *_OF_BETAS,
    }
)
_FLOW_MATCH = {
    "num_train_timesteps": DDPM_STEPS,
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "stochastic_sampling": False,
}
_SCHEDULERS: dict[str, dict[str, Scheduler]] = {
    "wan": {
        "UniPCMultistepScheduler": Scheduler(
            used=lambda of: {"sampler": "unipc_bh2", "schedule": "wan_diffusers", "shift": of["flow_shift"]},
            defaults=_UNIPC_DEFAULTS,
            only=_UNIPC | _OTHER_LEVELS,
            without_effect=_UNIPC_UNUSED | {"sigma_min", "sigma_max"},
        ),
        "FlowMatchEulerDiscreteScheduler": Scheduler(
            used=lambda of: {"sampler": "euler", "schedule": "flow_match_euler", "shift": of["shift"]},
            defaults={"shift": 1.0},
            only=_FLOW_MATCH | _OTHER_LEVELS,
            without_effect=frozenset(_OF_DYNAMIC_SHIFT),
        ),
    },
    "cosmos1": {
        "EDMEulerScheduler": Scheduler(
            used=lambda of: {name: of[name] for name in ("sigma_min", "sigma_max", "rho")},
            defaults={"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0},
            only={"sigma_data": 0.5, "sigma_schedule": "karras", "prediction_type": "epsilon"},
            without_effect=frozenset({"num_train_timesteps", "final_sigmas_type"}),
        )
    },
    "cosmos2": {
        "FlowMatchEulerDiscreteScheduler": Scheduler(
            used=lambda of: {name: of[name] for name in ("sigma_min", "sigma_max")},
            defaults={"sigma_min": 0.002, "sigma_max": 80.0},
            only=_FLOW_MATCH | _OTHER_LEVELS | {"use_karras_sigmas": True, "shift": 1.0, "sigma_data": 1.0},
            without_effect=frozenset({"final_sigmas_type", *_OF_DYNAMIC_SHIFT}),
        )
    },
    "cosmos2_5": {
        "UniPCMultistepScheduler": Scheduler(
            used=lambda of: {name: of[name] for name in ("sigma_min", "sigma_max")},
            defaults=_UNIPC_DEFAULTS | {"sigma_min": 0.01, "sigma_max": 200.0, "use_karras_sigmas": False},
            only=_UNIPC | _OTHER_LEVELS | {"use_karras_sigmas": True},
            without_effect=_UNIPC_UNUSED | {"flow_shift"},
        )
    },
    "dit": {
        "DDIMScheduler": Scheduler(
            used=lambda of: {},
            defaults={"clip_sample": True},
            only={
                "num_train_timesteps": DDPM_STEPS,
                "beta_start": BETAS["ddpm"].first,
                "beta_end": BETAS["ddpm"].last,
                "beta_schedule": "linear",
                "trained_betas": None,
                "clip_sample": False,
                "set_alpha_to_one": True,
                "steps_offset": 0,
                "prediction_type": "epsilon",
                "thresholding": False,
                "timestep_spacing": "leading",
                "rescale_betas_zero_snr": False,
            },
            without_effect=frozenset({"dynamic_thresholding_ratio", "clip_sample_range", "sample_max_value"}),
        )
    },
}
"""Kind of network -> scheduler class in its published pipelines -> fields."""


_DDIM_OF_STABLE_DIFFUSION = {"timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": True}
_OF_STABLE_DIFFUSION = _DDIM_OF_STABLE_DIFFUSION | _OTHER_LEVELS
"""Scheduler fields of our schedule `stable_diffusion`."""
_WRITTEN = _SCHEDULERS | {
    "stable_diffusion": {
        "DDIMScheduler": Scheduler(
            used=lambda of: {"sampler": "euler", "schedule": "stable_diffusion"},
            defaults={},
            only=NOISE_SCHEDULE | _DDIM_OF_STABLE_DIFFUSION | {"clip_sample": False},
        )
    }
}
"""The same with what is written for Stable Diffusion, whose pipelines are read with any scheduler (`departures`)."""


def read_scheduler(pipeline: Path) -> Values:
    """scheduler_config.json of a pipeline; {} without one."""
    values = read_json(pipeline / FILE) if (pipeline / FILE).is_file() else {}
    if not isinstance(values, dict):
        raise UserError(f"{pipeline / FILE} is not a JSON object")
    return values


def scheduler_settings(kind: str, values: Values) -> dict[str, Any]:
    """Sampling settings that are equivalent to a pipeline's scheduler.

    Raises:
        UserError: for an unsupported class or field, with the supported value.
    """
    known = _SCHEDULERS.get(kind)
    if known is None or not values:
        return {}
    name = values.get("_class_name")
    instead = f"; to sample by the defaults of its publication, delete {FILE}"
    choose_one(str(name), known, f"{FILE}: a {name} is not supported for this network{instead}")
    scheduler = known[name]
    found = {**scheduler.only, **scheduler.defaults, **values}
    for setting, only in scheduler.only.items():
        if found[setting] != only:
            raise UserError(f"{FILE}: {setting}={found[setting]!r:.40} is not supported, it must be {only!r}{instead}")
    fields = {*scheduler.only, *scheduler.defaults, *scheduler.without_effect}
    for setting in sorted(values.keys() - fields):
        if not setting.startswith("_"):
            raise UserError(f"{FILE}: {setting!r} is an unknown setting of a {name}{instead}")
    for setting in scheduler.defaults:
        value = found[setting]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if setting not in scheduler.only and not (is_number and 0 < value < math.inf):
            raise UserError(f"{FILE}: {setting}={value!r:.40} must be a number greater than 0")
    return scheduler.used(found)


def scheduler_values(kind: str, settings: SamplingSettings) -> tuple[Values, list[str]]:
    """The inverse of `scheduler_settings`: the closest scheduler_config.json ({}: none is close), and the settings that
    it lacks, as NAME=VALUE."""
    of = {name: _written(name, scheduler, settings) for name, scheduler in _WRITTEN.get(kind, {}).items()}
    if not (fitting := {name: values for name, values in of.items() if values}):
        return {}, []
    name = min(fitting, key=lambda name: len(_other(_WRITTEN[kind][name], fitting[name], settings)))
    return fitting[name], _other(_WRITTEN[kind][name], fitting[name], settings)


def _written(name: str, scheduler: Scheduler, settings: SamplingSettings) -> Values:
    """The configuration of a scheduler; {} for explicit noise levels, which no pipeline's scheduler has."""
    if settings.sigmas:
        return {}
    own = scheduler.defaults.keys() - scheduler.only.keys() - scheduler.without_effect
    free = {field: getattr(settings, "shift" if field == "flow_shift" else field) for field in sorted(own)}
    return {"_class_name": name, **scheduler.only, **free}


def _other(scheduler: Scheduler, values: Values, settings: SamplingSettings) -> list[str]:
    meant = scheduler.used({**scheduler.defaults, **values})
    own = {name: getattr(settings, name) for name in meant}
    return [f"{name}={value}" for name, value in own.items() if value != meant[name]]


def departures(kind: str, values: Values) -> list[str]:
    """Scheduler fields that our sampling does not follow, as NAME=VALUE: Stable Diffusion is published with many
    schedulers, and sampled by one (`published_defaults`)."""
    usual = _OF_STABLE_DIFFUSION if kind == "stable_diffusion" else {}
    return [f"{name}={values[name]!r:.40}" for name, of_ours in usual.items() if values.get(name, of_ours) != of_ours]
