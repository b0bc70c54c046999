"""Saved networks: config.json and model.safetensors, with the tensor names of plain torch layers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.networks.registry import SavedNetwork, build_without_memory
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_json
from megadit.models.storage import components as parts
from megadit.models.storage.tensor_source import TensorSource, from_state_dict, write_safetensors

_MAX_LISTED = 8
NETWORKS: dict[str, type[DiTConfig] | type[UNetConfig]] = {"dit": DiTConfig, "unet": UNetConfig}
"""Type of a saved network -> the class of its configuration."""


def save_network(
    directory: str | os.PathLike,
    config: NetworkConfig,
    state_dict: Mapping[str, Tensor] | TensorSource,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the weights of the network, converted to `dtype` if one is given, one tensor at a time.

    Raises:
        UserError: if `state_dict` has other tensors than that model.
    """
    source = state_dict if isinstance(state_dict, TensorSource) else from_state_dict(state_dict)
    check_shapes(source.shapes, network_shapes(config), "the tensors to save")
    parts.write_component(directory, config_to_dict(config), {})
    write_safetensors(Path(directory) / parts.TENSOR_FILE, source, dtype)


def load_config(directory: str | os.PathLike) -> NetworkConfig:
    """The configuration next to the weights.

    Raises:
        UserError: if it is missing, or not that of a network of this version.
    """
    parts.component_type(directory, "network", NETWORKS)
    return config_from_dict(read_json(Path(directory) / parts.CONFIG_FILE))


def config_to_dict(config: NetworkConfig) -> dict[str, Any]:
    """A configuration and the type of its network, as JSON values."""
    return {"type": _type_of(config), **config.to_dict()}


def config_from_dict(values: Mapping[str, Any]) -> NetworkConfig:
    """The inverse of `config_to_dict`; without a type, the network is a DiT.

    Raises:
        UserError: for a type, or a key, that this version does not know.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"model settings {values!r:.60} are not names and values")
    name = str(values.get("type", "dit"))
    choose_one(name, NETWORKS, f"network type {name!r:.60} is unknown")
    return NETWORKS[name].from_dict({key: value for key, value in values.items() if key != "type"})


def load_network(
    directory: str | os.PathLike, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> SavedNetwork:
    """The network saved in `directory`, in evaluation mode; with `dtype` None in the precision of the file.

    The model is built on the meta device and takes over one tensor at a time, so that memory holds it once.

    Raises:
        UserError: if a file is missing or broken, or its tensors do not fit config.json.
    """
    config = load_config(directory)
    path = Path(directory) / parts.TENSOR_FILE
    parts.check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            check_shapes(found, network_shapes(config), f"the tensors of {path}")
            tensors = {name: file.get_tensor(name).to(device, dtype) for name in found}
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None
    model = build_without_memory(config)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def network_shapes(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the network."""
    return {name: tuple(tensor.shape) for name, tensor in build_without_memory(config).state_dict().items()}


def _type_of(config: NetworkConfig) -> str:
    return next(name for name, kind in NETWORKS.items() if isinstance(config, kind))


def check_shapes(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: str) -> None:
    common = found.keys() & expected.keys()
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "misshapen": sorted(
            f"{name} {list(found[name])}, not {list(expected[name])}"
            for name in common
            if found[name] != expected[name]
        ),
    }
    if any(problems.values()):
        raise UserError(f"{where} do not fit config.json; {listed(problems)}")


def listed(problems: Mapping[str, Sequence[str]]) -> str:
    """The names of wrong tensors by kind of problem, shortened: "missing: a, b; misshapen: c"."""
    return "; ".join(f"{kind}: {_shorten(names)}" for kind, names in problems.items() if names)


def _shorten(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
