"""Unwraps tensors saved by other programs: removes prefixes, applies scales, finds nested state dicts.

- Prefixes: `module.` (DDP), `_orig_mod.` (torch.compile), `_fsdp_wrapped_module.`, `model.diffusion_model.` (ComfyUI),
  `net.`, ...: any text before a known name of the network.
- 8-bit weights with scales: `NAME.scale_weight` or `NAME.weight_scale` multiplies `NAME.weight`.
- Files of torch.save with nested state dicts: `generator_ema` (DMD), `ema`, `model`, `state_dict`, ...
"""

import math
import re
import tarfile
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.models.shared.documents import OTHER_FILES
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import Stored, TensorSource, from_state_dict, load_pickled, open_safetensors

TORCH_MAGIC = (b"PK", b"\x80")
"""First bytes of a file of torch.save: a zip file, or of old a pickle."""
NESTED = ("generator_ema", "ema_model", "model_ema", "ema", "generator", "model", "module", "net", "state_dict")
"""Keys of a network's state dict in files of torch.save, EMA weights first."""
_COUNTERS = re.compile(r"n_averaged|initted|(global_)?step|iteration|epoch|num_updates")
"""Names of single numbers beside the weights, as torch's `AveragedModel` and ema-pytorch keep them."""
WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")
"""Infixes of DDP, torch.compile, FSDP and PEFT in names."""
_QUANTISED = re.compile(r"\.(SCB|absmax|quant_map|quant_state\..*|qweight|qzeros|_data|weight_scale_inv)$")
"""Tensors of bitsandbytes, GPTQ, Quanto and block-wise FP8."""
_MOST_NESTED = 8
_AVERAGE = re.compile(r"(^|[._])(ema|averaged?|swa|polyak|shadow|(?<!exp_)avg)([._]|$)|EMA")
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
"""Parameters of FSDP that are one tensor."""
_OF_TRAINING = re.compile("optim|sched|scaler|rng")
_OTHER_STATE = re.compile(
    r"(first_stage_model|vae|cond_stage_model|conditioner|text_encoders?|image_encoder|((online_)?model|net)(_ema)?|ema|optimizer)\."
)
"""Prefixes of other tensors in files in which the network's tensors have a prefix."""
_CALLBACKS = "callbacks"
"""Key of the state of Lightning's callbacks, by their names and settings: one may keep EMA weights."""
_LIT_EMA = "model_ema."
"""Prefix of EMA weights of latent-diffusion, whose names are those of the weights without `model.` and dots."""
_SCALES = (".scale_weight", ".weight_scale")
_OF_INPUTS = re.compile(r"(^|\.)scaled_fp8$|\.(scale_input|input_scale|comfy_quant)$")
"""Pattern of tensors that are only needed by kernels with 8-bit activations, or to choose a kernel."""


def open_tensor_file(path: Path) -> TensorSource:
    """The tensors of a .safetensors or torch.save file; nothing else in it is loaded.

    Raises:
        UserError: if there are none.
    """
    with path.open("rb") as file:
        head = file.read(9)
    is_safetensors = path.suffix == ".safetensors" or head[8:] == b"{"
    if is_safetensors or (head.startswith(tuple(OTHER_FILES)) and not head.startswith(TORCH_MAGIC)):
        return open_safetensors(path)
    if tarfile.is_tarfile(path) or _is_other_zip(path):
        raise UserError(f"{path} is an archive, no file of torch.save: unpack it, and give what is in it")
    if not head.startswith(TORCH_MAGIC):
        raise UserError(f"{path} is no file of weights, of safetensors or torch.save")
    values = load_pickled(path)
    ema_tensors = _ema_in_order(values)
    for _ in range(_MOST_NESTED):  # a dictionary may hold itself
        if not isinstance(values, dict) or (deeper := _deeper(values)) is None:
            break
        values = values[deeper]
    named = values.items() if isinstance(values, dict) else ()
    tensors = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path} {_without_tensors(values)}")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise UserError(f"{path}: {name} is a sparse or quantised tensor, or without values: save plain ones")
    if not any(tensor.numel() for tensor in tensors.values()):
        raise UserError(f"{path} holds tensors without a number, as of ZeRO-3: gather them with its zero_to_fp32.py")
    if ema_tensors:
        parameters = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if [each.shape for each in ema_tensors] != [each.shape for each in parameters.values()]:
            raise UserError(
                f"{path} holds EMA weights without names, {len(ema_tensors)} tensors that do not fit its "
                f"{len(parameters)} named ones: save the network's state_dict() with these values"
            )
        tensors |= dict(zip(parameters, ema_tensors, strict=True))
    return from_state_dict(tensors, str(path))


