"""Recognises published checkpoints by their files: configuration, and their tensors under our names."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert import class_dit, clip, cosmos, nemo, nemo_moviegen, stable_diffusion, vit, wan
from megadit.models.convert.converted import to_ours
from megadit.models.convert.schedulers import read_scheduler
from megadit.models.convert.tensor_map import Entry
from megadit.models.networks.registry import build_without_memory
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, read_object
from megadit.models.shared.outside import next_step
from megadit.models.storage.components import config_from_dict, config_to_dict
from megadit.models.storage.tensor_source import TensorSource
from megadit.models.storage.weight_files import open_weights, weight_files
from megadit.models.storage.wrapped import open_tensor_file, unwrapped

WEIGHTS, OF_TRANSFORMERS = "diffusion_pytorch_model", "model"
"""Names of weight files in diffusers and transformers."""
_EMA_SETTINGS = {"decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power"}
"""Settings that diffusers' `EMAModel` adds to those of its network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published network."""

    config: NetworkConfig
    tensors: TensorSource
    """Tensors under our names."""
    sample_size: int | None = None
    """Side of a latent, where only one was trained."""
    class_names: tuple[str, ...] = ()
    low_noise: TensorSource | None = None
    """The low-noise expert, for noise levels below `boundary`; the high-noise one is `tensors`. None: one network."""
    boundary: float | None = None
    """Noise level t = sigma / (1 + sigma)."""
    index: Mapping[str, Any] = field(default_factory=dict)
    """Contents of model_index.json, where there is one."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Contents of scheduler_config.json, where there is one."""
    is_released: bool = False
    """Whether its names are those of the original release, not diffusers'."""
    text_projection: Mapping[str, Tensor] = field(default_factory=dict)
    """Projection of Qwen2.5-VL's states (`QwenVLTextEncoder.projection`); {}: no projection."""


def published_conditionings(published: Published) -> tuple[str, ...]:
    """Return the kinds of conditioning that a published network was trained for, as far as they are supported."""
    config = published.config
    if config.conditioning_sigma is None:
        return ()
    if config.conditioning.has_own_level and not config.conditioning.marks or not config.conditioning.is_among:  # Wan's
        return ("first_frame", "last_frame") if config.image_positions is not None else ("first_frame",)
    return ("first_frame", "prefix")


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of published checkpoints."""

    name: str
    mark: str
    """Name of a tensor that only this form has."""
    config: Callable[[Mapping[str, tuple[int, ...]]], DiTConfig]
    entries: Callable[[DiTConfig], list[Entry]]
    ignored: Callable[[DiTConfig], str]
    config_from_settings: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], DiTConfig] | None = None
    """Function that derives the configuration from a config.json next to the tensors, too."""


FORMS = (
    _Form(
        "Cosmos 1.0 (model.pt)",
        "blocks.block0.blocks.0.block.attn.to_q.0.weight",
        cosmos.config_from_shapes,
        cosmos.released_entries,
        lambda config: cosmos.IGNORED,
    ),
    _Form(
        "Cosmos-Predict2 or 2.5 (model.pt)",
        "blocks.0.adaln_modulation_self_attn.1.weight",
        cosmos.predict2_config_from_shapes,
        cosmos.released_entries,
        lambda config: f"{cosmos.IGNORED}|{cosmos.PROJECTION}",
    ),
    _Form(
        "Wan (as released)",
        "blocks.0.self_attn.norm_q.weight",
        wan.config_from_shapes,
        wan.released_entries,
        lambda config: "$^",
        wan.config_from_released,
    ),
    _Form(
        "DiT (the original .pt)",
        "y_embedder.embedding_table.weight",
        class_dit.config_from_shapes,
        class_dit.original_entries,
        lambda config: class_dit.IGNORED,
    ),
    _Form(
        "NeMo or DFM",
        "decoder.layers.0.full_self_attention.linear_qkv.weight",
        nemo.config_from_shapes,
        nemo.entries,
        lambda config: nemo.IGNORED_BY_DFM if config.family == "dfm" else nemo.IGNORED,
    ),
    _Form(
        "MovieGen of NeMo",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        nemo_moviegen.config_from_shapes,
        nemo_moviegen.entries,
        lambda config: nemo_moviegen.IGNORED,
    ),
)
"""Forms whose tensors determine all or most of the configuration."""

EXPERT_FOLDERS = (("transformer", "transformer_2"), ("high_noise_model", "low_noise_model"))
"""Folders of high-noise and low-noise experts: diffusers' and as released."""
DIFFUSERS = {known.DIFFUSERS_CLASS: known for known in (cosmos, class_dit, wan, stable_diffusion)}
"""Class -> the module that converts it."""
PIPELINE_READERS = {stable_diffusion.DIFFUSERS_CLASS: stable_diffusion.read_pipeline}
"""Class -> function that reads further settings from other folders of its pipeline."""
IGNORED = {wan.DIFFUSERS_CLASS: wan.IGNORED, cosmos.DIFFUSERS_CLASS: cosmos.PROJECTION}
"""Class -> a pattern of ignored tensors in its files."""
TRANSFORMERS = {known.MODEL_TYPE: known for known in (vit, clip)}
"""Type of a transformers model, which is our family's name -> the module that converts it."""
FOLDERS = {"stable_diffusion": stable_diffusion.FOLDER}
"""Family -> folder of its network in diffusers' pipelines, unless `transformer`."""


