"""Wan's autoencoders in their original releases (`Wan2.1_VAE.pth`, `Wan2.2_VAE.pth`) and ComfyUI's
(`wan_2.1_vae.safetensors`, `wan2.2_vae.safetensors`): one file each, whose tensors determine their sizes."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import TensorSource, renamed_by
from megadit.models.storage.wrapped import open_tensor_file, unwrapped

CLASS = "AutoencoderKLWan"
FILES = "Wan2.*_VAE.pth"
"""Pattern of the VAE's file in a released folder."""
SUFFIXES = (".pth", ".pt", ".safetensors")
_MARK = "decoder.middle.0.residual.0.gamma"
_OF_2_2 = "encoder.downsamples.0.downsamples.0.residual.0.gamma"
_NEEDED = (_MARK, "encoder.conv1.weight", "conv2.weight", "decoder.head.0.gamma", "decoder.head.2.weight")
_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
"""Mean and standard deviation of Wan 2.2's latents, which its file lacks."""
_NAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.\d+\.(resample|time_conv)\.", r".\1_blocks.\2.\1sampler.\3."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.", r".\1_blocks.\2.resnets."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Mapping of Wan 2.2's tensor names to those of diffusers."""


def is_wan_file(path: Path) -> bool:
    """Whether the file `path` has the name of such a VAE."""
    return "vae" in path.name.lower() and path.suffix in SUFFIXES and path.is_file()


def read_wan(file: Path) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(class in diffusers, settings, tensors with diffusers' names) of the autoencoder in a file.

    Raises:
        UserError: if it is another network, or diffusers is not installed.
    """
    source = unwrapped(open_tensor_file(file), [_MARK])
    if missing := [name for name in _NEEDED if name not in source.stored]:
        raise UserError(
            f"{file} is no autoencoder of Wan 2.1 or 2.2: it has no tensor {missing[0]}; for others give "
            "diffusers' folder, with config.json"
        )
    return (CLASS, *(_wan_2_2(file, source) if _OF_2_2 in source.stored else _wan_2_1(file, source)))


def _wan_2_1(file: Path, source: TensorSource) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
    except ImportError:
        raise UserError(f"{file} needs the library diffusers: pip install 'megadit[diffusers]'") from None
    shapes = source.shapes
    config = {"base_dim": shapes["encoder.conv1.weight"][0], "z_dim": shapes["conv2.weight"][0]}
    return config, convert_wan_vae_to_diffusers(source.state_dict())


def _wan_2_2(file: Path, source: TensorSource) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shapes = source.shapes
    base_dim, in_channels, *_ = shapes["encoder.conv1.weight"]
    if (channels := shapes["conv2.weight"][0]) != len(_MEAN):
        raise UserError(f"{file} has latents of {channels} channels, and Wan 2.2's have {len(_MEAN)}: their statistics")
    times = (f"encoder.downsamples.{place}.downsamples.2.time_conv.weight" for place in range(3))
    side = math.isqrt(in_channels // 3)
    config = {
        "base_dim": base_dim,
        "decoder_base_dim": shapes["decoder.head.0.gamma"][0],
        "z_dim": channels,
        "temperal_downsample": [name in shapes for name in times],
        "is_residual": True,
        "in_channels": in_channels,
        "out_channels": shapes["decoder.head.2.weight"][0],
        "patch_size": side,
        "scale_factor_spatial": 8 * side,
        "latents_mean": list(_MEAN),
        "latents_std": list(_STD),
    }
    return config, {renamed_by(_NAMES, name): tensor for name, tensor in source.state_dict().items()}
