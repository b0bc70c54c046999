"""The networks of published autoencoders: building, sizes, files."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import read_json
from megadit.models.storage.components import check_shapes
from megadit.models.storage.weight_files import open_weights, weight_files
from megadit.models.storage.wrapped import unwrapped
from megadit.models.tokenizers.cosmos_image import CosmosImageNetwork

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS = {"CosmosImageNetwork": CosmosImageNetwork}
"""Networks that diffusers lacks."""
MOST_CHANNELS = 2**16
"""Maximum plausible number in a configuration; with larger ones nothing is built."""
_STEMS = ("diffusion_pytorch_model", "model")
_MARKS = ("decoder.conv_in.weight", "decoder.conv_in.conv_s.weight")
"""Known tensors of autoencoders, by which a prefix of all names is found."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Network:
    """An autoencoder, which moves to the device of its inputs."""

    class_name: str
    config: Mapping[str, Any]
    module: nn.Module = field(repr=False)
    stored: torch.dtype = torch.float32
    """Dtype of the stored weights, before they are cast for computing."""

    @classmethod
    def build(cls, class_name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> "Network":
        """The network with exactly these tensors.

        Raises:
            UserError: if diffusers is not installed, or the tensors do not fit the network.
        """
        module = empty_module(class_name, config)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_shapes(found, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}, where)
        module.load_state_dict(dict(tensors), assign=True)
        _make_constants(class_name, module)
        settings = json.loads(json.dumps(dict(config)))  # as they are read back: tuples are lists
        stored = next(module.parameters()).dtype
        return cls(class_name=class_name, config=settings, module=module.eval().requires_grad_(False), stored=stored)

    def on(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        if any((weight.device, weight.dtype) != (device, dtype) for weight in self.module.parameters()):
            nn.Module.to(self.module, device, dtype)  # diffusers' method warns of every cast
        return self.module

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())


def empty_module(class_name: str, config: Mapping[str, Any]) -> nn.Module:
    """The network with these settings on the meta device.

    Raises:
        UserError: if diffusers is not installed, or does not know a setting.
    """
    builder, network_class = ("megadit", OURS[class_name]) if class_name in OURS else _class_of_diffusers(class_name)
    _check_settings(class_name, network_class, config)
    with library_errors(lambda reason: f"{builder} cannot build this {class_name}: {reason}"), torch.device("meta"):
        return network_class(**_settings(config))


def _check_settings(class_name: str, network_class: type, config: Mapping[str, Any]) -> None:
    """Raises UserError for values of other types than those of the network's settings, by name."""
    kinds, parameters = get_type_hints(network_class.__init__), signature(network_class.__init__).parameters
    for name, value in _settings(config).items():
        if name in kinds and value != parameters[name].default and not _is_of(kinds[name], value):
            raise UserError(f"config.json of an {class_name}: {name}={value!r:.60} is not a valid value")


def _is_of(kind: Any, value: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(each, value) for each in inner)
    if origin in (list, tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) <= MOST_CHANNELS
            and all(_is_of(inner[0], each) for each in value)
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_CHANNELS
    return value is None if kind is NoneType else not isinstance(kind, type) or isinstance(value, kind)


def _class_of_diffusers(class_name: str) -> tuple[str, type[nn.Module]]:
    """(name and version of diffusers, its class)."""
    try:
        import diffusers
    except ModuleNotFoundError:
        raise UserError(f"{class_name} needs the library diffusers: pip install 'megadit[diffusers]'") from None
    return f"diffusers {diffusers.__version__}", getattr(diffusers, class_name)


def complete_config(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, completed by diffusers' defaults."""
    return _settings(config if class_name in OURS else empty_module(class_name, config).config)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _make_constants(class_name: str, module: nn.Module) -> None:
    """Compute constants that are not in the checkpoint (wavelets): the network was built without memory."""
    if class_name != "AutoencoderKLCosmos":
        return
    from diffusers.models.autoencoders import autoencoder_kl_cosmos as cosmos

    for part in module.modules():
        if isinstance(part, cosmos.CosmosPatchEmbed3d | cosmos.CosmosUnpatcher3d):
            wavelets = cosmos._WAVELETS[part.patch_method].clone()
            part.register_buffer("wavelets", wavelets, persistent=False)
            part.register_buffer("_arange", torch.arange(len(wavelets)), persistent=False)


def read_diffusers(directory: Path, known: Collection[str]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(class, settings, tensors) of a network in diffusers' format.

    Raises:
        UserError: if it is none of the `known` classes, or files are missing.
    """
    config = read_json(directory / "config.json")
    class_name = config.get("_class_name") if isinstance(config, dict) else None
    if not isinstance(class_name, str) or class_name not in known:
        raise UserError(f"{directory} holds a {class_name}, not one of {', '.join(known)}")
    files = weight_files(directory, *_STEMS)
    if not files:
        raise UserError(f"{directory} has no weights: needs {_STEMS[0]}.safetensors, or a variant of it, or .bin")
    tensors = unwrapped(open_weights(files), _MARKS).state_dict()
    return class_name, config, {_present_name(key): tensor for key, tensor in tensors.items()}


def _present_name(name: str) -> str:
    """Current name of a tensor: older files have earlier names of attention linears (Stable Diffusion 1)."""
    owner, _, layer = name.rpartition(".attentions.")
    place, _, linear = layer.partition(".")
    before, _, kind = linear.rpartition(".")
    renamed = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}.get(before)
    return name if renamed is None else f"{owner}.attentions.{place}.{renamed}.{kind}"


def fingerprint(settings: Mapping[str, Any], network: Network) -> str:
    """Hash of the settings and the network's tensors, with their saved values."""
    digest = hashlib.blake2b(json.dumps(dict(settings), sort_keys=True).encode(), digest_size=8)
    for name, tensor in sorted(network.tensors().items()):
        digest.update(f"\n{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().bfloat16().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
