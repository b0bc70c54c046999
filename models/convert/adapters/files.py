"""Adapter files: PEFT's folders, and safetensors files with diffusers' or ComfyUI's keys; kohya's are read alone.

adapter_config.json          in a folder: rank, alpha and linears, as PEFT's settings
adapter_model.safetensors    the tensors, float32
megadit.json                 network and base weights, training, name, checksums

A single file that we write has the same in its header, under `lora_adapter_metadata` (as diffusers) and `megadit`.
Linears have diffusers' names, where it has such a network. No code from a file is executed: only safetensors are read.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megadit.models.bundle import Bundle, check_single
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert.adapters.adapter import DIFFERENCE, DOWN, MAGNITUDE, Adapter, Change
from megadit.models.convert.adapters.names import (
    NamedRows,
    diffusers_linears,
    named_linears,
    original_linears,
    our_linears,
    regroup,
    split_key,
)
from megadit.models.convert.adapters.origin import (
    FOLDER_TENSORS,
    FORMAT_VERSION,
    HEADER_ORIGIN,
    HEADER_SETTINGS,
    ORIGIN_KEYS,
    PIPELINE_TENSORS,
    SETTINGS_FILE,
    origin_of,
    read_manifest,
    settings_of,
)
from megadit.models.convert.adapters.settings import LoraSettings, lora_config
from megadit.models.convert.adapters.tensors import keys_of_linears, kind_of, problems_of, read_change
from megadit.models.convert.written import diffusers_folder
from megadit.models.lora.adapters import fingerprint, targets_of
from megadit.models.lora.named import EXPERTS, split_expert
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, check_files, write_json, write_manifest
from megadit.models.storage.components import TENSOR_FILE, config_from_dict, config_to_dict, listed
from megadit.models.storage.tensor_source import TensorSource, from_state_dict, open_safetensors, write_safetensors

MOST_SCALES = 3
"""Maximum number of scales in the report of a file."""


def is_adapter(path: Path) -> bool:
    """Whether `path` is an adapter: its folder or its file."""
    if path.is_dir():
        return any((path / name).is_file() for name in (SETTINGS_FILE, PIPELINE_TENSORS))
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return any(split_key(key) for key in open_safetensors(path).stored)


def check_adapter(path: Path) -> None:
    """Raises UserError if a file of an adapter's folder is missing or changed, or another program wrote the folder."""
    check_files(path, read_manifest(path), verify=True)


def bundle_fingerprint(bundle: Bundle, network: str | None = None) -> str:
    """`fingerprint` of the weights of a bundle's network; with two experts, of the one in the folder `network`.

    Raises:
        UserError: if there are two experts, and `network` is None.
    """
    if network is None:
        check_single(bundle)
    source = open_safetensors(bundle.path / (network or bundle.networks[0]) / TENSOR_FILE)
    return fingerprint(source.stored, source.read)


# --------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedAdapter:
    """An adapter whose tensors have not been read yet."""

    source: TensorSource
    settings: LoraSettings
    config: NetworkConfig | None
    """Configuration of its base network; None: the file does not say."""
    base: str | None
    training: Mapping[str, Any]
    defaults: Mapping[str, Any]


def open_adapter(path: str | Path) -> OpenedAdapter:
    """Open the adapter at `path`, a folder or a file, without reading its tensors' values.

    Raises:
        UserError: if it is no adapter, or has unsupported settings.
    """
    path = Path(path)
    file = tensor_file(path)
    source = open_safetensors(file)
    origin = origin_of(file, source)
    base, training, defaults = (origin.get(name) or {} for name in ORIGIN_KEYS)
    return OpenedAdapter(
        source=source,
        settings=settings_of(file, source),
        config=config_from_dict(base["config"]) if base.get("config") else None,
        base=base.get("fingerprint"),
        training=training,
        defaults=defaults,
    )


def read_adapter(path: str | Path, config: NetworkConfig | None = None) -> Adapter:
    """The adapter at `path`, for a network of this configuration (None: the one in its metadata).

    Raises:
        UserError: as `open_adapter`; if it belongs to another family, or does not fit (with names and shapes); for
            numbers that are not finite.
    """
    opened = open_adapter(path)
    config = opened.config if config is None else config
    if config is None:
        raise UserError(f"{path} does not say which network it belongs to: name a bundle of it with --base BUNDLE")
    if opened.config is not None and opened.config.family != config.family:
        raise UserError(f"{path} was trained on a network of family {opened.config.family}, not {config.family}")
    source, settings, linears = opened.source, opened.settings, named_linears(config)
    keys, unused = keys_of_linears(source, linears, config)
    problems = problems_of(source, keys, unused, linears, settings)
    if any(problems.values()):
        raise UserError(f"the adapter {path} does not fit the network{kind_of(source)}; {listed(problems)}")
    read = {name: read_change(source, name, of, settings) for name, of in keys.items()}
    changes = {name: change for name, (change, _) in read.items()}
    return Adapter(
        config=config,
        kind="dora" if any(MAGNITUDE in of for of in keys.values()) else "lora",
        changes=regroup(changes, [linears[name] for name in keys], our_linears(config)),
        base=opened.base,
        training=opened.training,
        defaults=opened.defaults,
        reading=_reading(source, unused, [scale for _, scale in read.values()]),
    )


