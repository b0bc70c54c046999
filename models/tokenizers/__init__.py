"""Video tokenizers, from videos to latents and back: saved ones, and published ones as downloaded (diffusers'
directories, released `.jit` files, names on a hub)."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import torch

from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import read_json
from megadit.models.storage import hub
from megadit.models.storage.components import component_folder, component_type
from megadit.models.tokenizers import network as networks
from megadit.models.tokenizers.autoencoder import Autoencoder
from megadit.models.tokenizers.base import VideoTokenizer
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.models.tokenizers.kinds import KIND_OF_CLASS, KINDS
from megadit.models.tokenizers.network import Network
from megadit.models.tokenizers.released_cosmos import read_released
from megadit.models.tokenizers.released_wan import is_wan_file, read_wan

__all__ = [
    "Autoencoder",
    "HaarTokenizer",
    "VideoTokenizer",
    "holds_tokenizer",
    "load_tokenizer",
    "published_tokenizer",
]

_LOADERS: dict[str, Callable[[str | os.PathLike], VideoTokenizer]] = {
    **dict.fromkeys(KINDS, Autoencoder.load),
    "haar": HaarTokenizer.load,
}
"""Type of a saved tokenizer -> its class."""
_RELEASED = ("autoencoder.jit", "encoder.jit", "decoder.jit")


def load_tokenizer(directory: str | os.PathLike) -> VideoTokenizer:
    """The tokenizer in `directory`: a saved one, a published one, or the one of a bundle or pipeline.

    Raises:
        UserError: if there is none, or if this version does not know its type.
    """
    if any(map(holds_tokenizer, (Path(directory), Path(directory) / "vae"))):
        return published_tokenizer(directory)
    folder = component_folder(directory, "tokenizer")
    return _LOADERS[component_type(folder, "tokenizer", _LOADERS)](folder)


def holds_tokenizer(path: Path) -> bool:
    """Whether a published tokenizer, in any form, is at `path`."""
    if path.suffix == ".jit" or path.is_file():
        return path.suffix == ".jit" or is_wan_file(path)
    if any((path / name).is_file() for name in _RELEASED):
        return True
    config = read_json(path / "config.json") if (path / "config.json").is_file() else None
    return isinstance(config, dict) and config.get("_class_name") in KIND_OF_CLASS


def published_tokenizer(source: str | os.PathLike, *, compression: str = "") -> Autoencoder:
    """Load a tokenizer from a directory of diffusers, a released `autoencoder.jit` or its directory, a file of Wan's
    VAE, or a model in the hub's cache.

    No code in a `.jit` is executed. `compression` (as in 4x8x8) is only needed where nothing else determines it.

    Raises:
        UserError: if it is none of these, or another network.
    """
    path = Path(source)
    if path.suffix != ".jit" and not is_wan_file(path):
        path = hub.local_directory(str(source), "tokenizer", "config.json, or autoencoder.jit")
    if (path / "vae" / "config.json").is_file():
        path = path / "vae"
    if is_wan_file(path):
        class_name, config, tensors = read_wan(path)
    elif (path / "config.json").is_file():
        class_name, config, tensors = networks.read_diffusers(path, KIND_OF_CLASS)
    else:
        class_name, config, tensors = read_released(path, compression)
    kind = KIND_OF_CLASS[class_name]
    complete = networks.complete_config(class_name, config)
    kind.temporal_compression(complete), kind.spatial_compression(complete)  # raise if settings contradict the layers
    network = Network.build(class_name, complete, tensors, f"the tensors of {path}")
    autoencoder = Autoencoder(kind=kind, network=network, sigma_data=kind.sigma_data)
    _check_computes(copy.deepcopy(autoencoder), path)  # computing casts the weights
    return autoencoder


def _check_computes(autoencoder: Autoencoder, path: Path) -> None:
    """Raises UserError for settings that are only used in computing, such as channel statistics, and do not fit."""
    side = 2 * autoencoder.spatial_compression
    settings = "settings of its config.json"
    with library_errors(lambda reason: f"{path}: the network does not compute with the {settings} ({reason})"):
        latents_BCTHW = autoencoder.encode(torch.zeros(1, 3, 1, side, side))
        shape, frame_BCTHW = latents_BCTHW.shape[1:], autoencoder.decode(latents_BCTHW)
        fits = shape == autoencoder.latent_shape(1, side, side) and frame_BCTHW.shape[1:3] == (3, 1)
    if not (fits and latents_BCTHW.isfinite().all()):
        raise UserError(f"{path}: latents_mean, latents_std or sizes in config.json do not fit the network's channels")
