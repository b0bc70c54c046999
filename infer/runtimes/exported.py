"""Denoiser, tokenizer and text encoder with exported networks, for ONNX Runtime and TensorRT.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, L text tokens, E text feature width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.runtimes.network_spec import DENOISERS, INPUTS, Axis, Shape
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.host_to_device import levels_on
from megadit.models.lora.adapters import check_state
from megadit.models.lora.inputs import AdapterInputs, Packed
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.text_encoders import NetworkTextEncoder, TextEncoder
from megadit.models.tokenizers import VideoTokenizer

Run = Callable[[Mapping[str, Tensor], Shape], Tensor]
"""(inputs by name, shape of the output) -> the output, float32, on the runtime's device."""


class Networks(Protocol):
    """The networks of an export by name, each loaded at first use."""

    device: torch.device

    def __getitem__(self, name: str) -> Run: ...


class ExportedDenoiser:
    """D(x; sigma) computed by an exported network; called like `TorchDenoiser`."""

    dtype = torch.float32
    """Dtype of its inputs and outputs."""

    def __init__(self, networks: Networks, slots: AdapterInputs | None = None, name: str = DENOISERS[0]) -> None:
        """`slots` are its adapter inputs, if any; `name` is the name of its network."""
        self.device = networks.device
        self._network = networks[name]
        self._inputs = slots
        self.adapters: dict[str, Packed] = {}
        """Packed adapters by name."""
        self._filled: WeakKeyDictionary[Conditioning, dict[str, Tensor]] = WeakKeyDictionary()

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        inputs = denoiser_inputs(x_BCTHW, sigma_B, conditioning) | self._adapter_inputs_of(conditioning)
        return self._network(inputs, tuple(inputs["x"].shape))[:, :, : x_BCTHW.shape[2]]

    def load_adapter(self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig) -> None:
        """Stores an adapter, which becomes an input of calls whose conditions name it.

        Raises:
            UserError: if it does not fit the network, or its adapter inputs.
        """
        check_state(state, adapter, self._inputs.config)
        self.adapters[name] = self._inputs.packed(state, adapter)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter."""
        del self.adapters[name]

    def _adapter_inputs_of(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """The adapter inputs, built once for all noise levels of a batch; {} if the network has none."""
        if self._inputs is None:
            return {}
        if conditioning not in self._filled:
            scales = conditioning.adapter_scale_B.items()
            used = [
                (self.adapters[name], scale_B) for name, scale_B in scales if name in self.adapters
            ]  # this expert's
            self._filled[conditioning] = self._inputs.filled(len(conditioning), used, self.device)
        return self._filled[conditioning]


def denoiser_inputs(x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
    """Inputs of an exported denoiser by name; the masks in `CONDITIONING_INPUTS` are 0 without conditioning.

    Extra conditioning frames come after those of the video, as zeros in `x`.
    """
    c, frames = conditioning, x_BCTHW.shape[2]
    clean = c.clean or CleanLatents.nothing(x_BCTHW)
    is_clean = clean.is_clean_THW if clean.marks_MTHW is None else clean.marks_MTHW
    inputs = {
        "x": F.pad(x_BCTHW, (0, 0, 0, 0, 0, len(clean.extra_times))),
        "sigma": levels_on(sigma_B.float(), x_BCTHW.device),
        "text": c.text_BLE,
        "text_length": c.text_length_B,
        "fps": c.fps_B,
        "guidance": c.guidance_B,
        "pooled": c.pooled_BP,
        "clean": clean.latents_BCTHW,
        "is_clean": is_clean.long(),
        "times": torch.tensor([*map(float, range(frames)), *clean.extra_times]),
        "image": c.image_BIE,
    }
    return {name: value for name, value in inputs.items() if value is not None}


class ExportedTokenizer:
    """A tokenizer with exported networks; sizes and statistics are those of `tokenizer`.

    It computes whole videos, up to the exported size, without tiles.
    """

    def __init__(self, networks: Networks, tokenizer: VideoTokenizer, axes: Mapping[str, Axis]) -> None:
        """`axes` are the dynamic axes of its encoder."""
        self._networks, self._tokenizer, self._axes = networks, tokenizer, axes

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def nearest_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """The nearest size of a video that the networks were exported for."""
        sizes = zip(("frames", "video_height", "video_width"), (frames, height, width), strict=True)
        return tuple(self._axes[name].nearest(size) for name, size in sizes)

    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents BCTHW of a video in -1..1."""
        shape = self._tokenizer.latent_shape(*video_BCTHW.shape[2:])
        return self._run("video_encoder", video_BCTHW, (len(video_BCTHW), *shape))

    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """The video, in -1..1, of latents BCTHW."""
        batch, _, *size = latents_BCTHW.shape
        return self._run("video_decoder", latents_BCTHW, (batch, 3, *video_size(self, *size)))

    def _run(self, name: str, value: Tensor, output_shape: Shape) -> Tensor:
        (input_name,) = INPUTS[name]
        return self._networks[name]({input_name: value}, output_shape)


def video_size(tokenizer: VideoTokenizer, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Frames, height and width of the video that latents of this size decode to."""
    temporal, spatial = tokenizer.temporal_compression, tokenizer.spatial_compression
    return 1 + (frames - 1) * temporal, height * spatial, width * spatial


def with_exported_network(
    text_encoder: NetworkTextEncoder, load: Callable[[], Networks], device: torch.device
) -> TextEncoder:
    """`text_encoder` with its network from `load()`, which is called when a text is first encoded."""
    loaded = cache(load)

    def run(inputs: Sequence[Tensor], shape: Shape) -> Tensor:
        named = dict(zip(INPUTS["text_encoder"], inputs, strict=False))
        return loaded()["text_encoder"](named, shape)

    return text_encoder.with_graph(run, device)
