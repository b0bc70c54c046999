"""Signatures of the exported networks: names and types of inputs and outputs, dynamic axes, profiles, sample inputs.

Users specify videos (`--profile frames=1,49,121`); graphs process latents. `Profiles` describes the former, a
`NetworkSpec` the latter, and `specs` converts one to the other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import DENOISERS, INPUTS, OUTPUTS, Axis, NetworkSpec, Shape, TensorSpec
from megadit.models.bundle import Bundle
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.text_encoders import NetworkTextEncoder, TextEncoder
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import VideoTokenizer

GUIDANCE_BATCH = 2
"""Conditional and unconditional pass of guidance, which share one denoiser call."""
LONGEST_TEXT, USUAL_TEXT = 128, 16
"""Maximum and best text length for encoders that do not truncate."""
MOST_KEYFRAMES = 8
"""Maximum keyframes (conditioning images) of a video of the largest size; smaller videos may have more."""
Range = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiles:
    """(smallest, best, largest) of each variable size; sizes in pixels and frames of the decoded video."""

    batch: Range
    """Videos at once; guidance doubles the denoiser's batch, unless it is guidance-distilled."""
    frames: Range
    height: Range
    width: Range
    text: Range
    """Text tokens."""


def default_profiles(bundle: Bundle, tokenizer: VideoTokenizer, text_encoder: TextEncoder) -> Profiles:
    """Best: the bundle's defaults. Largest: up to twice their sides and frames, as far as the network can, and four
    videos; for classifiers and CLIP, 32 images."""
    defaults, side = bundle.defaults, tokenizer.spatial_compression * bundle.config.patch_spatial
    frames = _frames_of_patches(defaults.num_frames, bundle.config, tokenizer)
    most_frames = _frames_of_patches(2 * defaults.num_frames, bundle.config, tokenizer)
    most_height, most_width = 2 * defaults.height, 2 * defaults.width
    if (latents := bundle.config.most_latent_frames) is not None:
        most_frames = min(most_frames, 1 + (latents - 1) * tokenizer.temporal_compression)
    if (positions := bundle.config.learned_positions) is not None:
        most_height, most_width = min(most_height, positions[1] * side), min(most_width, positions[2] * side)
    longest = getattr(text_encoder, "max_length", 1) or LONGEST_TEXT
    is_filled = getattr(text_encoder, "text_padding", "none") != "none"
    return Profiles(
        batch=(1, 1, 4) if bundle.kind == "video" else (1, 8, 32),
        frames=(_frames_of_patches(1, bundle.config, tokenizer), frames, most_frames),
        height=(side, defaults.height, most_height),
        width=(side, defaults.width, most_width),
        text=(1, longest if is_filled else min(longest, USUAL_TEXT), longest),
    )


