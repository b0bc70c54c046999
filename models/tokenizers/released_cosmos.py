"""The released Cosmos tokenizers, as settings and tensors of `AutoencoderKLCosmos` or, for images, of our network."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_archive import read_archive
from megadit.models.storage.tensor_source import load_pickled, renamed_by

_NAMES = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.0\.", ".mid_block.attentions.0."),
    (r"\.mid\.attn_1\.1\.", ".mid_block.temp_attentions.0."),
    (r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.up\.(\d+)\.block\.", r".up_blocks.\1.resnets."),
    (r"\.up\.(\d+)\.upsample\.", r".up_blocks.\1.upsamplers.0."),
    (r"\.nin_shortcut\.conv3d\.", ".conv_shortcut."),
    (r"\.([qkv])\.conv3d\.", r".to_\1."),
    (r"\.proj_out\.conv3d\.", ".to_out.0."),
    (r"\.0\.conv3d\.", ".conv_s."),
    (r"\.1\.conv3d\.", ".conv_t."),
    (r"\.conv3d\.", "."),
)
_CONSTANTS = re.compile(r"(wavelets|_arange|patch_size_buffer)$")
_UP = re.compile(r"^decoder\.up_blocks\.(\d+)\.")
_RESAMPLER = re.compile(r"samplers\.0\.conv[12]\.")
"""Convolutions along space (1) and time (2); released networks contain some that they do not use."""


def diffusers_names(names: Iterable[str]) -> dict[str, str]:
    """Released name -> diffusers' name; diffusers counts the decoder's levels from the other end."""
    mapped = {}
    for name in names:
        if _CONSTANTS.search(name):
            continue
        mapped[name] = renamed_by(_NAMES, f".{name}").removeprefix(".")
    levels = [int(match[1]) for match in map(_UP.match, mapped.values()) if match]
    last = max(levels, default=0)
    return {name: _UP.sub(lambda m: f"decoder.up_blocks.{last - int(m[1])}.", t) for name, t in mapped.items()}


def read_released(path: Path, compression: str = "") -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(class, settings, tensors) of a released tokenizer: `autoencoder.jit`, a directory with it, or encoder and
    decoder.

    Raises:
        UserError: if there is none, or its compression is unknown.
    """
    files = [path] if path.suffix == ".jit" else [path / "autoencoder.jit"]
    if not files[0].is_file():
        networks = [path / "encoder.jit", path / "decoder.jit"]
        files = networks if all(network.is_file() for network in networks) else files
    sources = [read_archive(file) for file in files]
    shapes = {name: tensor.shape for source in sources for name, tensor in source.stored.items()}
    if "encoder.conv_in.weight" in shapes:  # for images: convolutions without separate temporal ones
        tensors = {n: source.read(n).float() for source in sources for n in source.stored if not _CONSTANTS.search(n)}
        return "CosmosImageNetwork", _image_settings(shapes, path), tensors
    names = diffusers_names(shapes)
    tensors = {names[name]: source.read(name) for source in sources for name in source.stored if name in names}
    config = _settings({name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    config |= _compression(tensors.keys(), config, compression or _named_compression(path), path)
    config |= _statistics(path if path.is_dir() else path.parent)
    names_of = _names_of(config)
    kept = {n: tensor.float() for n, tensor in tensors.items() if n in names_of or not _RESAMPLER.search(n)}
    return "AutoencoderKLCosmos", config, kept


def _image_settings(shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """Derive all settings of `CosmosImageNetwork` from the shapes."""

    def numbered(pattern: str) -> list[str]:
        return [name for name in shapes if re.fullmatch(pattern, name)]

    levels = len(numbered(r"encoder\.down\.\d+\.block\.0\.conv1\.weight"))
    try:
        first_width, patch_dim = shapes["encoder.conv_in.weight"][:2]
        return {
            "widths": [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)],
            "first_width": first_width,
            "num_layers": len(numbered(r"encoder\.down\.0\.block\.\d+\.conv1\.weight")),
            "num_halvings": len(numbered(r"encoder\.down\.\d+\.downsample\.conv\.weight")),
            "patch_size": math.isqrt(patch_dim // 3),
            "z_channels": shapes["encoder.conv_out.weight"][0],
            "latent_channels": shapes["quant_conv.weight"][0],
        }
    except KeyError as missing:
        raise UserError(f"{path} is not a continuous image tokenizer of Cosmos: it has no {missing}") from None


def _settings(shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """Derive settings from the shapes: widths of the levels, channels, patch."""
    try:
        columns = shapes["encoder.conv_in.conv_s.weight"][1]
        first, last = shapes["encoder.conv_in.conv_s.weight"][0], shapes["decoder.conv_in.conv_s.weight"][0]
        latent_channels = shapes["quant_conv.weight"][0]
    except KeyError as missing:
        raise UserError(f"{path} is not a continuous video tokenizer of Cosmos: it has no {missing}") from None
    down, up = _levels(shapes, "encoder.down_blocks"), _levels(shapes, "decoder.up_blocks")
    resnets = [
        name for name in shapes if re.fullmatch(r"encoder\.down_blocks\.0\.resnets\.\d+\.conv1\.conv_s\.weight", name)
    ]
    return {
        "encoder_block_out_channels": [first, *down],
        "decode_block_out_channels": [*reversed(up), last],
        "latent_channels": latent_channels,
        "num_layers": len(resnets),
        "patch_size": round((columns / 3) ** (1 / 3)),
        "latents_mean": None,
        "latents_std": None,
    }


def _levels(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> list[int]:
    """Output channels of each level."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.resnets\.0\.conv1\.conv_s\.weight")
    found = {int(match[1]): shapes[name][0] for name in shapes if (match := pattern.fullmatch(name))}
    return [found[level] for level in sorted(found)]


def _compression(names: Iterable[str], config: dict[str, Any], description: str, path: Path) -> dict[str, int]:
    """Find the compression whose network has all its tensors here and leaves the fewest over.

    A compression in `description` overrides it.
    """
    names = set(names)
    fits = []
    for temporal in (4, 8, 16):
        for spatial in (8, 16):
            ratios = {"temporal_compression_ratio": temporal, "spatial_compression_ratio": spatial}
            surplus = names - (names_of := _names_of(config | ratios))
            if names_of <= names and all(map(_RESAMPLER.search, surplus)):
                fits.append((len(surplus), f"{temporal}x{spatial}x{spatial}", ratios))
    by_name = {name: ratios for _, name, ratios in fits}
    if description:
        if description not in by_name:
            raise UserError(
                f"{path} does not fit a compression of {description}; it fits {', '.join(by_name) or 'none'}"
            )
        return by_name[description]
    fewest = min((surplus for surplus, *_ in fits), default=None)
    best = [(name, ratios) for surplus, name, ratios in fits if surplus == fewest]
    if len(best) != 1:
        choices = ", ".join(name for name, _ in best) or "none that is known"
        raise UserError(f"{path}: its tensors fit the compressions {choices}; say which with --compression, as 4x8x8")
    return best[0][1]


def _named_compression(path: Path) -> str:
    """Compression in a folder's name, such as Cosmos-0.1-Tokenizer-CV4x8x8; "" without one."""
    directory = path if path.is_dir() else path.parent
    match = re.search(r"CV(\d+x\d+x\d+)", directory.name)
    return match[1] if match else ""


def _names_of(config: Mapping[str, Any]) -> set[str]:
    from megadit.models.tokenizers.network import empty_module

    return set(empty_module("AutoencoderKLCosmos", config).state_dict())


def _statistics(directory: Path) -> dict[str, Any]:
    """Mean and standard deviation of the latents, where the checkpoint has them (mean_std.pt)."""
    path = directory / "mean_std.pt"
    if not path.is_file():
        return {}
    values = load_pickled(path)
    try:
        mean, std = (tensor.float().flatten().tolist() for tensor in values)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path} is not a pair of tensors: {error}") from error
    return {"latents_mean": mean, "latents_std": std}
