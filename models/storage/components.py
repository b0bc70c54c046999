"""Saved components (tokenizer, text encoder, network): a directory with config.json and model.safetensors, where the
tensors of a network have the names of plain torch layers."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.networks.registry import SavedNetwork, build_without_memory
from megadit.models.shared.errors import UserError, choose_one, did_you_mean
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.storage.tensor_source import TensorSource, from_state_dict, open_safetensors, write_safetensors

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
NETWORKS: dict[str, type[DiTConfig] | type[UNetConfig]] = {"dit": DiTConfig, "unet": UNetConfig}
"""Type of a saved network -> the class of its configuration."""
_MAX_LISTED = 8


def write_component(directory: str | os.PathLike, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and, where there are tensors, model.safetensors."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        with atomic_path(directory / TENSOR_FILE) as path:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    write_json(directory / CONFIG_FILE, dict(config))


def component_folder(directory: str | os.PathLike, part: str) -> Path:
    """Find the folder of a component (tokenizer, text_encoder): `directory` itself, or a folder of a bundle.

    Raises:
        UserError: if it is neither.
    """
    for folder in (Path(directory), Path(directory) / part):
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise UserError(
        f"{Path(directory) / CONFIG_FILE} does not exist: give the folder of a {part.replace('_', ' ')}, or a bundle"
    )


def component_type(directory: str | os.PathLike, kind: str, known: Collection[str]) -> str:
    """The `type` in config.json.

    Raises:
        UserError: if it is not one of `known`.
    """
    path = Path(directory) / CONFIG_FILE
    config = read_json(path)
    name = config.get("type") if isinstance(config, dict) else None
    if name not in known:
        raise UserError(f"{path}: unknown {kind} type {name!r}; this version knows {', '.join(sorted(known))}")
    return name


def read_settings(directory: str | os.PathLike, names: Collection[str]) -> dict[str, Any]:
    """The settings in config.json, which must be exactly `names` (and `type`).

    Raises:
        UserError: for a setting that is missing or unknown.
    """
    path = Path(directory) / CONFIG_FILE
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is {config!r:.60}, not names and values")
    settings = {name: value for name, value in config.items() if name != "type"}
    for name in sorted(settings.keys() - set(names)):
        hint = did_you_mean(name, names, "was it written by a newer version?")
        raise UserError(f"{path}: unknown setting {name!r}{hint}")
    for name in sorted(set(names) - settings.keys()):
        raise UserError(f"{path}: the setting {name!r} is missing")
    return settings


def read_tensors(directory: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of model.safetensors, on the CPU.

    Raises:
        UserError: if the file is missing or broken.
    """
    return open_safetensors(Path(directory) / TENSOR_FILE).state_dict()


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of 16 hexadecimal digits, equal exactly if configuration and tensors are equal."""
    digest = hashlib.blake2b(json.dumps(dict(config), sort_keys=True).encode(), digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


# --- networks -----------------------------------------------------------------------------------------------------


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
    write_component(directory, config_to_dict(config), {})
    write_safetensors(Path(directory) / TENSOR_FILE, source, dtype)


def load_config(directory: str | os.PathLike) -> NetworkConfig:
    """The configuration next to the weights.

    Raises:
        UserError: if it is missing, or not that of a network of this version.
    """
    component_type(directory, "network", NETWORKS)
    return config_from_dict(read_json(Path(directory) / CONFIG_FILE))


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
    config, source = load_config(directory), open_safetensors(Path(directory) / TENSOR_FILE)
    check_shapes(source.shapes, network_shapes(config), f"the tensors of {source.label}")
    tensors = {name: source.read(name).to(device, dtype) for name in source.stored}
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