def _frames_of_patches(frames: int, config: NetworkConfig, tokenizer: VideoTokenizer) -> int:
    """Round a number of frames up to one whose latents are whole temporal patches."""
    patch, temporal = config.patch_temporal, tokenizer.temporal_compression
    latents = 1 + (tokenizer.frames_covering(frames) - 1) // temporal
    return 1 + (-(-latents // patch) * patch - 1) * temporal


def parse_profiles(clean: Sequence[str], defaults: Profiles) -> Profiles:
    """`defaults`, overridden by texts `name=min,opt,max` or `name=size` (all three). Raises UserError for an unknown
    name, and for invalid or unordered numbers."""
    names = [field.name for field in fields(Profiles)]
    for text in clean:
        name, _, value = text.partition("=")
        choose_one(name, names, f"--profile {text}: there is no profile {name!r}")
        try:
            sizes = [int(part) for part in value.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) not in (1, 3):
            raise UserError(f"--profile {text}: write {name}=min,opt,max, three whole numbers")
        low, best, high = sizes * 3 if len(sizes) == 1 else sizes
        if not 1 <= low <= best <= high:
            raise UserError(f"--profile {text}: must be 1 <= min <= opt <= max, got {low}, {best}, {high}")
        defaults = replace(defaults, **{name: (low, best, high)})
    return defaults


def specs(
    profiles: Profiles,
    config: NetworkConfig,
    tokenizer: VideoTokenizer,
    text_encoder: TextEncoder | None = None,
    conditionings: Collection[str] = (),
    slots: AdapterInputs | None = None,
    denoisers: Sequence[str] = DENOISERS[:1],
    image_encoder: ImageEncoder | None = None,
) -> dict[str, NetworkSpec]:
    """The signature of each network, by name; a text encoder's only if it is a network.

    `conditionings` are the kinds that the denoiser was trained for; `slots` its adapter inputs; `denoisers` the names
    of the denoisers, all with `config`; `image_encoder` computes the image features that they read.

    Raises:
        UserError: for sizes that the tokenizer or the network does not support; suggests the nearest ones.
    """
    latents = zip(*(_latent_sizes(profiles, place, config, tokenizer) for place in range(3)), strict=True)
    patches = (config.patch_temporal, config.patch_spatial, config.patch_spatial)
    temporal, spatial = tokenizer.temporal_compression, tokenizer.spatial_compression
    time, height, width = (
        _axis(name, sizes, step=step)
        for name, sizes, step in zip(("time", "height", "width"), latents, patches, strict=True)
    )
    video = (
        _axis("frames", profiles.frames, step=temporal, offset=1),
        _axis("video_height", profiles.height, step=spatial),
        _axis("video_width", profiles.width, step=spatial),
    )
    passes = GUIDANCE_BATCH if config.guidance_embedding_range is None else 1
    doubled = (profiles.batch[0], passes * profiles.batch[1], passes * profiles.batch[2])
    batch, one = _axis("batch", doubled), _axis("batch", (1, 1, max(2, profiles.batch[2])))
    # classes replace texts by one token, whatever the longest text is
    text = _axis("text", profiles.text) if config.has_text else 1
    latent = (config.in_channels, time, height, width)
    seen = _longer(time, conditionings, config)
    x = _floats(batch, config.in_channels, seen, height, width)
    if config.conditioning.is_among:
        clean = {"clean": x, "is_clean": _ints(seen, height, width, below=2), "times": _floats(seen)}
    else:
        clean = {"clean": x, "is_clean": _ints(config.conditioning.marks, *latent[1:], below=2)}
    if image_encoder is not None:
        clean["image"] = _floats(batch, config.image_positions or image_encoder.num_tokens, config.image_size)
    is_network = isinstance(text_encoder, NetworkTextEncoder)
    texts = {"text_encoder": _text_encoder(text_encoder, one, text)} if is_network else {}
    conditions = {
        "text": _floats(batch, text, config.crossattn_emb_size),
        "text_length": _ints(batch),
        "fps": _floats(batch),
        "guidance": _floats(batch),
        "pooled": _floats(batch, config.pooled_size),
    }
    seen_by_denoisers = {
        "x": x,
        "sigma": _floats(batch),
        **{name: conditions[name] for name in config.conditions},
        **(clean if conditionings else {}),
    }
    further = () if slots is None else adapter_input_tensors(slots, batch)
    free = (replace(axis, step=1) for axis in latent[1:])  # a tokenizer's networks have no patches
    networks = texts | {
        **{name: _network(name, seen_by_denoisers, further=further) for name in denoisers},
        "video_decoder": _network("video_decoder", {"latents": _floats(one, config.in_channels, *free)}),
        "video_encoder": _network("video_encoder", {"video": _floats(one, 3, *video)}),
    }
    if not getattr(tokenizer, "streams", False):
        return networks
    # a streaming tokenizer is called once for each latent frame, which no graph can: torch runs it
    return {name: network for name, network in networks.items() if not name.startswith("video_")}


def embedding_specs(profiles: Profiles, bundle: Bundle, tokenizer: VideoTokenizer) -> dict[str, NetworkSpec]:
    """The signature of a classifier, or of CLIP's towers; images all have one size. Raises UserError if `profiles` have
    several sizes."""
    size = bundle.defaults
    if (profiles.frames[2], profiles.height[2], profiles.width[2]) != (size.num_frames, size.height, size.width):
        raise UserError(f"--profile: a {bundle.kind} takes images of one size; only batch and text may vary")
    latent = tokenizer.latent_shape(size.num_frames, size.height, size.width)
    batch = _axis("batch", profiles.batch)
    pictures = {"x": _floats(batch, *latent)}
    if bundle.kind == "classifier":
        return {"classifier": _network("classifier", pictures)}
    tokens = _ints(batch, _axis("text", profiles.text), below=bundle.config.text_tower.num_words)
    return {
        "image_tower": _network("image_tower", pictures),
        "text_tower": _network("text_tower", {"tokens": tokens, "length": _ints(batch)}),
    }


def _floats(*axes: Axis | int) -> dict[str, Any]:
    return {"dtype": "float32", "axes": axes}


def _ints(*axes: Axis | int, below: int | None = None) -> dict[str, Any]:
    return {"dtype": "int64", "axes": axes, "below": below}


def _network(name: str, inputs: Mapping[str, dict[str, Any]], further: tuple[TensorSpec, ...] = ()) -> NetworkSpec:
    """The signature of a network from its inputs by name, ordered as in `INPUTS`, of which some may be missing;
    `further` come after them."""
    tensors = tuple(TensorSpec(name=each, **inputs[each]) for each in INPUTS[name] if each in inputs)
    return NetworkSpec(name=name, inputs=tensors + further, output=OUTPUTS[name])


def adapter_input_tensors(slots: AdapterInputs, batch: Axis) -> tuple[TensorSpec, ...]:
    """Adapter inputs, for each sample of a batch."""
    return tuple(TensorSpec(name=name, dtype="float32", axes=(batch, *sides)) for name, sides in slots.inputs.items())


def _longer(time: Axis, conditionings: Collection[str], config: NetworkConfig) -> Axis | int:
    """The latent frames of a video with extra conditioning frames; always one for an image network."""
    if config.most_latent_frames == 1:
        return 1
    extra = time.max if "edit" in conditionings else 0
    if {"last_frame", "keyframes"} & set(conditionings):
        extra += MOST_KEYFRAMES * config.patch_temporal
    return replace(time, max=time.max + extra)


def _text_encoder(text_encoder: NetworkTextEncoder, batch: Axis, text: Axis) -> NetworkSpec:
    inputs = (_ints(batch, *(each.places or (text,)), below=each.below) for each in text_encoder.token_inputs)
    return _network("text_encoder", dict(zip(INPUTS["text_encoder"], inputs, strict=False)))


def _axis(name: str, sizes: Sequence[int], *, step: int = 1, offset: int = 0) -> Axis:
    low, best, high = sizes
    return Axis(name=name, min=low, opt=best, max=high, step=step, offset=offset % step if step > 1 else 0)


def _latent_sizes(
    profiles: Profiles, place: int, config: NetworkConfig, tokenizer: VideoTokenizer
) -> tuple[int, int, int]:
    frames, height, width = (getattr(profiles, name)[place] for name in ("frames", "height", "width"))
    try:
        sizes = tokenizer.latent_shape(frames, height, width)[1:]
        config.check_grid(config.token_grid(*sizes))
    except UserError as error:
        raise UserError(f"--profile, {('min', 'opt', 'max')[place]} {frames}x{height}x{width}: {error}") from None
    return sizes


def trace_sizes(spec: NetworkSpec) -> dict[str, int]:
    """Sizes to trace with: small, and all different, so that no two axes are identified.

    Sizes of the video come first: a network may have learned positions for few larger ones. An axis of one size has
    that one, which the graph then is made for.
    """
    sizes, of_video, others = {}, 2, 5
    for axis in spec.axes.values():
        if axis.is_fixed:
            sizes[axis.name] = axis.min
        elif axis.name in ("batch", "text"):
            sizes[axis.name], others = others, others + 2
        else:
            sizes[axis.name], of_video = axis.offset + axis.step * of_video, of_video + 1
    return sizes


def sample_inputs(spec: NetworkSpec, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Random inputs in the ranges that the network is used with.

    For the denoiser: sigmas spread over 0.002 to 80, latents with that much noise, texts of all lengths down to none
    (the unconditional pass), videos and an image.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {tensor.name: tensor.shape(sizes) for tensor in spec.inputs}

    def normal(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator)

    if spec.name == "text_encoder":
        tokens = {"tokens": torch.randint(spec.inputs[0].below, shapes["tokens"], generator=generator)}
        return tokens | ({"mask": _sample_mask(*shapes["mask"])} if "mask" in shapes else {})
    if spec.name == "text_tower":
        tokens = torch.randint(spec.inputs[0].below, shapes["tokens"], generator=generator)
        return {"tokens": tokens, "length": _sample_mask(*shapes["tokens"]).sum(1)}
    if not spec.is_denoiser:
        (name,) = shapes
        return {name: 0.5 * normal(shapes[name])}
    (batch,) = shapes["sigma"]
    sigma_B = torch.logspace(-2.7, 1.9, batch) if batch > 1 else torch.tensor([1.0])
    longest = shapes["text"][1]
    length_B = torch.arange(batch).flip(0) * longest // max(batch - 1, 1)
    inputs = {
        "x": normal(shapes["x"]) * (1 + sigma_B**2).sqrt()[:, None, None, None, None],
        "sigma": sigma_B,
        "text": normal(shapes["text"]),
        "text_length": length_B,
        "fps": torch.tensor([24.0 if place % 3 else 0.0 for place in range(1, batch + 1)]),
        "guidance": 1.0 + torch.arange(batch) % 4,
    }
    inputs = {name: value for name, value in inputs.items() if name in shapes}
    inputs |= {"pooled": normal(shapes["pooled"])} if "pooled" in shapes else {}
    inputs |= _sample_conditioning(shapes, normal) if "clean" in shapes else {}
    return inputs | {name: _sample_adapters(normal(shape)) for name, shape in shapes.items() if name not in inputs}


def _sample_mask(batch: int, longest: int) -> Tensor:
    """Mask of texts of several lengths."""
    length_B = (torch.arange(batch) % longest + 1).flip(0)
    return (torch.arange(longest) < length_B[:, None]).long()


def _sample_adapters(factors: Tensor) -> Tensor:
    """A different adapter in every sample; if there are several, the last sample has none."""
    is_filled = torch.arange(len(factors)) < max(1, len(factors) - 1)
    return factors * factors.shape[-1] ** -0.5 * is_filled[:, None, None, None]


def _sample_conditioning(shapes: Mapping[str, Shape], normal: Callable[[Shape], Tensor]) -> dict[str, Tensor]:
    """Mask with every other column of latents as conditioning, and times with the last frame between two others."""
    *_, frames, _, width = shapes["is_clean"]
    is_clean = (torch.arange(width) // 2 % 2).expand(shapes["is_clean"]).clone()
    is_clean[..., -1, :, :] = 1
    times_T = torch.arange(float(frames))
    times_T[-1] -= 0.25
    found = {"clean": 0.5 * normal(shapes["clean"]), "is_clean": is_clean, "times": times_T}
    if "image" in shapes:
        found["image"] = normal(shapes["image"])
    return {name: value for name, value in found.items() if name in shapes}