def open_published(path: Path) -> Published:
    """The network at `path`: a diffusers directory (of a pipeline or of its transformer) or a transformers directory, a
    `.pt` or safetensors file, or a distributed checkpoint of Megatron.

    Raises:
        UserError: if it is none of these, or has other tensors than such a network.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    for high, low in EXPERT_FOLDERS:
        if (path / low).is_dir():
            return _experts(path, open_published(path / high), open_published(path / low))
    if (path / "model_index.json").is_file():
        index = read_object(path / "model_index.json")
        published = open_published(path / next((name for name in FOLDERS.values() if name in index), "transformer"))
        config = published.config
        if index.get("expand_timesteps"):  # Wan 2.2: a first frame has its own noise level
            config = replace(config, conditioning_sigma=0.0)
        settings = {"index": index, "scheduler": read_scheduler(path)}
        return replace(published, config=config, class_names=_class_names(index, config), **settings)
    if (kind := transformers_type(path)) is not None:
        return _from_transformers(path, kind)
    if (path / "config.json").is_file():
        released = _released_config(path)
        if released is not None:
            return _from_tensors(_open(path, WEIGHTS), released)
        return _from_diffusers(path)
    if path.is_file():
        return _from_tensors(open_tensor_file(path), _released_config(path.parent))
    # torch's distributed checkpoints take 50 MB, in each process that serves or samples
    from megadit.models.convert.distributed import is_distributed, open_distributed

    if is_distributed(path):
        return _from_tensors(open_distributed(path))
    raise UserError(
        f"{path} is no published checkpoint: expected a directory of diffusers (config.json or model_index.json), a "
        f".pt or .safetensors file, or a distributed checkpoint of Megatron (metadata.json and .distcp files)"
        f"{next_step(path)}"
    )


def _experts(path: Path, high: Published, low: Published) -> Published:
    """Two experts of one configuration, as in Wan 2.2's 14B."""
    if high.config != low.config:
        raise UserError(f"the two networks of {path} differ in their configurations; only their weights may")
    index = read_object(path / "model_index.json") if (path / "model_index.json").is_file() else {}
    boundary = index.get("boundary_ratio") or wan.BOUNDARY[high.config.conditioning_mode]
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise UserError(f"{path / 'model_index.json'}: boundary_ratio={boundary!r:.60} must lie between 0 and 1")
    return replace(high, low_noise=low.tensors, boundary=boundary, scheduler=read_scheduler(path))


def _released_config(path: Path) -> Mapping[str, Any] | None:
    """The config.json of a directory with originally released tensors (Wan's), if it has one."""
    values = read_json(path / "config.json") if (path / "config.json").is_file() else None
    return values if isinstance(values, dict) and values.get("_class_name") == "WanModel" else None


def _from_diffusers(path: Path) -> Published:
    values = read_json(path / "config.json")
    name = values.get("_class_name") if isinstance(values, dict) else None
    if name == class_dit.LEGACY_CLASS:
        name, values = class_dit.from_legacy(values, path)
    if not isinstance(name, str) or name not in DIFFUSERS:
        raise UserError(f"{path} holds a {name or 'network of another kind'}; known are {', '.join(DIFFUSERS)}")
    if values.get("quantization_config"):
        raise UserError(f"{path} is quantised (quantization_config): give the original weights")
    known, values = DIFFUSERS[name], values | (PIPELINE_READERS[name](path) if name in PIPELINE_READERS else {})
    for setting in sorted(values.keys() - known.SETTINGS - _EMA_SETTINGS):
        if not setting.startswith("_") and values[setting] is not None:
            raise UserError(
                f"{path / 'config.json'} has the setting {setting!r}, which no {name} known to this version has: was "
                "it written by a newer diffusers?"
            )
    config = config_of(known, values, path / "config.json")
    entries = known.diffusers_entries(config)
    source = _open(path, WEIGHTS, marks=[theirs for entry in entries[:1] for theirs in entry.theirs])
    return Published(
        config=config,
        tensors=to_ours(source, entries, config, ignored=IGNORED.get(name, "$^")),
        sample_size=values.get("sample_size"),
        text_projection=_text_projection(config, source),
    )


_OTHERS = (1, 2, 16, 1.0, [1, 2, 2], [128, 240, 240], None)
"""Values to try in place of a setting, in addition to those of other settings and Stable Diffusion's usual ones."""


def config_of(known: Any, values: Mapping[str, Any], path: Path) -> NetworkConfig:
    """Call `known.config_from_diffusers` on the `values` of `path`; unexpected errors become UserErrors that name the
    setting."""

    def read(values: Mapping[str, Any]) -> NetworkConfig:
        return config_from_dict(config_to_dict(known.config_from_diffusers(values)))  # checks types

    return _read_settings(read, values, path, known.DIFFUSERS_CLASS, getattr(known, "USUAL", {}))


