"""Metadata of an adapter: settings and scale, and the network and weights it belongs to.

| place                                         | content                                         |
|-----------------------------------------------|-------------------------------------------------|
| `adapter_config.json`                         | PEFT's settings, of the tensors in its folder   |
| `lora_adapter_metadata` of the file's header  | the same, as diffusers writes them              |
| one of `HEADER_ALPHAS` of the file's header   | alpha alone (kohya's scripts, LightX2V)         |
| `megadit.json`, or `megadit` of the header    | network, weights and training, which we write   |

It is found in the same way whether the folder or the file itself is named.
"""

import math
from pathlib import Path
from typing import Any

from megadit.models.convert.adapters.settings import LoraSettings
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.models.storage.manifest import MANIFEST_FILE, check_files
from megadit.models.storage.tensor_source import TensorSource

SETTINGS_FILE = "adapter_config.json"
FOLDER_TENSORS = "adapter_model.safetensors"
PIPELINE_TENSORS = "pytorch_lora_weights.safetensors"
"""diffusers' file name of an adapter in its own folder."""
HEADER_SETTINGS, HEADER_ORIGIN = "lora_adapter_metadata", "megadit"
HEADER_ALPHAS = ("lora_alpha", "network_alpha", "ss_network_alpha", "alpha")
"""Names under which headers say an alpha of all linears, the first that is there."""
ORIGIN_KEYS = ("base", "training", "defaults")
FORMAT_VERSION = 1
MOST_BYTES = 1 << 19
"""Most bytes of settings in a header, which a service reads with every request: some 5,000 linears by their names."""


def settings_of(file: Path, source: TensorSource) -> LoraSettings:
    """Read the ranks and alphas that accompany the tensors in `file`, as the program that wrote it reads them.

    Raises:
        UserError: for settings that would change what is computed in a way that is not known.
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
    """PEFT's settings of the tensors in `file`: those in its folder, unless another file there is what they are of."""
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
        UserError: if it is in no known form, or files in a folder of ours are missing or have another size.
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
    """`megadit.json` beside a file, if it is of the folder of an adapter, not of a bundle that the file lies in."""
    if file.name not in (FOLDER_TENSORS, PIPELINE_TENSORS) or not file.with_name(MANIFEST_FILE).is_file():
        return None
    return read_manifest(file.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """`megadit.json` of an adapter's folder.

    Raises:
        UserError: if it is missing, or something else.
    """
    manifest = read_json(folder / MANIFEST_FILE)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{folder / MANIFEST_FILE} is not that of an adapter")
    return manifest


def _of_header(source: TensorSource, name: str) -> dict[str, Any]:
    """The JSON object under a name in a file's header, which may have none."""
    where = f"{name} in the header of {source.label}"
    return _object(parse_json(source.metadata.get(name, "{}"), where, max_bytes=MOST_BYTES), where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value
