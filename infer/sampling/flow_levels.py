"""Noise levels of flow models as their publishers' programs compute them, with their rounding.

A level is t = sigma / (1 + sigma), from 1 (noise) to 0, computed in float64 and then rounded to float32 as there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadit.infer.sampling.samplers import Denoise
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError

STEPS = 1000
"""Factor of t in the network's input."""
_NOISE = 1 - 1e-8
"""t of pure noise: rounds to 1 in float32, and sigma stays finite."""
_LEAST = 1e-4
"""Lowest t of the network's input, used where rounding gives 0."""


def wan(num_steps: int, shift: float) -> np.ndarray:
    """t of Wan's own code, of its UniPC and DPM++: evenly from .999, then shifted; float64 [num_steps]."""
    return _shifted(np.linspace(np.float32(0.999), 0, num_steps + 1)[:-1], shift)


def wan_diffusers(num_steps: int, shift: float) -> np.ndarray:
    """t of diffusers' UniPCMultistepScheduler with `use_flow_sigmas`: evenly from 1 towards .001, then shifted, the
    first a millionth less; float64 [num_steps]."""
    t = _shifted(np.linspace(1, 1 / STEPS, num_steps + 1)[:-1], shift)
    t[0] -= 1e-6
    return t


def flow_match_euler(num_steps: int, shift: float) -> np.ndarray:
    """t of diffusers' FlowMatchEulerDiscreteScheduler: evenly from 1 to a shifted .001, then shifted (again); float64
    [num_steps]."""
    lowest = _shifted(np.float32(1 / STEPS), np.float32(shift))
    t = _shifted(np.linspace(1.0, float(lowest), num_steps), shift)
    t[0] = _NOISE
    return t


@dataclass(frozen=True, slots=True)
class FlowLevels:
    """Noise levels of one published program."""

    levels: Callable[[int, float], np.ndarray]
    """(num_steps, shift) -> t."""
    has_whole_steps: bool
    """Whether the network's input, STEPS t, is truncated to a whole number."""


FLOW_LEVELS = {
    "wan": FlowLevels(wan, has_whole_steps=True),
    "wan_diffusers": FlowLevels(wan_diffusers, has_whole_steps=True),
    "flow_match_euler": FlowLevels(flow_match_euler, has_whole_steps=False),
}
"""Schedules of published programs by name."""


def flow_level_sigmas(settings: SamplingSettings) -> Tensor:
    """Shifted noise levels of a schedule in `FLOW_LEVELS`, then 0: float64 [num_steps + 1].

    Raises:
        UserError: for a shift at which levels coincide.
    """
    t = FLOW_LEVELS[settings.schedule].levels(settings.num_steps, settings.shift)
    rounded = t.astype(np.float32).astype(np.float64)
    t = np.where(rounded < 1, rounded, np.minimum(t, _NOISE))
    if not (np.diff(t, append=0) < 0).all():
        raise UserError(
            f"shift={settings.shift:g} makes some of the {settings.num_steps} levels equal; use one of about 1 to 20"
        )
    return torch.from_numpy(np.append(t / (1 - t), 0.0))


def noise_of_start(settings: SamplingSettings, sigmas: Tensor) -> float:
    """Scale of the initial noise: (1 + sigma) / sigma where a program starts from pure noise, else 1; sigmas [K].

    The state of a flow, (1 - t) x0 + t noise, is pure noise only at t = 1; `sigmas` begin slightly below.
    """
    begins = settings.schedule in FLOW_LEVELS and not settings.sigmas and len(sigmas) == settings.num_steps + 1
    return (1 + sigmas[0].item()) / sigmas[0].item() if begins else 1.0


def with_whole_steps(denoise: Denoise, settings: SamplingSettings, config: NetworkConfig) -> Denoise:
    """Wrap the denoiser of a flow network: its noise level is rounded as in the schedule's program.

    With D(x'; sigma') at the rounded level, and x' such that the network sees the same, the velocity is
    (state - D) / t', and the estimate at the level itself is state - t velocity.
    """
    known = FLOW_LEVELS.get(settings.schedule)
    if known is None or not known.has_whole_steps or settings.sigmas or config.parameterization != "flow":
        return denoise
    t = known.levels(settings.num_steps, settings.shift)
    inputs = dict(zip(flow_level_sigmas(settings)[:-1].float().tolist(), np.floor(t * STEPS) / STEPS, strict=True))

    def asked(x: Tensor, sigma_B: Tensor) -> Tensor:
        sigma = sigma_B[0].item()
        t = sigma / (1 + sigma)
        t_input = max(inputs.get(sigma, int(t * STEPS) / STEPS), _LEAST)
        state, sigma_input = x / (1 + sigma), t_input / (1 - t_input)
        x0 = denoise(state * (1 + sigma_input), torch.full_like(sigma_B, sigma_input))
        return torch.lerp(state.to(x0), x0, t / t_input)

    return asked


def _shifted(t: np.ndarray, shift: float) -> np.ndarray:
    return shift * t / (1 + (shift - 1) * t)
