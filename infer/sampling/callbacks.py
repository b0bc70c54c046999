"""Progress of a generation: a callback after every denoiser call, which may preview and may cancel it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megadit.infer.sampling.samplers import Denoise


class Cancelled(Exception):  # noqa: N818 - asked for, not an error
    """A callback ended the generation; videos that were already complete stay valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A denoiser call that was just made."""

    step: int
    """Denoiser calls made so far, over all batches of the generation: 1..num_steps."""
    num_steps: int
    """Denoiser calls of the whole generation."""
    sigma: float
    """Noise level of the call."""
    videos: range
    """Indices of the prompts of this batch."""
    preview: Callable[[], np.ndarray]
    """Computes a preview of the videos: uint8 [B, T, height, width, 3], a frame for each latent frame."""


StepCallback = Callable[[Step], bool | None]
"""Called after every denoiser call. Returning False, or raising, ends the generation before the next one."""


DENOISE, DECODE = "denoise", "decode"
Around = Callable[[str, range], AbstractContextManager[None]]
"""(stage, indices of its prompts) -> context that is entered around the stage (`DENOISE` of a batch, `DECODE` of a
video), in its thread."""


def nothing_around(part: str, videos: range) -> AbstractContextManager[None]:
    return nullcontext()


class StepProgress:
    """Reports every denoiser call of a generation, over all batches, to a callback if there is one."""

    def __init__(self, on_step: StepCallback | None, num_steps: int, preview: Callable[[Tensor], np.ndarray]) -> None:
        self._on_step, self._done, self._num_steps, self._preview = on_step, 0, num_steps, preview

    def around(self, denoise: Denoise, videos: range) -> Denoise:
        """Wrap the denoiser of a batch of these videos; it raises `Cancelled` where the callback returns False."""

        def reported(x: Tensor, sigma_B: Tensor) -> Tensor:
            x0 = denoise(x, sigma_B)
            self._done += 1
            if self._on_step is not None and self._on_step(self._step(x0, sigma_B, videos)) is False:
                raise Cancelled(f"cancelled after denoiser call {self._done} of {self._num_steps}")
            return x0

        return reported

    def _step(self, x0: Tensor, sigma_B: Tensor, videos: range) -> Step:
        return Step(
            step=self._done,
            num_steps=self._num_steps,
            sigma=sigma_B[0].item(),
            videos=videos,
            preview=lambda: self._preview(x0),
        )