def _read_settings(
    read: Callable[[Mapping[str, Any]], Any], values: Any, path: Path, what: str, usual: Mapping[str, Any]
) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object of settings")
    try:
        return read(values)
    except KeyError as missing:
        raise UserError(f"{path} lacks {missing}, which every {what} has") from None
    except Exception as error:  # also a UserError, and errors by values of other types
        if isinstance(error, UserError) and values.keys() & set(re.findall(r"(?<![\w.])(\w+)=", str(error))):
            raise UserError(f"{path}: {error}") from None
        named = _at_fault(read, values, usual) or "settings"
        raise UserError(f"{path}: {named} is not a valid setting of a {what} ({error})") from None


def _at_fault(read: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """The invalid setting, as NAME=VALUE: with another value there is no error; "": none found."""
    for name, value in values.items():
        if isinstance(value, dict):
            inner = _at_fault(lambda other, name=name: read({**values, name: other}), value, usual)
            if inner:
                return f"{name}.{inner}"
        plain = [other for other in values.values() if not isinstance(other, dict)]
        for other in (*_OTHERS, *plain, usual.get(name)):
            with suppress(Exception):
                read({**values, name: other})
                return f"{name}={value!r:.40}"
    return ""


def transformers_type(path: Path) -> str | None:
    """Return the type of the model in a directory, one of `TRANSFORMERS`, or None."""
    values = read_json(path / "config.json") if (path / "config.json").is_file() else None
    found = values.get("model_type") if isinstance(values, dict) else None
    return found if isinstance(found, str) and found in TRANSFORMERS else None


def _from_transformers(path: Path, kind: str) -> Published:
    known = TRANSFORMERS[kind]
    known.pixels_of(path)  # raises for unsupported pixel ranges
    values, source = read_object(path / "config.json"), _open(path, OF_TRANSFORMERS, f"pytorch_{OF_TRANSFORMERS}")

    def read(values: Mapping[str, Any]) -> tuple[DiTConfig, Any]:
        config = known.config_from_transformers(values, source.shapes)
        build_without_memory(config)  # checks combinations of settings
        return config, known.entries(config)

    config, entries = _read_settings(read, values, path / "config.json", kind, {})
    return Published(
        config=config,
        tensors=to_ours(source, entries, config, ignored=known.IGNORED),
        class_names=_class_names(values, config),
    )


def _text_projection(config: NetworkConfig, source: TensorSource) -> dict[str, Tensor]:
    if getattr(config, "compat", None) != "predict2_5":
        return {}
    if missing := [name for name in cosmos.TEXT_PROJECTION.values() if name not in source.stored]:
        raise UserError(f"{source.label} has no tensor {missing[0]}, which use_crossattn_projection=true needs")
    return {ours: source.read(theirs) for ours, theirs in cosmos.TEXT_PROJECTION.items()}


def _open(path: Path, *stems: str, marks: Collection[str] = ()) -> TensorSource:
    """The tensors of a folder's weight files with these stems; a prefix before all names (`marks`) is removed."""
    files = weight_files(path, *stems)
    if not files:
        raise UserError(
            f"{path} has no {stems[0]}.safetensors, nor an index of several, a variant of it, or a .bin; give a "
            "file of another name by itself"
        )
    return unwrapped(open_weights(files), marks)


def _from_tensors(source: TensorSource, settings: Mapping[str, Any] | None = None) -> Published:
    """`settings` is a released config.json."""
    source = unwrapped(source, [form.mark for form in FORMS])
    for form in FORMS:
        if form.mark in source.stored:
            try:
                with_settings = form.config_from_settings if settings is not None else None
                config = form.config(source.shapes) if with_settings is None else with_settings(settings, source.shapes)
            except KeyError as missing:
                raise UserError(f"{source.label} looks like {form.name}, but has no tensor {missing}") from None
            return Published(
                config=config,
                tensors=to_ours(source, form.entries(config), config, ignored=form.ignored(config)),
                text_projection=_text_projection(config, source),
                is_released=True,
            )
    for form in FORMS:
        if any(name.startswith(form.mark.rpartition(".")[0].rpartition(".")[0] + ".") for name in source.stored):
            raise UserError(f"{source.label} looks like {form.name}, but has no tensor '{form.mark}'")
    known = ", ".join(form.name for form in FORMS)
    some = ", ".join(list(source.stored)[:3])
    raise UserError(
        f"{source.label} holds tensors of another network ({some} ...); known are {known}, and by their folder, with "
        "its config.json, those of diffusers"
    )


def _class_names(index: Mapping[str, Any], config: NetworkConfig) -> tuple[str, ...]:
    if config.has_text or config.num_classes is None:
        return ()
    named = index.get("id2label") or {}
    return tuple(named.get(str(i), f"class {i}") for i in range(config.num_classes))
