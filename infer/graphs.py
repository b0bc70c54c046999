"""CUDA graphs: the kernels of a denoiser call, recorded once for each size and then launched all together.

Small videos leave a GPU waiting for Python, which starts a call's kernels one by one.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.guidance import Denoiser
from megadit.models.conditioning import Conditioning

TEXT_MULTIPLE = 64
"""Texts are padded to a multiple of so many tokens (which nothing reads), so that few lengths are recorded."""
KEPT = 8
"""Sizes whose recordings stay in memory."""
WARM_UP = 3
"""Calls before a recording, in which libraries choose kernels and tables are made."""

Compute = Callable[[], Tensor]
Record = Callable[[Compute], tuple[Tensor, Callable[[], None]]]
"""Takes a function of tensors that stay in place; gives its result's place and what computes it there again."""


def record_cuda_graph(compute: Compute) -> tuple[Tensor, Callable[[], None]]:
    """Records `compute` on the current GPU.

    (output, replay): what `compute` gives, whose shape stays, and a function that computes it anew: without a recording
    where none can be made, because `compute` asks the device for something meanwhile.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # another thread decodes meanwhile: what it does must not end the recording
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
    """The same denoiser; the first call of each size of batch, video and text is recorded."""

    def __init__(self, denoiser: Denoiser, device: torch.device, record: Record = record_cuda_graph) -> None:
        self._denoiser = denoiser
        self._device = device
        self._record = record
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on the device); the inputs may lie anywhere."""
        if conditioning.given is not None or conditioning.adapter_scale_B:
            return self._denoiser(x_BCTHW, sigma_B, conditioning)  # which places are given, no recording can change
        # streams and graphs are those of the current device, of which every thread has its own
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._replayed(x_BCTHW, sigma_B, conditioning)

    def _replayed(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        text_BLE = conditioning.text_BLE
        text_BLE = F.pad(text_BLE, (0, 0, 0, -text_BLE.shape[1] % TEXT_MULTIPLE))
        inputs = (x_BCTHW.float(), sigma_B.float(), text_BLE, conditioning.text_length_B, conditioning.fps_B)
        inputs += () if conditioning.guidance_B is None else (conditioning.guidance_B,)
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        if key not in self._recordings:
            self._recordings[key] = self._recorded(inputs)
            if len(self._recordings) > KEPT:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key](inputs)

    def _recorded(self, inputs: tuple[Tensor, ...]) -> _Recording:
        places = tuple(tensor.to(self._device, copy=True) for tensor in inputs)
        x_BCTHW, sigma_B, text_BLE, length_B, fps_B, *told = places

        def conditions() -> Conditioning:
            """Of its own for each call: nothing that was computed for others is read when it is replayed."""
            return Conditioning(text_BLE, length_B, fps_B, guidance_B=next(iter(told), None))

        output, replay = self._record(lambda: self._denoiser(x_BCTHW, sigma_B, conditions()))
        return _Recording(places, output, replay)
