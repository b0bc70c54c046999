"""Metadata of an adapter: settings and scale, and the network and weights it belongs to.

| place                                         | content                                         |
|-----------------------------------------------|-------------------------------------------------|
| `adapter_config.json`                         | PEFT's settings of the tensors in its folder    |
| `lora_adapter_metadata` of the file's header  | the same, as diffusers writes them              |
| one of `HEADER_ALPHAS` of the file's header   | alpha alone (LightX2V)                          |
| `megadit.json`, or `megadit` of the header    | network, weights and training, which we write   |

The metadata is found for a path of the folder or of the file.
"""

import math
from pathlib import Path
from typing import Any

from megadit.models.convert.adapters.settings import LoraSettings
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE, check_files, read_json
from megadit.models.storage.tensor_source import TensorSource

SETTINGS_FILE = "adapter_config.json"
FOLDER_TENSORS = "adapter_model.safetensors"
PIPELINE_TENSORS = "pytorch_lora_weights.safetensors"
"""File name of an adapter in its own folder, as diffusers writes it."""
HEADER_SETTINGS, HEADER_ORIGIN = "lora_adapter_metadata", "megadit"
HEADER_ALPHAS = ("lora_alpha", "network_alpha", "alpha")
"""Header keys with an alpha of all linears; the first one present is used. Not `ss_network_alpha`: kohya's scripts and
musubi write it beside alphas of each linear, and keep it where they convert these into the factors."""
ORIGIN_KEYS = ("base", "training", "defaults")
FORMAT_VERSION = 1
MOST_BYTES = 1 << 19
"""Maximum bytes of settings in a header, which a service reads with every request: enough for some 5,000 linears."""


def settings_of(file: Path, source: TensorSource) -> LoraSettings:
    """Read the ranks and alphas that belong to the tensors in `file`, as the program that wrote it reads them.

    Raises:
        UserError: for unsupported settings that would change what is computed.
    """
    settings_file = _settings_of(file)
    header = _of_header(source, HEADER_SETTINGS)
    if header and (settings_file is None or file.name != FOLDER_TENSORS):
        plain = {key.removeprefix("transformer.").removeprefix("unet."): value for key, value in header.items()}
        return LoraSettings.from_dict(plain, file, f"{HEADER_SETTINGS} of its header")
    if settings_file is not None:
        return LoraSettings.from_dict(_object(read_json(settings_file), str(settings_file)), file, SETTINGS_FILE)
    for name in HEADER_ALPHAS:
        if source.metadata.get(name, "None") not in ("None", "null", ""):
            return LoraSettings(alpha=_alpha(file, name, source.metadata[name]), said_by=f"{name} of its header")
    return LoraSettings()


def _settings_of(file: Path) -> Path | None:
    """PEFT's settings of the tensors in `file`, in its folder; None if they belong to another file there."""
    settings_file = file.with_name(SETTINGS_FILE)
    of_another = any(file.with_name(name).is_file() for name in (FOLDER_TENSORS, PIPELINE_TENSORS))
    is_its_own = file.name in (FOLDER_TENSORS, PIPELINE_TENSORS) or not of_another
    return settings_file if is_its_own and settings_file.is_file() else None


def _alpha(file: Path, name: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 <= alpha < math.inf:
        raise UserError(f"{file} has {name}={text!r:.60} in its header, which must be a number of at least 0")
    return alpha


def origin_of(file: Path, source: TensorSource) -> dict[str, Any]:
    """Read the metadata that only this package writes: network, weights and training.

    Raises:
        UserError: if its form is unknown, or files of our folder are missing or have another size.
    """
    origin = _of_header(source, HEADER_ORIGIN)
    if (manifest := _manifest_of(file)) is not None:
        check_files(file.parent, manifest)
        origin = manifest
    version, parts = origin.get("format_version", 0), [origin.get(name) or {} for name in ORIGIN_KEYS]
    if not isinstance(version, int) or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{file} does not say in a known form which network it belongs to")
    if version > FORMAT_VERSION:
        raise UserError(f"{file} was written by a newer version of megadit: upgrade")
    return origin


def _manifest_of(file: Path) -> dict[str, Any] | None:
    """`megadit.json` next to a file, if it is that of an adapter's folder, not of a bundle that contains the file."""
    if file.name not in (FOLDER_TENSORS, PIPELINE_TENSORS) or not file.with_name(MANIFEST_FILE).is_file():
        return None
    return read_manifest(file.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """`megadit.json` of an adapter's folder.

    Raises:
        UserError: if it is missing, or not an adapter's.
    """
    manifest = read_json(folder / MANIFEST_FILE)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{folder / MANIFEST_FILE} does not belong to an adapter")
    return manifest


def _of_header(source: TensorSource, name: str) -> dict[str, Any]:
    """The JSON object under a key of a file's header; {} without that key."""
    where = f"{name} in the header of {source.label}"
    return _object(parse_json(source.metadata.get(name, "{}"), where, max_bytes=MOST_BYTES), where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value