def _reading(source: TensorSource, unused: Sequence[str], scales: Sequence[str]) -> str:
    counts = Counter(scales).most_common()
    shown = [scale if len(counts) == 1 else f"{count} linears {scale}" for scale, count in counts[:MOST_SCALES]]
    rest = f" and {len(counts) - MOST_SCALES} more scales" if len(counts) > MOST_SCALES else ""
    left = f"; {listed({'not used': unused})}" if unused else ""
    total = len(source.stored)
    return f"{total - len(unused)} of {total} tensors are used, {', '.join(shown)}{rest}{left}"


def read_adapter_of(path: str | Path, bundle: Bundle) -> Adapter:
    """The adapter at `path`, for a bundle's networks; `high=PATH` or `low=PATH` is for one of two experts.

    Raises:
        UserError: as `read_adapter`; if it was trained with other base weights than those of the bundle's network; for
            an expert of a bundle with a single network.
    """
    networks = networks_of(path, bundle)
    expert, path = split_expert(str(path))
    adapter = read_adapter(path, bundle.config)
    if adapter.base is None:
        return adapter
    found = {network: bundle_fingerprint(bundle, network) for network in networks}
    if others := [of for of in found.values() if of != adapter.base]:
        fitting = [name for name, network in EXPERTS.items() if found.get(network) == adapter.base]
        hint = f"megadit convert {path} OUT --base {bundle.path}"
        if expert is None and fitting:
            raise UserError(f"{path} was trained with one of the experts of {bundle.path}: write {fitting[0]}={path}")
        raise UserError(
            f"{path} was trained with other weights ({adapter.base}) than those of {bundle.path} ({others[0]}); to use "
            f"it with these: {hint}"
        )
    return adapter


def networks_of(path: str | Path, bundle: Bundle) -> tuple[str, ...]:
    """The folders of the networks that the adapter at `path` is for; `path` may name an expert.

    Raises:
        UserError: if `path` names an expert of a bundle with a single network.
    """
    expert, _ = split_expert(str(path))
    if expert is None:
        return bundle.networks
    if bundle.boundary is None:
        raise UserError(f"{path}: {bundle.path} has one network, for all noise levels: leave {expert}= out")
    return (EXPERTS[expert],)


def adapter_size(path: str | Path) -> tuple[int, int]:
    """The highest rank of the adapter at `path`, and its number of elements, from its header.

    Raises:
        UserError: if it is no adapter.
    """
    shapes = open_safetensors(tensor_file(Path(path))).shapes
    kinds = {key: (split_key(key) or ("", ""))[1] for key, shape in shapes.items() if shape}
    ranks = [shapes[key][0] for key, kind in kinds.items() if kind == DOWN]
    ranks += [min(shapes[key]) for key, kind in kinds.items() if kind == DIFFERENCE and len(shapes[key]) > 1]
    return max(ranks, default=0), sum(map(math.prod, shapes.values()))


def tensor_file(path: Path) -> Path:
    """The file with the tensors of the adapter at `path`.

    Raises:
        UserError: if there is none, or it is no safetensors file.
    """
    if path.is_dir():
        for name in (FOLDER_TENSORS, PIPELINE_TENSORS):
            if (path / name).is_file():
                return path / name
        raise UserError(
            f"{path} holds no adapter: expected {SETTINGS_FILE} and {FOLDER_TENSORS}, or {PIPELINE_TENSORS}; other "
            "files than safetensors are not read"
        )
    if not path.exists():
        raise UserError(f"the adapter {path} does not exist; give PATH or PATH:SCALE, such as zog:0.8")
    if path.suffix != ".safetensors":
        raise UserError(f"{path} is not an adapter: expected a folder, or a file that ends in .safetensors")
    return path


# --------------------------------------------------------------------------------------------------------- writing


