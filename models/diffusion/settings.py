"""How a video is sampled: every setting, defined once.

`SamplingSettings` decides the options of `megadit generate` and `megadit serve ask`, the keys of a prompt file's lines,
the inputs of the Triton model, the schema of the gateway, and what a bundle and a video's record store. Nothing here
imports torch. Aliases of settings are their names in diffusers, NeMo and InstructPix2Pix; commands, prompt files and
services accept them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from megadit.models.shared.cli.setting import (
    Setting,
    check_json,
    check_settings,
    check_value,
    other_names,
    partial_dataclass,
    setting,
    settings_of,
)
from megadit.models.shared.errors import UserError, choose_one, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerTraits:
    """Properties of a sampler that are known without running it; its function is in `infer/sampling/samplers.py`."""

    calls: int = 1
    """Function evaluations in a step (the second of two is left out on a last step to 0)."""
    adds_noise: bool = False
    """Whether the sampler can add noise. A multistep sampler cannot: added noise invalidates its earlier D."""
    renews_noise: bool = False
    """Whether every step draws new noise, in place of the remaining initial noise."""
    aliases: tuple[str, ...] = ()
    """Names of the sampler in other programs."""


SAMPLERS: dict[str, SamplerTraits] = {
    "euler": SamplerTraits(adds_noise=True),
    "heun": SamplerTraits(calls=2, adds_noise=True, aliases=("edm",)),
    "dpm2": SamplerTraits(calls=2, adds_noise=True),
    "dpmpp_2m": SamplerTraits(),
    "dpmpp_3m": SamplerTraits(),
    "res_2ab": SamplerTraits(aliases=("res", "2ab")),
    "unipc": SamplerTraits(),
    "unipc_bh2": SamplerTraits(),
    "consistency": SamplerTraits(renews_noise=True, aliases=("lcm",)),
}
INSTEAD = {
    "ddim": "euler takes the same steps, and --eta adds its noise",
    "plms": "use a multistep sampler: dpmpp_2m, dpmpp_3m or res_2ab",
}
"""Samplers of other programs that do not exist here -> what to use instead."""
STOCHASTIC = tuple(name for name, traits in SAMPLERS.items() if traits.adds_noise)
SCHEDULES = (
    *("karras", "log_linear", "exponential", "linear", "flow", "wan", "wan_diffusers", "flow_match_euler"),
    *("ddpm", "stable_diffusion"),
)
AUTO_SHIFTS = ("auto", "auto_video")
"""Values of `shift` that choose it by the pixels of a frame, or by those of all frames (see `fitting_shift`)."""
OF_TWO_CALLS: dict[str, Any] = {
    **{"negative_prompt": "", "second_prompt": "", "autoguidance": ""},
    **{"guidance_interval": (), "guidance_rescale": 0.0, "image_guidance": 1.0},
}
"""Settings of guidance with two function evaluations, and the values that switch them off."""
_ADDED_NOISE = {"churn": 0.0, "eta": 0.0}
"""Settings of the noise that a sampler adds, and the values that switch it off."""
_OF_SCHEDULE = ("num_steps", "schedule", "sigma_min", "sigma_max", "rho")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """All settings of a video except its prompt, seed and network; sizes are those of the decoded video.

    Raises:
        UserError: for a value outside its range.
    """

    sampler: str = setting("dpmpp_2m", ", ".join(SAMPLERS) + " (RES is res_2ab)", metavar="NAME", served=True)
    num_steps: int = setting(
        help="number of sampling steps; heun and dpm2 take two function evaluations in each",
        above=0,
        served=True,
        names=("--num_steps", "--num_inference_steps", "--inference_steps", "--steps"),
    )
    guidance: float = setting(
        help="classifier-free guidance scale; 1 disables it",
        low=0,
        served=True,
        names=("--guidance", "--guidance_scale", "--unconditional_guidance_scale", "--text_cfg_scale", "--cfg_text"),
    )
    """arXiv 2207.12598."""
    num_frames: int = setting(
        help="number of frames; 1 makes an image",
        above=0,
        served=True,
        names=("--num_video_frames", "--num_frames"),
    )
    height: int = setting(help="height in pixels", above=0, served=True)
    width: int = setting(help="width in pixels", above=0, served=True)
    fps: float = setting(help="frame rate of the output; also used for fps conditioning", low=0, served=True)
    sigma_min: float = setting(0.002, "lowest noise level before 0", above=0)
    sigma_max: float = setting(80.0, "highest noise level", above=0)
    rho: float = setting(7.0, "exponent of the karras schedule", above=0)
    """arXiv 2206.00364, eq. 5."""
    negative_prompt: str = setting(
        "", "text to steer away from; replaces the empty text of the unconditional pass", metavar="TEXT", served=True
    )
    schedule: str = setting("karras", "noise schedule: " + ", ".join(SCHEDULES), metavar="NAME")
    sigmas: tuple[float, ...] = setting((), "explicit noise levels, decreasing, in place of a schedule")
    shift: float | Literal["auto", "auto_video"] = setting(
        1.0,
        "flow shift: factor of all noise levels; auto: by the resolution; auto_video: also by the number of frames",
        above=0,
    )
    """More than 1 suits more pixels than were trained on (arXiv 2403.03206, section 5.3.2)."""
    noise_scale: float = setting(1.0, "scale of the initial noise; below 1 trades diversity for fidelity", above=0)
    """Temperature (arXiv 1807.03039), for few-step networks and ODE solvers; noise that a sampler adds later is not
    scaled."""
    churn: float = setting(0.0, f"S_churn: noise added before steps ({', '.join(STOCHASTIC)})", low=0)
    """arXiv 2206.00364, algorithm 2."""
    churn_interval: tuple[float, ...] = setting((), "lowest and highest noise level at which churn acts", nargs=2)
    """(S_tmin, S_tmax); empty: all levels."""
    eta: float = setting(
        0.0, f"0 to 1: share of ancestral noise after steps ({', '.join(STOCHASTIC)})", low=0, high=1, served=True
    )
    guidance_interval: tuple[float, ...] = setting((), "lowest and highest noise level at which guidance acts", nargs=2)
    """arXiv 2404.07724; empty: all levels."""
    adapter_interval: tuple[float, ...] = setting((), "lowest and highest noise level at which adapters act", nargs=2)
    """Empty: all levels."""
    image_guidance: float = setting(
        1.0,
        "guidance scale of the image or video conditioning (--image, --video, ...); 1 disables it",
        low=0,
        served=True,
        names=("--image_guidance", "--image_guidance_scale", "--image_cfg_scale", "--cfg_image"),
    )
    """arXiv 2211.09800, eq. 3."""
    low_guidance: float = setting(0.0, "guidance scale of the low-noise expert (Wan 2.2); 0: same as --guidance", low=0)
    guidance_rescale: float = setting(0.0, "CFG rescale factor, 0 to 1 (arXiv 2305.08891)", low=0, high=1)
    """arXiv 2305.08891, section 3.4."""
    autoguidance: str = setting("", "weaker checkpoint that guides in place of the negative prompt", metavar="PATH")
    """arXiv 2406.02507."""
    second_prompt: str = setting("", "second prompt for every video, with a guidance scale of its own", metavar="TEXT")
    second_guidance: float = setting(0.0, "guidance scale of --second_prompt", low=0)
    """arXiv 2206.01714."""
    cache_budget: float = setting(
        0.0,
        "step caching: relative error of the latents that skipped function evaluations may cause, such as 0.02; "
        "run `megadit calibrate-cache` with the same options first",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.shift in AUTO_SHIFTS:
            raise UserError(f"shift={self.shift} must be a number here: there is no resolution to choose it by")
        if self.sigma_min >= self.sigma_max:
            raise UserError(f"sigma_min={self.sigma_min} must be smaller than sigma_max={self.sigma_max}")
        for name in ("churn_interval", "guidance_interval", "adapter_interval"):
            interval = getattr(self, name)
            if interval and not (len(interval) == 2 and 0 <= interval[0] < interval[1]):
                raise UserError(f"{name}={list(interval)} must be two noise levels, the lower first")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingSettings":
        """The inverse of `to_dict`; settings that are missing take their defaults.

        Raises:
            UserError: for an unknown or missing setting, and for a value outside its range.
        """
        asked = check_json(values, cls, where="sampling settings: ")
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in asked]
        if missing:
            raise UserError(f"sampling settings lack {', '.join(missing)}")
        return cls(**asked)


UNCHANGED = {
    each.name: list(each.default) if isinstance(each.default, tuple) else each.default
    for each in fields(SamplingSettings)
    if each.default is not MISSING
}
"""Defaults of settings that have one."""
SERVED = {name: about for name, about in settings_of(SamplingSettings).items() if about.served}
"""Settings that a request to a service may contain."""
OF_PROMPTS = tuple(name for name in SERVED if name != "image_guidance")
"""Served settings that apply to videos conditioned on a prompt alone."""
OF_ADAPTERS: dict[str, Setting] = {
    name: replace(settings_of(SamplingSettings)[name], words=(), **bounds)
    for name, bounds in {
        "sampler": {"choices": tuple(SAMPLERS)},
        "num_steps": {"low": 1, "high": 1000},
        "guidance": {"low": 0, "high": 1000},
        "sigmas": {"low": 0, "high": 1e5},
        "shift": {"low": 0.01, "high": 100},
        "noise_scale": {"low": 0.01, "high": 10},
        "eta": {},
    }.items()
}
"""Settings that an adapter may override, with bounds. Adapters are untrusted, and other settings could start unlimited
computation, or open files."""
_MOST_SIGMAS = 1000
_SWITCHED_OFF = {**OF_TWO_CALLS, **_ADDED_NOISE, "second_guidance": 0.0, "cache_budget": 0.0}
"""Settings that an adapter may switch off, as few-step students need, and the values that do so."""
PartialSettings = partial_dataclass("PartialSettings", SamplingSettings)
"""Sampling settings that may be None."""
ServedSettings = partial_dataclass("ServedSettings", SamplingSettings, only=SERVED)


def resolve(defaults: SamplingSettings, *, trained: SamplingSettings | None = None, **asked: Any) -> SamplingSettings:
    """Merge the settings that a user set (not None) into the defaults.

    `trained` are the checkpoint's defaults, where `defaults` are others (a record's): an automatic shift is relative to
    them.

    Raises:
        UserError: for an unknown name, a value outside its range, and settings that exclude each other.
    """
    known = settings_of(SamplingSettings)
    asked = {name: value for name, value in asked.items() if value is not None}
    for name in asked.keys() - known.keys():
        own = {**other_names(known), "prompt": "prompts", "seed": "seeds"}.get(name)
        hint = f"; did you mean {own!r}?" if own else did_you_mean(name, known)
        raise UserError(f"unknown setting {name!r}{hint}")
    asked = {name: check_value(known[name], name, value) for name, value in asked.items()}
    before = asdict(defaults)
    if asked.get("shift") in AUTO_SHIFTS:
        asked["shift"] = fitting_shift(asked["shift"], before | asked, asdict(trained or defaults))
    changes = switched_off(before, asked) | asked
    for name, find in (("sampler", find_sampler), ("schedule", find_schedule)):
        changes[name] = find(changes.get(name, before[name]))
    settings = replace(defaults, **changes)
    check_together(settings)
    return settings


def switched_off(
    defaults: Mapping[str, Any], asked: Mapping[str, Any], stochastic: Collection[str] = STOCHASTIC
) -> dict[str, Any]:
    """Return the defaults that the user's settings make meaningless, with the values that switch them off.

    Churn and eta suit the default sampler; another sampler that cannot add noise runs without them. `sigmas` replaces
    the default schedule; asking for another schedule ignores it.
    """
    off: dict[str, Any] = {}
    sampler = _sampler_key(asked["sampler"]) if asked.get("sampler") else None
    if sampler and sampler not in stochastic and sampler != _sampler_key(defaults["sampler"]):
        off |= _ADDED_NOISE
    if any(name in asked and asked[name] != defaults.get(name, asked[name]) for name in _OF_SCHEDULE):
        off["sigmas"] = ()
    return off


def check_together(settings: SamplingSettings) -> None:
    """Raises UserError for settings that exclude each other, or need one another."""
    if settings.num_frames > 1 and not settings.fps > 0:
        raise UserError(f"fps={settings.fps} must be greater than 0")
    if any(getattr(settings, name) for name in _ADDED_NOISE) and not SAMPLERS[settings.sampler].adds_noise:
        raise UserError(
            f"sampler {settings.sampler} cannot add noise by {' or '.join(_ADDED_NOISE)}: leave them out, or choose "
            f"one of {', '.join(STOCHASTIC)}"
        )
    if bool(settings.second_prompt) != bool(settings.second_guidance):
        raise UserError("second_prompt and second_guidance go together: give both, or neither")
    if settings.autoguidance and settings.negative_prompt:
        raise UserError("autoguidance replaces the negative prompt: give one of them")
    if settings.autoguidance and settings.image_guidance != 1:
        raise UserError("autoguidance and image_guidance cannot be combined: choose one")
    if settings.autoguidance and settings.guidance == 1:
        raise UserError("autoguidance needs a guidance other than 1, which disables it")


def check_asked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the settings that an adapter overrides and return them for `resolve`; `where` begins error messages.

    Raises:
        UserError: for unknown settings, those that adapters may not override, and values out of bounds.
    """
    others = {name: value for name, value in values.items() if name not in OF_ADAPTERS}
    for name, value in check_json(others, SamplingSettings, where=where).items():
        if name not in _SWITCHED_OFF or value != _SWITCHED_OFF[name]:
            raise UserError(f"{where}{name} cannot be set by an adapter; it may set {', '.join(OF_ADAPTERS)}")
    sigmas = values.get("sigmas")
    if isinstance(sigmas, Sequence) and len(sigmas) > _MOST_SIGMAS:
        raise UserError(f"{where}sigmas are {len(sigmas):,} noise levels; {_MOST_SIGMAS:,} is the most")
    asked = {name: check_value(OF_ADAPTERS[name], f"{where}{name}", values[name]) for name in values.keys() - others}
    return {name: asked.get(name, _SWITCHED_OFF.get(name)) for name in values}


