"""Wan 2.1's autoencoder as its first publication (`Wan2.1_VAE.pth`) and ComfyUI (`wan_2.1_vae.safetensors`) have it:
one file, whose names diffusers knows and whose sizes its tensors say."""

from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.models.bundle.wrapped import open_tensor_file, unwrapped
from megadit.models.shared.errors import UserError

CLASS = "AutoencoderKLWan"
FILES = "Wan2.*_VAE.pth"
"""Pattern of the VAE's file in a released folder."""
SUFFIXES = (".pth", ".pt", ".safetensors")
_MARK = "decoder.middle.0.residual.0.gamma"


def is_wan_file(path: Path) -> bool:
    """Whether such an autoencoder is in the file `path`, which is called a VAE."""
    return "vae" in path.name.lower() and path.suffix in SUFFIXES and path.is_file()


def read_wan(file: Path) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(class of diffusers, settings, tensors under its names) of the autoencoder in a file.

    Raises:
        UserError: if it is another, or diffusers is not installed.
    """
    source = unwrapped(open_tensor_file(file), [_MARK])
    needed = {_MARK, "encoder.conv1.weight", "conv2.weight"}
    if missing := sorted(needed - source.stored.keys()):
        raise UserError(
            f"{file} is no autoencoder of Wan 2.1: it has no tensor {missing[0]}; for others (2.2) give diffusers' "
            "folder, with config.json"
        )
    try:
        from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
    except ImportError:
        raise UserError(f"{file} needs the library diffusers: pip install 'megadit[diffusers]'") from None
    shapes = source.shapes
    config = {"base_dim": shapes["encoder.conv1.weight"][0], "z_dim": shapes["conv2.weight"][0]}
    return CLASS, config, convert_wan_vae_to_diffusers(source.state_dict())
