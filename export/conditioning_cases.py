"""Test cases of exported networks with conditioning: every kind that the network was trained for, as in sampling.

In torch, conditioning is computed as in sampling: runs of tokens at known positions. In the graph, it is an input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.infer.conditioning.encode import encode_conditioning
from megadit.infer.conditioning.items import ConditioningItem, Media, Target
from megadit.infer.runtimes.exported import denoiser_inputs
from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.adapters import chosen_targets, load_adapter, remove, set_scale
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.registry import SavedNetwork

MEDIA: dict[str, Callable[[np.ndarray], dict[str, Any]]] = {
    "keyframes": lambda video: {"kind": "keyframe", "frame": len(video) // 2, "frames": video[:1]},
    "prefix": lambda video: {"frames": video[: 1 + len(video) // 2]},
    "suffix": lambda video: {"frames": video[1:]},
    "inpaint": lambda video: {"mask": np.indices(video[:1].shape[:3])[2] < video.shape[2] // 2},
}
"""Kind of conditioning -> fields of a `ConditioningItem` for it, except the kind, from a video (uint8 THWC)."""


def combined_conditioning(bundle: Bundle) -> dict[str, Media]:
    """Random conditioning media by name of a case: each kind by itself, or all at once in networks that read them as
    extra channels."""
    media = {kind: random_medium(kind, bundle.defaults, seed=4) for kind in bundle.conditionings}
    if bundle.config.conditioning.is_among:
        return {kind: (medium,) for kind, medium in media.items()}
    return {" and ".join(media): tuple(media.values())}


def required_conditioning(bundle: Bundle) -> Media:
    """Random media that the network cannot do without; none for most."""
    return () if bundle.config.conditioning.is_among else next(iter(combined_conditioning(bundle).values()))


def conditioning_inputs(
    media: Media, bundle: Bundle, inputs: Mapping[str, Tensor], seed: int = 4
) -> tuple[dict[str, Tensor], Conditioning]:
    """Add conditioning on `media` to the `inputs` of a graph, and return it also in torch's form.

    Noise level, text and frame rate are those of `inputs`.
    """
    target, batch = Target.of(bundle.defaults, bundle.config, bundle.load_tokenizer()), len(inputs["sigma"])
    encoded = encode_conditioning(media, bundle.conditionings, target, torch.device("cpu"), bundle.load_image_encoder())
    clean = CleanLatents.concatenate([encoded.clean] * batch)
    image = None if encoded.image_BIE is None else encoded.image_BIE.expand(batch, -1, -1)
    inputs_of_torch = {"clean": clean, "image_BIE": image, "guidance_B": inputs.get("guidance")}
    conditioning = Conditioning(inputs["text"], inputs["text_length"], inputs["fps"], **inputs_of_torch)
    noise_BCTHW = torch.randn(batch, *target.shape, generator=torch.Generator().manual_seed(seed))
    x_BCTHW = noise_BCTHW * (inputs["sigma"] ** 2 + bundle.config.sigma_data**2).sqrt()[:, None, None, None, None]
    found = denoiser_inputs(x_BCTHW, inputs["sigma"], conditioning)
    return {name: value for name, value in found.items() if name in inputs}, conditioning


def random_medium(kind: str, settings: SamplingSettings, seed: int = 0) -> ConditioningItem:
    """Random conditioning of a kind."""
    size = (settings.num_frames, settings.height, settings.width, 3)
    video = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return ConditioningItem(**{"kind": kind, "frames": video} | (MEDIA[kind](video) if kind in MEDIA else {}))


# Test cases of exported networks with adapters: different ones in each sample of a batch, several at once, and none.
# In torch, adapters are attached to linears as in sampling; in the graph, they are inputs.

SCALES: Mapping[str, Sequence[Sequence[float]]] = {
    "two in a slot": ([0.7, -1.0], [0.0, 1.0]),
    "one beside none": ([1.0, 0.0], [0.0, 0.0]),
}
"""Name of a case -> scales of two adapters, cycled over the samples."""
State = dict[str, Tensor]


def adapter_inputs(
    slots: AdapterInputs, batch: int, scales: Sequence[Sequence[float]]
) -> tuple[dict[str, Tensor], list[tuple[State, AdapterConfig, Tensor]]]:
    """Graph inputs of random adapters, and the adapters with their scales [B]; they share the rank of the inputs if it
    is more than one."""
    ranks = (slots.rank - slots.rank // 2, max(slots.rank // 2, 1))
    rows = [scales[sample % len(scales)] for sample in range(batch)]
    if slots.rank == 1:  # no rank left for a second one
        rows = [[one, 0.0 if one else other] for one, other in rows]
    adapters = []
    for number, rank in enumerate(ranks):
        state = random_state(slots, rank, seed=number)
        about = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=slots.targets)
        adapters.append((state, about, torch.tensor([row[number] for row in rows])))
    packed = [(slots.packed(state, about), scale_B) for state, about, scale_B in adapters]
    return slots.filled(batch, packed), adapters


def random_state(slots: AdapterInputs, rank: int, seed: int) -> State:
    """A random adapter state, whose changes are a fifth as large as the linears' inputs."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, target in chosen_targets(slots.config, slots.targets).items():
        shape = (rank, target.in_features)
        state[f"{name}.down"] = torch.randn(shape, generator=generator) * target.in_features**-0.5
        state[f"{name}.up"] = 0.1 * torch.randn(target.out_features, rank, generator=generator) * rank**-0.5
    return state


@contextmanager
def attached(dit: SavedNetwork, adapters: Sequence[tuple[State, AdapterConfig, Tensor]]) -> Iterator[None]:
    """Attach these adapters to the network, at their scales, within the block."""
    names = [f"case_{number}" for number in range(len(adapters))]
    try:
        for name, (state, about, scale_B) in zip(names, adapters, strict=True):
            load_adapter(dit, state, about, name)
            set_scale(dit, scale_B, name)
        yield
    finally:
        for name in names:
            remove(dit, name)
