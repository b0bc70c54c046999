"""How the networks of a bundle run: options of `TextToVideo.from_pretrained`, of `megadit generate`, and of ranks."""

import sys
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from megadit.infer.runtimes.torch import find_device, find_dtype
from megadit.models.bundle import Bundle
from megadit.models.machine import auto_dtype, cost_in_words
from megadit.models.shared.cli.setting import setting
from megadit.models.storage.components import TENSOR_FILE
from megadit.models.storage.tensor_source import open_safetensors

TORCH = "torch"
AUTO = "auto"
"""The default dtype: that of the stored weights, where the device supports it (`chosen_dtype`)."""
Measure = Literal["latents", "lpips"]
"""Error that a budget bounds: the relative L2 error of the latents, or LPIPS of the frames (`lpips.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """How a bundle's networks run; the parameterization is always computed in float32, the sampler's state in float64.

    Runtimes except torch have networks of `megadit export`. Under torchrun, ranks that share a video's network or
    passes generate the same prompts.
    """

    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: auto)", metavar="NAME")
    dtype: str | None = setting(
        None,
        "dtype of the network: float32, bfloat16, float16, or auto (default): as stored, where the device "
        "supports that",
        metavar="NAME",
    )
    runtime: str | None = setting(
        None,
        "torch; onnx, onnx_tensorrt, openvino or tensorrt for a bundle of `megadit export` (default: torch)",
        metavar="NAME",
    )
    batch_guidance: bool = setting(
        True,
        "run the conditional and unconditional pass in turn, not as one batch: less memory",
        names=("--sequential_guidance",),
    )
    offload_text_encoder: bool = setting(False, "free the text encoder's memory while sampling")
    compile: bool = setting(False, "compile the network (torch.compile) for any sizes")
    cuda_graphs: bool = setting(False, "record the network's kernels as a CUDA graph, once for each size (GPU)")
    resident_blocks: int | None = setting(
        None,
        "block offloading: keep this many blocks of the network and one more on the device, and copy each other one "
        "in before use: much less memory, slower (default: keep all)",
        above=0,
    )
    overlap_decoding: bool = setting(False, "decode a batch while the next one is sampled")
    cache_measure: Measure = setting(
        "latents",
        "error that --cache_budget bounds: latents, the relative error of the latents (default), or lpips, the "
        "LPIPS distance of the frames",
    )
    guardrail_dir: str | None = setting(
        "", "directory with guardrail.py, a content filter for prompts and videos", metavar="PATH"
    )
    tensor_parallel: int = setting(
        1, "processes that share the network's matrices (tensor parallelism)", names=("--tp_size",)
    )
    context_parallel: int = setting(
        1, "processes that share the tokens of a video (context parallelism)", names=("--cp_size",)
    )

    @property
    def num_ranks(self) -> int:
        """Processes that share a network."""
        return self.tensor_parallel * self.context_parallel

    @property
    def name(self) -> str:
        """The runtime, torch by default."""
        return self.runtime or TORCH

    @property
    def is_torch(self) -> bool:
        return self.name == TORCH


# --- `auto` as the dtype of a network: that of its stored weights, where the device supports it -----------------------


def chosen_dtype(name: str, bundle: Bundle, device: torch.device | str, runtime: str = TORCH) -> str:
    """Resolve `auto` to a dtype for a bundle's network on a device; other names are returned as they are.

    An exported network has its own precision; its inputs are float32.

    Raises:
        UserError: for an unknown dtype or device.
    """
    if name != AUTO:
        find_dtype(name)
        return name
    if runtime != TORCH:
        return "float32"
    dtype = auto_dtype(find_device(str(device)), stored_dtype(bundle))
    return str(dtype).removeprefix("torch.")


def warn_of_cost(device: torch.device, dtype: torch.dtype) -> None:
    """Warn of a dtype that `device` emulates, with what was measured."""
    if (cost := cost_in_words(device, dtype)) is not None:
        warnings.warn(f"{cost}, which is more exact, too", stacklevel=3)


def stored_dtype(bundle: Bundle) -> torch.dtype:
    """Dtype of most numbers of a bundle's network."""
    counts: dict[torch.dtype, int] = {}
    for tensor in open_safetensors(bundle.path / bundle.networks[0] / TENSOR_FILE).stored.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    return max(counts, key=counts.get)


def print_dtype(name: str, bundle: Bundle, device: torch.device | str, runtime: str = TORCH) -> str:
    """Return `chosen_dtype`, and print to stderr what `auto` has chosen."""
    chosen, stored = chosen_dtype(name, bundle, device, runtime), str(stored_dtype(bundle)).removeprefix("torch.")
    if name == AUTO and runtime == TORCH and stored != "float32":
        where = "as its weights are stored" if chosen == stored else f"its weights are stored in {stored}"
        print(f"{bundle.path}: computes in {chosen}; {where} (--dtype chooses)", file=sys.stderr)
    return chosen
