"""Saved components (tokenizer, text encoder, network): a directory with config.json and model.safetensors."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.models.shared.documents import check_tensor_header
from megadit.models.shared.errors import UserError, did_you_mean
from megadit.models.shared.files import atomic_path, read_json, write_json

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"


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
    path = Path(directory) / TENSOR_FILE
    check_header(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None


def check_header(path: Path) -> None:
    """Raises UserError for a safetensors file that is missing, or whose header is implausibly long."""
    try:
        with open(path, "rb") as file:
            check_tensor_header(file.read(8), str(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of 16 hexadecimal digits, equal exactly if configuration and tensors are equal."""
    digest = hashlib.blake2b(json.dumps(dict(config), sort_keys=True).encode(), digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
