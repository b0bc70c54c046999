"""Progress of a generation: a callback after every denoiser call, which may preview and may cancel it.

A GPU computes behind the host, which could launch all calls before the first is done. With a callback the host waits
for the call two before (and once for the first): progress, deadlines and cancelling are at most two calls ahead of the
GPU, which always has the next call to go on with.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadit.infer.sampling.samplers import Denoise


class Cancelled(Exception):  # noqa: N818 - asked for, not an error
    """A callback ended the generation; videos that were already complete stay valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A denoiser call that was just made."""

    step: int
    """Denoiser calls made so far, over all batches of the generation: 1..num_steps."""
    num_done: int
    """Denoiser calls that have been computed: on a GPU the first, and all but the last `CALLS_AHEAD`."""
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


CALLS_AHEAD = 2
"""Denoiser calls that a GPU may have yet to finish when the callback is told of the last."""

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
        self._running: deque[torch.cuda.Event] = deque()
        """An event behind each call that may not be done."""

    def around(self, denoise: Denoise, videos: range) -> Denoise:
        """Wrap the denoiser of a batch of these videos; it raises `Cancelled` where the callback returns False."""

        def reported(x: Tensor, sigma_B: Tensor) -> Tensor:
            x0 = denoise(x, sigma_B)
            self._done += 1
            if self._on_step is None:
                return x0
            self._wait(x0)
            if self._on_step(self._step(x0, sigma_B, videos)) is False:
                raise Cancelled(f"cancelled after denoiser call {self._done} of {self._num_steps}")
            return x0

        return reported

    def _wait(self, x0: Tensor) -> None:
        """Waits for the call `CALLS_AHEAD` before the one that computes x0 on a GPU, and for the first."""
        if x0.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(x0.device))
            self._running.append(event)
            if len(self._running) > CALLS_AHEAD or self._done == 1:
                self._running.popleft().synchronize()

    def _step(self, x0: Tensor, sigma_B: Tensor, videos: range) -> Step:
        return Step(
            step=self._done,
            num_done=self._done - len(self._running),
            num_steps=self._num_steps,
            sigma=sigma_B[0].item(),
            videos=videos,
            preview=lambda: self._preview(x0),
        )
