"""Step caching: some denoiser calls are replaced by predictions from the calls before them.

D changes smoothly along a trajectory, and at high noise hardly matters. `megadit calibrate-cache` measures once which
calls can be skipped for a checkpoint, its settings and the places of its conditioning media. All such videos skip the
same calls, so that no video depends on the others of its batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from megadit.infer.conditioning.items import Media, Target, places_of
from megadit.infer.pipeline.adapters import Scales
from megadit.infer.runtimes.options import Measure
from megadit.infer.sampling.samplers import Denoise
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import UNCHANGED, SamplingSettings
from megadit.models.shared.errors import UserError

_IRRELEVANT = ("negative_prompt", "fps", "cache_budget", "adapter_interval")
"""Settings that a plan does not depend on: like prompts, they are covered by its margin; adapters have no plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """Denoiser calls that are skipped under certain settings."""

    budget: float
    """Highest error that the calibration allowed."""
    skipped: tuple[int, ...]
    num_calls: int
    """Denoiser calls without the cache."""
    largest_error: float
    """Largest error among the calibration's videos."""
    num_videos: int
    settings: dict[str, Any]
    """Settings that decide a trajectory; see `plan_key`."""
    measure: Measure = "latents"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"skipped": list(self.skipped)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CachePlan":
        """The inverse of `to_dict`; settings that are missing take their defaults."""
        settings = {name: value for name, value in UNCHANGED.items() if name not in _IRRELEVANT} | values["settings"]
        return cls(**{**values, "skipped": tuple(values["skipped"]), "settings": settings})


def plan_key(settings: SamplingSettings, conditioning: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the key of a plan, as JSON: its settings, and the places of conditioning media (`places_of`).

    Pictures and masks themselves are left out: like prompts, they are covered by a plan's margin.
    """
    kept = {name: value for name, value in asdict(settings).items() if name not in _IRRELEVANT}
    return _as_json(kept | ({"conditioning": conditioning} if conditioning else {}))


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return list(map(_as_json, value)) if isinstance(value, tuple | list) else value


def bundle_plans(bundle: Bundle, measure: Measure = "latents") -> list[CachePlan]:
    """The plans that were calibrated for a bundle by this measure."""
    plans = (CachePlan.from_dict(values) for values in bundle.manifest.get("cache", []))
    return [plan for plan in plans if plan.measure == measure]


def find_plan(plans: Iterable[CachePlan], settings: SamplingSettings, conditioning: Sequence[Any] = ()) -> CachePlan:
    """Return the plan that skips most within the settings' budget, for media at the places `conditioning`.

    Raises:
        UserError: if there is none for these settings; the message says how to make one.
    """
    key = plan_key(settings, conditioning)
    fitting = [plan for plan in plans if plan.settings == key and plan.budget <= settings.cache_budget]
    if not fitting:
        what = "these settings" + " and this conditioning" * bool(conditioning)
        raise UserError(
            f"cache_budget={settings.cache_budget} was not calibrated for {what}; run: megadit calibrate-cache "
            f"--cache_budget {settings.cache_budget} --checkpoint_path ... --prompt_file ..., with the same options"
        )
    return max(fitting, key=lambda plan: len(plan.skipped))


def cached_calls(
    plans: Iterable[CachePlan],
    settings: SamplingSettings,
    adapters: Sequence[Scales],
    conditioning: Sequence[Media],
    target: Target,
) -> list[Sequence[int]]:
    """Indices of the denoiser calls of each video that are predicted; equal for videos that can share a batch.

    Raises:
        UserError: as `find_plan`, and for a video with adapters.
    """
    if any(adapters):
        raise UserError(f"cache_budget={settings.cache_budget} was calibrated without adapters: leave one of them out")
    skipped = {media: find_plan(plans, settings, places_of(media, target)).skipped for media in set(conditioning)}
    return [skipped[media] for media in conditioning]


def cached(denoise: Denoise, skipped: Iterable[int], sigma_data: float) -> Denoise:
    """Wrap a denoiser for one trajectory: the calls with indices in `skipped` are predicted from earlier ones.

    D_next = D + r (D - D_previous),  r = min((t_next - t) / (t - t_previous), 1),  t = atan(sigma / sigma_data):
    Linear extrapolation over the angle t (like D, t settles at both ends of the noise levels), over at most the
    distance of the last two calls: several predictions in a row would amplify their difference.
    """
    skipped = frozenset(skipped)
    outputs: list[tuple[float, Tensor]] = []
    num_calls = 0

    def denoise_or_predict(x: Tensor, sigma_B: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        t = math.atan(sigma_B[0].item() / sigma_data)
        if num_calls - 1 in skipped:
            return _predicted(outputs, t)
        if outputs and outputs[-1][0] == t:
            outputs.pop()  # a second output at the same level replaces the first
        outputs.append((t, denoise(x, sigma_B)))
        del outputs[:-2]
        return outputs[-1][1]

    return denoise_or_predict


def _predicted(outputs: Sequence[tuple[float, Tensor]], t_next: float) -> Tensor:
    (t_previous, x0_previous), (t, x0) = outputs[0], outputs[-1]
    if t == t_previous:
        return x0
    r = min((t_next - t) / (t - t_previous), 1.0)
    return x0 + r * (x0 - x0_previous)
