"""`auto` as the dtype of a network: that of its stored weights, where the device supports it."""

import sys
import warnings

import torch

from megadit.infer.runtimes.options import AUTO
from megadit.infer.runtimes.torch import find_device, find_dtype
from megadit.models.bundle import Bundle
from megadit.models.machine import auto_dtype, cost_in_words
from megadit.models.storage.components import TENSOR_FILE
from megadit.models.storage.tensor_source import open_safetensors


def chosen_dtype(name: str, bundle: Bundle, device: torch.device | str, runtime: str = "torch") -> str:
    """Resolve `auto` to a dtype for a bundle's network on a device; other names are returned as they are.

    An exported network has its own precision; its inputs are float32.

    Raises:
        UserError: for an unknown dtype or device.
    """
    if name != AUTO:
        find_dtype(name)
        return name
    if runtime != "torch":
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


def print_dtype(name: str, bundle: Bundle, device: torch.device | str, runtime: str = "torch") -> str:
    """Return `chosen_dtype`, and print to stderr what `auto` has chosen."""
    chosen, stored = chosen_dtype(name, bundle, device, runtime), str(stored_dtype(bundle)).removeprefix("torch.")
    if name == AUTO and runtime == "torch" and stored != "float32":
        where = "as its weights are stored" if chosen == stored else f"its weights are stored in {stored}"
        print(f"{bundle.path}: computes in {chosen}; {where} (--dtype chooses)", file=sys.stderr)
    return chosen
