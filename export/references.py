"""Test inputs and torch outputs of an exported network, with which its graph and engine are compared.

Random sizes and values; for the denoiser also every noise level with a real prompt, each kind of conditioning,
adapters.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megadit.export.compared import compared_sizes
from megadit.export.conditioning_cases import (
    SCALES,
    adapter_inputs,
    attached,
    combined_conditioning,
    conditioning_inputs,
)
from megadit.export.layers import recorded_outputs
from megadit.export.signatures import sample_inputs
from megadit.infer.runtimes.exported import denoiser_inputs
from megadit.infer.runtimes.network_spec import CHANNEL_INPUTS, Axis, NetworkSpec
from megadit.models.bundle import Bundle
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.progress import tracked

SIGMAS = (0.002, 0.02, 0.2, 1.0, 5.0, 20.0, 80.0)
CONDITIONING_SIGMA = 5.0
REAL = "sigma"
"""Prefix of the names of cases with a real prompt."""
F_LAYER = "denoiser.dit"
"""Name of the module that computes F."""
PROMPTS = {"class_labels": "0"}
USUAL_PROMPT = "a red seven moving left"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Inputs of a network, and torch's output for them."""

    name: str
    inputs: dict[str, Tensor]
    output: Tensor
    F: Tensor | None = None
    """Raw prediction of a denoiser; None for other networks."""


def reference_cases(
    network: nn.Module, spec: NetworkSpec, bundle: Bundle, slots: AdapterInputs | None = None
) -> list[Case]:
    """Random inputs at the extremes of every axis and at the best sizes; for the denoiser also every sigma with a real
    text, each kind of conditioning, and adapters in `slots`."""
    shrunk = partial(_compared, spec, bundle)
    inputs = {}
    for extreme in ("min", "opt", "max"):
        sizes = shrunk({name: getattr(axis, extreme) for name, axis in spec.axes.items()})
        inputs[f"all sides {extreme}"] = sample_inputs(spec, sizes, seed=1)
    for name, axis in spec.axes.items():
        if not axis.is_fixed:
            sizes = shrunk({other.name: other.min for other in spec.axes.values()} | {name: axis.max})
            inputs[f"{name} max, others min"] = sample_inputs(spec, sizes, seed=2)
    if spec.is_denoiser:
        inputs |= {f"{REAL} {sigma}": inputs_at(spec, sigma, bundle) for sigma in SIGMAS}
    named = tracked(inputs.items(), f"{spec.name}: test cases in torch")
    cases = [reference(network, name, values) for name, values in named]
    if spec.is_denoiser:
        usual = inputs_at(spec, CONDITIONING_SIGMA, bundle)
        for kinds, media in combined_conditioning(bundle).items():
            inputs, conditioning = conditioning_inputs(media, bundle, usual)
            cases.append(reference(network, f"conditioning {kinds}", usual | inputs, conditioning))
        cases += [] if slots is None else _adapter_cases(network, usual, slots)
    return cases


def _compared(spec: NetworkSpec, bundle: Bundle, sizes: dict[str, int]) -> dict[str, int]:
    """`compared_sizes` for networks that process videos; else `sizes`."""
    if bundle.kind != "video" or spec.name == "text_encoder":
        return sizes
    tokenizer = bundle.load_tokenizer()
    return compared_sizes(spec, sizes, bundle.config, tokenizer.temporal_compression * tokenizer.spatial_compression**2)


def _adapter_cases(network: nn.Module, usual: dict[str, Tensor], slots: AdapterInputs) -> list[Case]:
    """Cases with adapters; in torch they are attached to linears, not adapter inputs."""
    cases = []
    for name, scales in SCALES.items():
        inputs, adapters = adapter_inputs(slots, len(usual["x"]), scales)
        with attached(network.denoiser.dit, adapters):
            found = reference(network, f"adapters, {name}", usual)
        cases.append(replace(found, inputs=usual | inputs))
    return cases


def inputs_at(spec: NetworkSpec, sigma: float, bundle: Bundle) -> dict[str, Tensor]:
    """Inputs of the best size: a real prompt and an empty text, latents with noise of this level, no conditioning
    (random values for extra channels) and no adapter."""
    sizes = _compared(spec, bundle, {name: axis.opt for name, axis in spec.axes.items()})
    features = bundle.load_text_encoder().encode([usual_prompt(bundle), ""])
    text_length, longest = features.length_B, features.features_BLE.shape[1]
    if isinstance(axis := spec.axes.get("text"), Axis):
        sizes["text"] = min(max(longest, axis.min), axis.max)
    inputs = sample_inputs(spec, sizes, seed=3)
    batch, length = inputs["text"].shape[:2]
    text_BLE = torch.zeros_like(inputs["text"])
    rows = torch.arange(batch) % 2
    text_BLE[:, : min(longest, length)] = features.features_BLE[rows, :length]
    noise = inputs["x"] / inputs["x"].std()
    x = noise * (sigma**2 + bundle.config.sigma_data**2) ** 0.5
    pooled_BP = None if features.pooled_BP is None else features.pooled_BP[rows]
    conditions = {"pooled_BP": pooled_BP, "guidance_B": inputs.get("guidance")}
    fps_B = inputs.get("fps", torch.zeros(batch))
    conditioning = Conditioning(text_BLE, text_length[rows].clamp(max=length), fps_B, **conditions)
    values = denoiser_inputs(x, torch.full((batch,), sigma), conditioning)
    if not bundle.config.conditioning.is_among:  # it is always used with conditioning
        values |= {name: inputs[name] for name in CHANNEL_INPUTS if name in inputs}
    return {name: values[name] if name in values else torch.zeros_like(of_slot) for name, of_slot in inputs.items()}


def usual_prompt(bundle: Bundle) -> str:
    """A prompt that the bundle's text encoder knows."""
    return PROMPTS.get(bundle.manifest["components"]["text_encoder"], USUAL_PROMPT)


@torch.no_grad()
def reference(
    network: nn.Module, name: str, inputs: dict[str, Tensor], conditioning: Conditioning | None = None
) -> Case:
    """Run the torch network on these inputs; a denoiser with the `conditioning` that they represent."""
    raw: dict[str, Tensor] = {}

    def keep(layer: str, value: Tensor) -> None:
        if layer == F_LAYER:
            raw["F"] = value.float()

    with recorded_outputs(network, keep):
        if conditioning is None:
            output = network(*inputs.values())
        else:
            output = network.denoiser(inputs["x"], inputs["sigma"], conditioning)
    return Case(name=name, inputs=inputs, output=output, F=raw.get("F"))