def write_adapter(
    out: str | Path, adapter: Adapter, dtype: torch.dtype | None = None, *, is_original: bool = False
) -> None:
    """Writes an adapter, whole or not at all: one file if `out` ends in .safetensors, else a folder in PEFT's form.

    `dtype` converts its tensors, which are float32. An adapter at `out` is replaced. A file that `is_original` has the
    names of the publication, as ComfyUI reads them; others have diffusers'.

    Raises:
        UserError: if `out` is something else, or if diffusers (the publication) has no counterpart of a linear that the
            adapter changes.
    """
    out = Path(out)
    if is_original and out.suffix != ".safetensors":
        raise UserError(f"--to original writes an adapter as one file: give {out} the ending .safetensors")
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not is_adapter(out):
        raise UserError(f"{out} holds something else, and would be replaced; choose another name")
    linears = original_linears(adapter.config) if is_original else diffusers_linears(adapter.config)
    changes = regroup(adapter.changes, our_linears(adapter.config), linears)
    _check_places(adapter, changes, linears, "the publication" if is_original else "diffusers")
    sides = {linear.name: linear.sides for linear in linears}
    if is_original:
        header = {"format": "pt", HEADER_ORIGIN: json.dumps(_origin_of(adapter), sort_keys=True)}
        write_safetensors(out, _named_as_in_comfy(changes, sides), dtype, header)
        return
    origin, base_model = _origin_of(adapter), adapter.training.get("base_model")
    settings = lora_config(changes, is_dora=adapter.kind == "dora", base_model=base_model)
    if out.suffix == ".safetensors":
        header = {"format": "pt", HEADER_ORIGIN: json.dumps(origin, sort_keys=True)}
        prefix = f"{diffusers_folder(adapter.config, 'transformer')}."
        header[HEADER_SETTINGS] = json.dumps(
            {f"{prefix}{name}": value for name, value in settings.items()}, indent=2, sort_keys=True
        )
        write_safetensors(out, _named(changes, sides, prefix), dtype, header)
        return
    with atomic_directory(out) as directory:
        write_safetensors(
            directory / FOLDER_TENSORS, _named(changes, sides, "base_model.model."), dtype, {"format": "pt"}
        )
        write_json(directory / SETTINGS_FILE, settings)
        write_manifest(directory, origin)


def _check_places(adapter: Adapter, changes: Mapping[str, Change], linears: Sequence[NamedRows], whose: str) -> None:
    targets, theirs = targets_of(adapter.config), {linear.name: linear for linear in linears}
    written = {theirs[name].linear for name in changes}
    lost = [name for name in adapter.changes if targets[name].linear not in written]
    if lost:
        raise UserError(f"{whose} has no counterpart of {', '.join(lost)}: train without it")


Sides = Mapping[str, tuple[int, ...]]
"""Name of a linear -> `NamedRows.sides`, which its factors have too."""


def _named(changes: Mapping[str, Change], sides: Sides, prefix: str) -> TensorSource:
    tensors = {}
    for name, change in changes.items():
        of = sides[name]
        tensors[f"{prefix}{name}.lora_A.weight"] = change.down_RI.reshape(*change.down_RI.shape, *of)
        tensors[f"{prefix}{name}.lora_B.weight"] = change.up_OR.reshape(*change.up_OR.shape, *of)
        if change.magnitude_O is not None:
            shape = (1, -1, *of) if of else (-1,)
            tensors[f"{prefix}{name}.lora_magnitude_vector"] = change.magnitude_O.reshape(shape)
        if change.bias_O is not None:
            tensors[f"{prefix}{name}.lora_B.bias"] = change.bias_O * (change.rank / change.alpha)  # PEFT scales it too
    return from_state_dict(dict(sorted(tensors.items())))


def _named_as_in_comfy(changes: Mapping[str, Change], sides: Sides) -> TensorSource:
    tensors = {}
    for name, change in changes.items():
        prefix, of = f"diffusion_model.{name}", sides[name]
        tensors[f"{prefix}.lora_A.weight"] = change.down_RI.reshape(*change.down_RI.shape, *of)
        tensors[f"{prefix}.lora_B.weight"] = change.up_OR.reshape(*change.up_OR.shape, *of)
        tensors[f"{prefix}.alpha"] = torch.tensor(float(change.alpha))
        if change.magnitude_O is not None:
            tensors[f"{prefix}.dora_scale"] = change.magnitude_O.reshape(-1, 1, *of)
        if change.bias_O is not None:
            tensors[f"{prefix}.diff_b"] = change.bias_O
    return from_state_dict(dict(sorted(tensors.items())))


def _origin_of(adapter: Adapter) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "megadit_version": metadata.version("megadit"),
        "base": {"config": config_to_dict(adapter.config), "fingerprint": adapter.base},
        "training": dict(adapter.training),
        **({"defaults": dict(adapter.defaults)} if adapter.defaults else {}),
    }


def with_base(adapter: Adapter, bundle: Bundle, path: str) -> Adapter:
    """The same adapter, with the fingerprint of a bundle's weights: those of the expert that `path` names
    (`high=PATH`); of two experts without a name, none.

    Raises:
        UserError: as `networks_of`.
    """
    networks = networks_of(path, bundle)
    return replace(adapter, base=bundle_fingerprint(bundle, *networks) if len(networks) == 1 else None)