def check_guidance(settings: SamplingSettings, guidance_embedding_range: tuple[float, float] | None) -> None:
    """Raise UserError for guidance that a guidance-distilled network lacks; `guidance_embedding_range` is None for
    others."""
    if guidance_embedding_range is None:
        return
    check_embedded_guidance(settings.guidance, guidance_embedding_range)
    for name, unguided in OF_TWO_CALLS.items():
        if getattr(settings, name) != unguided:
            raise UserError(
                f"{name}={getattr(settings, name)} needs a second function evaluation in each step, which this "
                "guidance-distilled model does without: leave it out"
            )


def check_embedded_guidance(guidance: float, guidance_embedding_range: Sequence[float]) -> None:
    """Raise UserError for a guidance scale outside the range of a guidance-distilled network."""
    low, high = guidance_embedding_range
    if not low <= guidance <= high:
        raise UserError(
            f"guidance={guidance:g} is outside {low:g} to {high:g}, the range of this guidance-distilled model"
        )


def find_sampler(name: str) -> str:
    """The sampler called `name`, in any case.

    Raises:
        UserError: for an unknown name; lists those that exist.
    """
    key = _sampler_key(name)
    if key in INSTEAD:
        raise UserError(f"sampler {name!r} is not available: {INSTEAD[key]}")
    return choose_one(key, SAMPLERS, f"sampler {name!r} is not available")


def find_schedule(name: str) -> str:
    """The schedule called `name`, in any case.

    Raises:
        UserError: for an unknown name; lists those that exist.
    """
    return choose_one(_key(name), SCHEDULES, f"schedule {name!r} is not available")


def fitting_shift(kind: str, size: Mapping[str, Any], usual: Mapping[str, Any]) -> float:
    """The shift of one of `AUTO_SHIFTS` for a size (num_frames, height, width), where the network was trained on
    `usual`."""
    expected, trained = (
        of["height"] * of["width"] * (of["num_frames"] if kind == "auto_video" else 1) for of in (size, usual)
    )
    return resolution_shift(expected, trained)


def resolution_shift(pixels: int, reference_pixels: int) -> float:
    """sqrt(pixels / reference_pixels) (arXiv 2403.03206, eq. 23): this shift hides an image of more pixels as much.

    Count the pixels of a frame, or of all frames; `reference_pixels` are those of the training resolution.
    """
    return math.sqrt(pixels / reference_pixels)


def _sampler_key(name: str) -> str:
    key = _key(name)
    return next((sampler for sampler, traits in SAMPLERS.items() if key in traits.aliases), key)


def _key(name: str) -> str:
    return name.lower().replace("-", "_")