def _is_other_zip(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with suppress(zipfile.BadZipFile, ValueError), zipfile.ZipFile(path) as archive:
        return not any(name.endswith("data.pkl") for name in archive.namelist())
    return False


def _ema_in_order(values: Any, depth: int = 0) -> list[Tensor]:
    """EMA weights as torch-ema and diffusers' EMAModel keep them, in the order of the parameters; []: none."""
    if not isinstance(values, dict) or depth == _MOST_NESTED // 2:
        return []
    found = values.get("shadow_params")
    if isinstance(found, list) and found and all(isinstance(each, Tensor) for each in found):
        return found
    inner = (value for key, value in values.items() if isinstance(value, dict) and _is_average(key, value))
    return next(filter(None, (_ema_in_order(value, depth + 1) for value in inner)), [])


def _is_average(key: Any, value: Mapping[Any, Any]) -> bool:
    return any(_AVERAGE.search(str(name)) for name in (value if key == _CALLBACKS else (key,)))


def _deeper(values: Mapping[Any, Any]) -> Any:
    """The key of a state dict: the only one of EMA weights, else one of `NESTED`, else the only one with tensors."""
    known: dict[int, bool] = {}
    found = [key for key, value in values.items() if isinstance(value, dict) and _has_tensors(value, known)]
    found = [key for key in found if not _OF_TRAINING.search(str(key))]
    ema_weights = [key for key in found if _is_average(key, values[key])]
    if usual := next((key for key in NESTED if key in (ema_weights or found)), None):
        return usual
    if not ema_weights and any(isinstance(value, Tensor) for value in values.values()):
        return None
    chosen = ema_weights or found
    return chosen[0] if len(chosen) == 1 else None


def _has_tensors(value: Any, known: dict[int, bool], depth: int = 0) -> bool:
    """Whether tensors lie within; `known`: that of each dictionary, which many others, and itself, may hold."""
    if not isinstance(value, dict) or depth == _MOST_NESTED:
        return isinstance(value, Tensor)
    if id(value) not in known:
        known[id(value)] = False
        known[id(value)] = any(_has_tensors(inner, known, depth + 1) for inner in value.values())
    return known[id(value)]


def _without_tensors(values: Any) -> str:
    if isinstance(values, dict) and any(isinstance(value, list) for value in values.values()):
        (name, _) = next((name, value) for name, value in values.items() if isinstance(value, list))
        return f"holds lists of tensors without names ({name}): save the network's state_dict() with these values"
    keys = ", ".join(map(str, list(values)[:8])) if isinstance(values, dict) else type(values).__name__
    return f"holds no named tensors, only: {keys}; they are also looked for under {', '.join(NESTED)} too"


def unwrapped(source: TensorSource, marks: Collection[str]) -> TensorSource:
    """The tensors without the prefix of all names, which is found by the names `marks`; 8-bit weights are dequantized.

    If there are a network and its EMA, the EMA weights are returned.

    Raises:
        UserError: for several networks, and for scales that fit no tensor.
    """
    if flat := next(filter(_FLAT.search, source.stored), None):
        raise UserError(f"{source.label} holds flattened parameters of FSDP ({flat}): save its full state dict")
    names: dict[str, str] = {}
    for name, stored in source.stored.items():
        if _COUNTERS.fullmatch(name) and math.prod(stored.shape) == 1:
            continue
        other = names.setdefault(WRAPPERS.sub("", name), name)
        if other != name:
            raise UserError(f"{source.label} holds {other} and {name}, of which one must be removed")
    prefixes = _prefixes(names, marks)
    ema_weights = [prefix for prefix in prefixes if _AVERAGE.search(prefix)]
    if ema_weights or (prefixes and "" not in prefixes):
        chosen = ema_weights or prefixes
        if len(chosen) > 1:
            raise UserError(f"{source.label} holds several networks, {', '.join(sorted(prefixes))}: give one by itself")
        ema_names = {name: _LIT_EMA + name.removeprefix("model.").replace(".", "") for name in names}
        ema_names = {name: names[average] for name, average in ema_names.items() if average in names}
        others = [prefix for prefix in prefixes if prefix != chosen[0]]
        names = {short: name for short, name in names.items() if "" not in others or short.startswith(chosen[0])}
        names = _without(chosen[0], names | ema_names)
    if len(names) < len(source.stored) or any(short != name for short, name in names.items()):
        stored = {short: source.stored[name] for short, name in names.items()}
        source = TensorSource(source.label, stored, lambda short, read=source.read: read(names[short]), source.metadata)
    return _with_scales(source)


def _prefixes(names: Collection[str], marks: Collection[str]) -> list[str]:
    """Prefixes before the first mark that any name ends with; one is dropped if another has over twice its names."""
    for mark in marks:
        found = [name.removesuffix(mark) for name in names if name == mark or name.endswith(f".{mark}")]
        counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in found}
        if found:
            most = max(counts.values())
            return [prefix for prefix, count in counts.items() if count >= most / 2]
    return []


def _without(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Short name -> name, without the tensors of other components."""
    return {
        short.removeprefix(prefix): name
        for short, name in names.items()
        if short.startswith(prefix) or not _OTHER_STATE.match(short)
    }


def _with_scales(source: TensorSource) -> TensorSource:
    """8-bit tensors times their scales, float32."""
    if quantised := next(filter(_QUANTISED.search, source.stored), None):
        raise UserError(f"{source.label} is quantised ({quantised}): give the weights before quantisation")
    scales = {
        f"{name.removesuffix(ending)}.weight": name
        for name in source.stored
        for ending in _SCALES
        if name.endswith(ending) and f"{name.removesuffix(ending)}.weight" in source.stored
    }
    if not scales:
        return source
    for name, scale in scales.items():
        shape, of = source.stored[scale].shape, source.stored[name].shape
        if torch.Size(shape).numel() != 1 and shape not in ((of[0],), (of[0], *[1] * (len(of) - 1))):
            raise UserError(
                f"{source.label}: {scale} {list(shape)} scales {name} {list(of)} in blocks, which is not supported: "
                "give the weights before quantisation"
            )

    def read(name: str) -> Tensor:
        value = source.read(name)
        if name not in scales:
            return value
        scale = source.read(scales[name]).float()
        return value.float() * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (value.ndim - 1)))

    stored = {
        name: Stored(kept.shape, torch.float32) if name in scales else kept
        for name, kept in source.stored.items()
        if name not in scales.values() and not _OF_INPUTS.search(name)
    }
    return TensorSource(source.label, stored, read, source.metadata)
