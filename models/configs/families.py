"""Structural differences between published diffusion transformers: a table with a row for each family.

Sizes, and differences between networks of one family, are fields of `DiTConfig`.

| family    | published as                                              | described in           |
|-----------|-----------------------------------------------------------|------------------------|
| `megadit` | trained by this package                                   | `dit.py`               |
| `dit`     | DiT-S/B/L/XL: images of a class                           | arXiv 2212.09748       |
| `cosmos`  | Cosmos-1.0 (Predict1), Predict2 and 2.5, 2B, 7B and 14B   | arXiv 2501.03575       |
| `nemo`    | the cross-attention DiT of NeMo's diffusion collection    | NeMo 2.x, `DiTConfig`  |
| `dfm`     | the variant of NeMo's successor DFM, with adaLN-LoRA      | DFM, `DiTModelProvider`|
| `moviegen`| MovieGen: Llama blocks, grouped queries, cross-attention  | arXiv 2410.13720       |
| `st_dit`  | attention along time and space in addition to full        | `blocks.py`, `axial.py`|
| `wan`     | Wan 2.1 and 2.2, text-to-video and image-to-video         | arXiv 2503.20314       |
| `vit`     | ViT, a classifier                                         | `vit.py`, 2010.11929   |
| `clip`    | CLIP: a ViT and a text tower with matching embeddings     | `clip.py`, 2103.00020  |

A second table has how they read the conditioning latents of a video:

| mode        | networks                               | conditioning                                           |
|-------------|----------------------------------------|--------------------------------------------------------|
| `tokens`    | what this package trains; Wan 2.2's 5B | clean tokens with their own noise level                |
| `augmented` | Cosmos-1.0 (Predict1) video-to-world   | tokens with a little noise, at the sample's level      |
| `marked`    | Cosmos-Predict2 and 2.5 video-to-world | clean tokens with their own noise level, not scaled    |
| `channels`  | Wan 2.1 and 2.2 image-to-video         | extra channels of the noisy latents                    |
"""

from dataclasses import dataclass, replace
from typing import Literal

