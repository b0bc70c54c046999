"""CUDA graphs: the kernels of a denoiser call, captured once for each size and then launched together.

With small videos the GPU waits for Python, which launches kernels one by one.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.sampling.guidance import Denoiser
from megadit.models.host_to_device import levels_on
from megadit.models.networks.conditioning import CleanLatents, Conditioning

TEXT_MULTIPLE = 64
"""Texts are padded to a multiple of this many tokens (masked), so that few lengths are captured."""
MAX_GRAPHS = 8
"""Number of captured sizes that stay in memory."""
WARM_UP = 3
"""Warm-up calls before a capture, in which libraries choose kernels and caches are filled."""

CLEAN, OTHERS = "clean", ("text_length_B", "fps_B", "image_BIE", "pooled_BP", "guidance_B")
"""Conditions in addition to the text."""

Compute = Callable[[], Tensor]
Record = Callable[[Compute], tuple[Tensor, Callable[[], None]]]
"""Captures a function of static tensors; returns its output tensor, and a function that recomputes it in place."""


def record_cuda_graph(compute: Compute) -> tuple[Tensor, Callable[[], None]]:
    """Captures `compute` on the current GPU.

    Returns (output, replay): the output tensor, of one shape, and a function that recomputes it in place. `replay` runs
    without a graph where none can be captured, because `compute` synchronizes with the device.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # another thread may decode meanwhile; its work must not end the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = compute()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"no CUDA graph, which is slower: this network cannot be recorded ({reason})", stacklevel=2)
        output = compute()
        return output, lambda: output.copy_(compute())
    return output, graph.replay


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: tuple[Tensor, ...]
    output: Tensor
    replay: Callable[[], None]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value)
        self.replay()
        return self.output.clone()  # the next call overwrites it


class RecordedDenoiser:
    """Denoiser whose calls are captured: the first of each size of batch, video and text, and of each set of places
    with conditioning.

    Calls with adapters are not captured: their memory is freed when they are removed.
    """

    def __init__(self, denoiser: Denoiser, device: torch.device, record: Record = record_cuda_graph) -> None:
        self._denoiser = denoiser
        self._device = device
        self._record = record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on the device); inputs may be on any device."""
        if conditioning.adapter_scale_B:
            return self._denoiser(x_BCTHW, sigma_B, conditioning)
        # streams and graphs belong to the current device, which each thread sets for itself
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._replayed(x_BCTHW, sigma_B, conditioning)

    def _replayed(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        sigma_B, clean = levels_on(sigma_B.float(), self._device), conditioning.clean
        text_BLE = conditioning.text_BLE
        text_BLE = F.pad(text_BLE, (0, 0, 0, -text_BLE.shape[1] % TEXT_MULTIPLE))
        conditions = {"text_BLE": text_BLE, **{name: getattr(conditioning, name) for name in OTHERS}}
        conditions |= {} if clean is None else {CLEAN: clean.latents_BCTHW}
        conditions = {name: tensor for name, tensor in conditions.items() if tensor is not None}
        inputs = (x_BCTHW.float(), sigma_B, *conditions.values())
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        key = shapes, tuple(conditions), None if clean is None else clean.places
        if key not in self._recordings:
            self._recordings[key] = self._recorded(inputs, tuple(conditions), clean)
            if len(self._recordings) > MAX_GRAPHS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key](inputs)

    def _recorded(self, inputs: tuple[Tensor, ...], names: tuple[str, ...], clean: CleanLatents | None) -> _Recording:
        x_BCTHW, sigma_B, *conditions = places = tuple(tensor.to(self._device, copy=True) for tensor in inputs)
        fixed = None if clean is None else clean.to(self._device)

        def compute() -> Tensor:
            # new conditions for each capture: a replay must read nothing that was cached for others
            by_name: dict[str, Any] = dict(zip(names, conditions, strict=True))
            latents_BCTHW = by_name.pop(CLEAN, None)
            shown = None if fixed is None else replace(fixed, latents_BCTHW=latents_BCTHW)
            return self._denoiser(x_BCTHW, sigma_B, Conditioning(**by_name, clean=shown))

        output, replay = self._record(compute)
        return _Recording(places, output, replay)
