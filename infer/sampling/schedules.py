"""Noise schedules: the levels that a sampler steps through, independent of the solver.

Those of published flow models (`FLOW_LEVELS`) are as their programs compute them, with their rounding: a level is
t = sigma / (1 + sigma), from 1 (noise) to 0, computed in float64 and then rounded to float32 as there.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadit.infer.sampling.samplers import Denoise
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.parameterization import DDPM_STEPS, ddpm_sigmas
from megadit.models.diffusion.settings import SamplingSettings, find_schedule
from megadit.models.shared.errors import UserError

MOST_STEPS = 10_000
_LOWEST_RHO = 0.05
"""Lowest rho; below, sigma^(1/rho) overflows."""
STEPS = 1000
"""Factor of t in the network's input."""
_NOISE = 1 - 1e-8
"""t of pure noise: rounds to 1 in float32, and sigma stays finite."""
_LEAST = 1e-4
"""Lowest t of the network's input, used where rounding gives 0."""


def karras_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Noise levels from sigma_max down to sigma_min, then 0: float64 [num_steps + 1] on the CPU.

    sigma_i = (sigma_max^(1/rho) + i / (N - 1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho for i < N, sigma_N = 0
    (arXiv 2206.00364, eq. 5). A single step goes from sigma_max straight to 0.

    Raises:
        UserError: unless num_steps is a whole number >= 1, 0 < sigma_min < sigma_max and rho > 0, all finite.
    """
    _check(num_steps, sigma_min, sigma_max, rho)
    start, end = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return _then_zero((start + _fractions(num_steps) * (end - start)) ** rho, sigma_max)


def log_linear_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """A geometric sequence, sigma_i = sigma_max (sigma_min / sigma_max)^(i / (N - 1)), then 0, [N + 1]; no `rho`."""
    _check(num_steps, sigma_min, sigma_max, rho)
    return _then_zero(sigma_max * (sigma_min / sigma_max) ** _fractions(num_steps), sigma_max)


def linear_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """An arithmetic sequence from sigma_max to sigma_min, then 0, [num_steps + 1]; `rho` is ignored."""
    _check(num_steps, sigma_min, sigma_max, rho)
    return _then_zero(sigma_max + _fractions(num_steps) * (sigma_min - sigma_max), sigma_max)


def flow_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 999.0, rho: float = 7.0) -> Tensor:
    """sigma = t / (1 - t) for evenly spaced t from that of sigma_max to 0, [N + 1]; `sigma_min`, `rho` are ignored.

    The schedule of flow models (arXiv 2209.03003); a shift then multiplies sigma. 999 is t = 0.999, where Wan begins.
    """
    _check(num_steps, sigma_min, sigma_max, rho)
    t = sigma_max / (1 + sigma_max) * (1 - torch.arange(int(num_steps), dtype=torch.float64) / int(num_steps))
    return _then_zero(t / (1 - t), sigma_max)


def ddpm_leading_sigmas(num_steps: int, sigma_min: float = 0.0, sigma_max: float = 0.0, rho: float = 0.0) -> Tensor:
    """Noise levels of every (1000 / N)-th DDPM step, from step 0 on, then 0, [N + 1]; only N is used.

    With Euler steps, a network with DDPM's parameterization samples as DDIM does (arXiv 2010.02502, eq. 12).

    Raises:
        UserError: for more steps than DDPM has.
    """
    if num_steps != int(num_steps) or not 1 <= num_steps <= DDPM_STEPS:
        raise UserError(f"num_steps={num_steps} must be a whole number from 1 to {DDPM_STEPS}, DDPM's steps")
    levels = ddpm_sigmas()[torch.arange(int(num_steps)) * (DDPM_STEPS // int(num_steps))].flip(0)
    return torch.cat([levels, levels.new_zeros(1)])


def stable_diffusion_sigmas(num_steps: int, sigma_min: float = 0.0, sigma_max: float = 0.0, rho: float = 0.0) -> Tensor:
    """`ddpm_leading_sigmas`, [N + 1], for Stable Diffusion's steps from 1 on: its schedulers have `steps_offset` 1.

    Raises:
        UserError: for 1000 steps or more.
    """
    if num_steps != int(num_steps) or not 1 <= num_steps < DDPM_STEPS:
        raise UserError(f"num_steps={num_steps} must be a whole number from 1 to {DDPM_STEPS - 1}")
    steps = 1 + torch.arange(int(num_steps)) * (DDPM_STEPS // int(num_steps))
    levels = ddpm_sigmas("stable_diffusion")[steps].flip(0)
    return torch.cat([levels, levels.new_zeros(1)])


SCHEDULES = {
    "karras": karras_sigmas,
    "log_linear": log_linear_sigmas,
    "exponential": log_linear_sigmas,  # as k-diffusion and diffusers call it
    "linear": linear_sigmas,
    "flow": flow_sigmas,
    "ddpm": ddpm_leading_sigmas,
    "stable_diffusion": stable_diffusion_sigmas,
}


def explicit_sigmas(levels: Sequence[float]) -> Tensor:
    """Explicit noise levels, float64 [steps + 1], with a 0 at the end where there is none.

    Raises:
        UserError: unless they are positive, finite and decrease.
    """
    positive = list(levels[:-1] if len(levels) > 1 and levels[-1] == 0 else levels)
    if not positive or not all(0 < level < math.inf for level in positive):
        raise UserError(
            f"sigmas={reprlib.repr(list(levels))} must be finite numbers greater than 0 (a last 0 is added)"
        )
    if any(after >= before for before, after in zip(positive[:-1], positive[1:], strict=True)):
        raise UserError(f"sigmas={reprlib.repr(list(levels))} must decrease")
    return torch.tensor([*positive, 0.0], dtype=torch.float64)


def settings_sigmas(settings: SamplingSettings) -> Tensor:
    """The noise levels of a generation, [steps + 1]: explicit ones, or those of its schedule; multiplied by its shift.

    With t = sigma / (1 + sigma), s sigma is what flow models call a shift: t -> s t / (1 + (s - 1) t).
    """
    if settings.sigmas:
        return settings.shift * explicit_sigmas(settings.sigmas)
    if find_schedule(settings.schedule) in FLOW_LEVELS:
        _check(settings.num_steps, settings.sigma_min, settings.sigma_max, settings.rho)
        return flow_level_sigmas(settings)
    make = SCHEDULES[find_schedule(settings.schedule)]
    return settings.shift * make(settings.num_steps, settings.sigma_min, settings.sigma_max, settings.rho)


def highest_sigma(settings: SamplingSettings) -> float:
    """Noise level that a generation begins at; for a schedule that begins with pure noise, that of t = .999, shifted:
    the highest level at which the network's input contains signal."""
    highest = settings_sigmas(settings)[0].item()
    return min(highest, 999.0 * settings.shift) if settings.schedule in FLOW_LEVELS else highest


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


def _check(num_steps: int, sigma_min: float, sigma_max: float, rho: float) -> None:
    if num_steps != int(num_steps) or num_steps < 1:
        raise UserError(f"num_steps={num_steps} must be a whole number of at least 1")
    if num_steps > MOST_STEPS:
        raise UserError(f"num_steps={num_steps} is more than the limit of {MOST_STEPS}")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise UserError(f"need 0 < sigma_min < sigma_max, got sigma_min={sigma_min} and sigma_max={sigma_max}")
    if not _LOWEST_RHO <= rho < math.inf:
        raise UserError(f"rho={rho} must be a finite number of at least {_LOWEST_RHO}")


def _fractions(num_steps: int) -> Tensor:
    return torch.linspace(0, 1, int(num_steps), dtype=torch.float64)


def _then_zero(sigmas: Tensor, sigma_max: float) -> Tensor:
    sigmas[0] = sigma_max  # powers and roots are not exact
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def _shifted(t: np.ndarray, shift: float) -> np.ndarray:
    return shift * t / (1 + (shift - 1) * t)