Task = Literal["denoise", "classify", "match"]
ParameterizationName = Literal["edm", "vp", "vp_velocity", "flow"]
BetasName = Literal["ddpm", "stable_diffusion"]
"""DDPM noise schedules."""
_ALONG_T_H_W = ((0, 2), (1, 3), (2, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The structure of a family's networks."""

    block: str = "dit"
    """A key of `blocks.BLOCKS`."""
    task: Task = "denoise"
    """Task of the network: denoise samples (`dit.py`), classify them (logits, `vit.py`), or match them with texts
    (`clip.py`)."""
    cross_attention: bool = True
    """The network has cross-attention to text. False: it is conditioned on a class instead."""
    projects_text: bool = True
    """Text is projected to the network's width, with a learned null token. False: keys and values read the text
    features directly, and the null token is zeros."""
    text_mlp: bool = False
    """The projection has two layers, and the null token is the projection of zeros instead of a learned token."""
    linear_bias: bool = False
    """Linears of attention, MLP and modulation have biases."""
    patch_bias: bool = True
    """The first linear, which reads patches, has a bias."""
    patch_layernorm: bool = False
    """The tokens are normalised once before the first block, positions included (networks with a class token)."""
    gated_mlp: bool = False
    """The MLP is SwiGLU (arXiv 2002.05202): two products up, one down."""
    norm_across_heads: bool = False
    """Queries and keys are normalised over all heads together, not per head."""
    text_reaches_only_mlp: bool = False
    """Cross-attention of a MovieGen block reads tokens that are not normalised, and its result is the MLP's input
    instead of being added to the tokens; both modulated norms share their weights."""
    normalized_positions: bool = True
    """The sum of a token's learned positions is scaled to unit mean square."""
    gelu_tanh: bool = False
    """The MLP's GELU in its tanh approximation."""
    sincos_axes: tuple[tuple[int, int], ...] = _ALONG_T_H_W
    """Channel order of sin-cos positions: (axis, fraction of the width) each; axes are t, h, w."""

    sigma_scale: float = 1.0
    """The noise level is multiplied by this before its sinusoids are taken."""
    sigma_frequencies: int | None = 128
    """Number of sinusoids of the noise level; None means the network's width."""
    cos_first: bool = False
    fps: Literal["embedded", "padded", "rotary", "absent"] = "embedded"
    """How the frame rate enters: embedded; embedded 256 wide and padded with zeros; as the scale of rotary time;
    not."""
    condition_layernorm: bool = False
    """The sum of the embeddings is RMS-normalised."""
    shared_modulation: bool = False
    """The embedding is the normalised sinusoids themselves; their MLP gives a vector that is added to every
    modulation."""

    single_modulation: bool = False
    """One linear modulates all blocks, each of which adds its own table (adaLN-single, arXiv 2310.00426)."""
    modulation_groups: int = 1
    """Number of modulations, each with its own low-rank bottleneck, into which a block's is split."""
    final_modulation: bool = True
    """The last linear follows a modulated norm. False: it reads the blocks' output directly."""
    final_rms: bool = False
    """The norm before the last linear is an RMS norm with a learned weight."""
    final_bias: bool = True


FAMILIES: dict[str, Structure] = {
    "megadit": Structure(sigma_scale=100.0),
    "dit": Structure(
        block="class_dit",
        cross_attention=False,
        linear_bias=True,
        gelu_tanh=True,
        sincos_axes=((2, 1), (1, 1)),
        cos_first=True,
        fps="absent",
    ),
    "cosmos": Structure(
        projects_text=False,
        patch_bias=False,
        sigma_frequencies=None,
        cos_first=True,
        fps="rotary",
        shared_modulation=True,
        modulation_groups=3,
        final_bias=False,
    ),
    "nemo": Structure(
        projects_text=False,
        sincos_axes=((0, 2), (2, 3), (1, 3)),
        sigma_frequencies=None,
        fps="padded",
        condition_layernorm=True,
        final_modulation=False,
    ),
    "dfm": Structure(
        projects_text=False,
        sincos_axes=((0, 2), (2, 3), (1, 3)),
        sigma_frequencies=None,
        fps="padded",
        final_modulation=False,
    ),
    "moviegen": Structure(
        block="moviegen", gated_mlp=True, normalized_positions=False, sigma_scale=100.0, final_rms=True
    ),
    "st_dit": Structure(block="st_dit", sigma_scale=100.0),
    "wan": Structure(
        block="wan",
        text_mlp=True,
        linear_bias=True,
        norm_across_heads=True,
        gelu_tanh=True,
        sigma_scale=1000.0,
        cos_first=True,
        fps="absent",
        single_modulation=True,
    ),
    "vit": Structure(block="vit", task="classify", cross_attention=False, linear_bias=True, fps="absent"),
    "clip": Structure(
        block="vit",
        task="match",
        cross_attention=False,
        linear_bias=True,
        patch_bias=False,
        patch_layernorm=True,
        fps="absent",
    ),
}

COMPAT: dict[tuple[str, str], Structure] = {
    ("moviegen", "nemo"): Structure(
        block="moviegen",
        gated_mlp=True,
        text_reaches_only_mlp=True,
        normalized_positions=False,
        projects_text=False,
        sigma_frequencies=None,
        fps="padded",
        condition_layernorm=True,
        final_modulation=False,
    ),
    ("cosmos", "predict2_5"): replace(FAMILIES["cosmos"], fps="absent"),
}
"""(family, `DiTConfig.compat`): variants of a family by another package or version, for loading its checkpoints."""

ConditioningModeName = Literal["tokens", "augmented", "marked", "channels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningMode:
    """How a network reads conditioning latents; `conditioning_sigma` is a field of its configuration."""

    is_among: bool = True
    """Conditioning latents replace noisy ones at their positions. False: latents of a whole video, grey where there is
    no conditioning, are extra channels of all noisy latents, and every position is predicted."""
    has_own_level: bool = True
    """Conditioning tokens are embedded with noise level `conditioning_sigma`. False: with that of the sample."""
    is_noised: bool = False
    """Noise of level `conditioning_sigma` is added to conditioning latents."""
    is_scaled: bool = True
    """Conditioning latents are scaled like latents at `conditioning_sigma`. False: like clean ones."""
    marks: int = 0
    """Number of mask channels, 1 where there is conditioning: none, one, or one for each pixel frame of a latent."""


CONDITIONING_MODES: dict[str, ConditioningMode] = {
    "tokens": ConditioningMode(),
    "augmented": ConditioningMode(has_own_level=False, is_noised=True, marks=1),
    "marked": ConditioningMode(is_scaled=False, marks=1),
    "channels": ConditioningMode(is_among=False, marks=4),
}
