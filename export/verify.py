"""Verifies that an exported network computes the same as the torch network; otherwise names the layer that differs.

The denoiser is compared by its raw prediction F, because D = c_skip x + c_out F hides errors of F at small sigma. F is
read inside the graph, and also computed from D where float32 is precise enough.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megadit.export.conditioning_cases import required_conditioning
from megadit.export.graph_checks import check_open_sides, check_products, check_types, opened_by
from megadit.export.layers import (
    Weights,
    changed_weight,
    first_difference,
    last_values,
    layer_of_failure,
    relative_error,
    session_with,
)
from megadit.export.networks import in_float32
from megadit.export.references import F_LAYER, REAL, Case, usual_prompt
from megadit.export.to_onnx import collect_after
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.network_spec import DENOISERS, NetworkSpec
from megadit.infer.runtimes.widen import widened
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.machine import computing_dtype
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import tracked
from megadit.models.text_encoders import NetworkTextEncoder, TextEncoder

EPS = {"fp16": torch.finfo(torch.float16).eps, "bf16": torch.finfo(torch.bfloat16).eps}
TOLERANCES = {"fp32": 1e-4, "fp16": 10 * EPS["fp16"], "bf16": 10 * EPS["bf16"], "int8": 8e-2, "fp8": 1.5e-1}
"""Relative error of F (or of other networks' outputs), by precision of the network.

float32 sums in another order differ by 1e-6 to 2e-5. Half precision: each rounding adds a fifth of eps (its deviation,
relative to values between two powers of two), and those of a path add in squares: 10 eps are 2,500 roundings, about 90
layers. 8 bits, against torch with the same 8 bits: half precision again, but a value in the middle between two 8-bit
numbers may be rounded to the other one, a whole step away. `tests/export/test_tolerances.py` measures all of them on
random networks of 2 to 28 layers, with random and real inputs and very different arithmetic on both sides: at most
2.8e-3 (fp16), 2.4e-2 (bf16), 4.0e-2 (int8) and 7.9e-2 (fp8). Tolerances leave a factor of 2 to 3.5."""
GRAPH_TOLERANCES = TOLERANCES | {"bf16": TOLERANCES["fp32"]}
"""Tolerances of graphs; bfloat16 graphs are compared in float32 (see `networks.comparable`)."""
ROUNDING_COSTS = {"int8": 2e-1, "fp8": 3e-1}
"""Relative error of F that 8-bit quantisation may cause, against no quantisation, with real prompts.

A product whose factors are rounded to steps of 1/127 of the largest value has an error of 1 to 2 %, to a mantissa of 3
bits one of 4 %; through the layers of the networks above this grew to at most 5.5e-2 (int8) and 1.4e-1 (fp8). Several
times as much means ranges that clip what is sampled."""
LEAST_PSNR = {"fp32": 50.0, "fp16": 35.0, "bf16": 25.0, "int8": 25.0, "fp8": 20.0}
"""Minimum PSNR of each frame of a sampled video against torch's (8 bits: against float32), in dB.

A relative error r of every F leaves r sigma_data in the latents: in a video in [-1, 1] with sigma_data = 0.5 that is
20 log10(2 / 0.5 r) dB: 52, 34, 26 and 22 for the errors of fp16, bf16, int8 and fp8. Solvers increase them."""


def check_runtime() -> None:
    """Raises UserError without ONNX Runtime, which runs the graphs."""
    if find_spec("onnxruntime") is None:
        raise UserError("exporting needs the library onnxruntime: pip install 'megadit[export]'")


# ------------------------------------------------------------------------------------------------ comparison


def verify_network(
    path: Path,
    spec: NetworkSpec,
    cases: list[Case],
    config: DiTConfig,
    precision: str,
    weights: Weights,
    rebuild: Callable[[], nn.Module],
    ranges: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """The report of a network that passes.

    `weights` are the hashes of torch's; `rebuild` builds the torch network again, to find a layer that differs;
    `ranges` are those of its 8-bit layers.

    Raises:
        UserError: if the network does not pass, with the case, the error and the first layer that differs.
    """
    check_open_sides(path, spec)
    check_types(path, spec, precision)
    check_products(path, spec, precision, ranges)
    layer = changed_weight(path, weights)
    collect_after(path)  # the graph has reference cycles
    if layer:
        raise UserError(f"the exported {spec.name} is not the network: a weight of the layer {layer} was changed")
    with _as_compared(path, precision) as graph:
        report = _compare(graph, spec, cases, config, GRAPH_TOLERANCES[precision], rebuild)
    opened = {"opened_by": opened_by(path)} if precision == "bf16" else {}
    return report | opened | ({"ranges": dict(ranges)} if ranges else {})


@contextmanager
def _as_compared(path: Path, precision: str) -> Iterator[Path]:
    """The graph itself, or a float32 copy in place of bfloat16 (see `networks.comparable`)."""
    if precision != "bf16":
        yield path
        return
    with widened(path, path.parent) as copy:
        yield copy


def _compare(
    path: Path,
    spec: NetworkSpec,
    cases: list[Case],
    config: DiTConfig,
    tolerance: float,
    rebuild: Callable[[], nn.Module],
) -> dict[str, Any]:
    errors: dict[str, dict[str, float]] = {}
    run = _graph(path, spec)
    for case in tracked(cases, f"{spec.name}: comparing"):
        try:
            values = run(case.inputs)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            layer = layer_of_failure(str(error)) or "without a name"
            raise UserError(
                f"{spec.name} does not run with {case.name}: the layer {layer} does not support these sizes "
                f"({str(error).strip().splitlines()[0]})"
            ) from error
        errors[case.name] = _errors(case, values, spec, config)
        if max(errors[case.name].values()) > tolerance:
            del run
            layer, size = first_difference(path, rebuild(), case.inputs, tolerance)
            kind = max(errors[case.name], key=errors[case.name].get)
            raise UserError(
                f"the exported {spec.name} is not the network: with {case.name} its {kind} differs by "
                f"{errors[case.name][kind]:.1e} (at most {tolerance:.0e}); the first layer that differs is {layer} "
                f"(by {size:.1e})"
            )
    return {"tolerance": tolerance, "worst": _worst(errors), "cases": errors}


def check_rounding(
    unrounded: list[Case], rounded: list[Case], precision: str, levels: tuple[float, float]
) -> dict[str, Any]:
    """The report of the 8-bit error: F of torch with the graph's roundings against torch without, for real prompts.

    Random inputs and noise levels outside of `levels`, which sampling does not use, are left out: they exceed the
    calibrated ranges.

    Raises:
        UserError: if the error is larger than the format explains.
    """
    pairs = zip(unrounded, rounded, strict=True)
    costs = {one.name: _largest(two.F, one.F) for one, two in pairs if _is_sampled(one, levels)}
    worst = max(costs, key=costs.get)
    if costs[worst] > ROUNDING_COSTS[precision]:
        raise UserError(
            f"{precision} changes what the denoiser predicts by {costs[worst]:.0%} ({worst}; at most "
            f"{ROUNDING_COSTS[precision]:.0%}): give more typical prompts (--calibration_prompts), or use fp16"
        )
    return {"rounding": {"worst": costs[worst], "most": ROUNDING_COSTS[precision], "cases": costs}}


def _is_sampled(case: Case, levels: tuple[float, float]) -> bool:
    return case.name.startswith(REAL) and levels[0] <= case.inputs["sigma"][0] <= levels[1]


def sampled_levels(name: str, bundle: Bundle) -> tuple[float, float]:
    """Lowest and highest noise level at which sampling calls the denoiser of this name."""
    low, high = bundle.defaults.sigma_min, bundle.defaults.sigma_max
    if bundle.boundary is None:
        return low, high
    return (bundle.boundary, high) if name == DENOISERS[0] else (low, bundle.boundary)


def verify_runtime(
    runtime: str,
    run: Callable[[Mapping[str, Tensor], tuple[int, ...]], Tensor],
    spec: NetworkSpec,
    cases: list[Case],
    config: DiTConfig,
    precision: str,
) -> dict[str, Any]:
    """The report of a network that passes with another `runtime`; `run` takes inputs and the shape of the output.
    Raises UserError if the network does not pass, with the case and the error."""
    errors = {}
    for case in tracked(cases, f"{spec.name}: comparing under {runtime}"):
        output = run(case.inputs, tuple(case.output.shape)).cpu()
        errors[case.name] = _errors(case, {spec.output: output}, spec, config)
        (error,) = errors[case.name].values()
        if error > TOLERANCES[precision]:
            raise UserError(
                f"{spec.name} under {runtime} is not the network: with {case.name} it differs by {error:.1e} (at "
                f"most {TOLERANCES[precision]:.0e}), though its graph passed"
            )
    return {"tolerance": TOLERANCES[precision], "worst": _worst(errors), "cases": errors}


def _worst(errors: Mapping[str, Mapping[str, float]]) -> float:
    return max(max(one.values()) for one in errors.values())


def _graph(path: Path, spec: NetworkSpec) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """The graph as a function of inputs to its output and, for the denoiser, F."""
    outputs = {spec.output: spec.output}
    if spec.is_denoiser and (found := last_values(path, [F_LAYER])):
        outputs["F"] = found[F_LAYER]
    session = session_with(path, set(outputs.values()))

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = session.run(list(outputs.values()), {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(np.asarray(v, np.float32)) for name, v in zip(outputs, values, strict=True)}

    return run


def _errors(case: Case, values: Mapping[str, Tensor], spec: NetworkSpec, config: DiTConfig) -> dict[str, float]:
    """Relative errors, each for the sample that differs most."""
    output = values[spec.output]
    if case.F is None:
        return {spec.output: _largest(output, case.output)}
    errors = {"F from D": errors_from_D(output, case, config)}
    if "F" in values:
        errors["F"] = _largest(values["F"], case.F)
    return errors


def errors_from_D(output: Tensor, case: Case, config: DiTConfig) -> float:
    """The relative error of F = (D - c_skip x) / c_out, minus the uncertainty from rounding D to float32."""
    x, sigma = case.inputs["x"].double(), case.inputs["sigma"].double()[:, None, None, None, None]
    c_skip, c_out, _, _ = parameterization_of(config).scalings(sigma)
    D, F = output.double(), case.F.double()
    found = (D - c_skip * x) / c_out
    rounding = 4 * torch.finfo(torch.float32).eps * ((c_skip * x).abs() + D.abs()) / c_out.abs()
    beyond = ((found - F).abs() - rounding).clamp(min=0)
    return max(map(relative_error, F + beyond, F))


def _largest(values: Tensor, references: Tensor) -> float:
    return max(map(relative_error, values, references))


def summary(report: Mapping[str, Any]) -> str:
    return f"{len(report['cases'])} cases, relative error at most {report['worst']:.1e}"


# ------------------------------------------------------------------------------------------------ whole videos


def compare_videos(bundle: Bundle, precision: str, num_steps: int, runtime: str = "onnx") -> dict[str, Any]:
    """Samples one video with torch and with `runtime`, and compares them frame by frame. Raises UserError if a frame
    differs too much."""
    settings = replace(bundle.defaults, num_steps=min(num_steps, bundle.defaults.num_steps), autoguidance="")
    prompt, frames = usual_prompt(bundle), {}
    device = "cuda" if runtime == "tensorrt" else "cpu"
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    of_torch = str(computing_dtype(torch.device(device), half)).removeprefix("torch.")
    for name, dtype in (("torch", of_torch), (runtime, "float32")):
        texts = _text_encoder(bundle)
        parts = {"text_encoder": texts, "tokenizer": in_float32(bundle.load_tokenizer())}
        pipeline = TextToVideo.from_pretrained(bundle, device=device, dtype=dtype, runtime=name, **parts)
        (video,) = pipeline.stream([prompt], settings, seeds=1, conditioning=required_conditioning(bundle))
        frames[name] = video.video.astype(np.float64)
        del pipeline  # before the next one is loaded
    mean_square_T = ((frames["torch"] - frames[runtime]) ** 2).mean(axis=(1, 2, 3))
    psnr_T = 10 * np.log10(255**2 / np.maximum(mean_square_T, 1e-3))  # at most 78 dB, for equal frames
    worst = int(psnr_T.argmin())
    if psnr_T[worst] < LEAST_PSNR[precision]:
        raise UserError(
            f"frame {worst} of a video sampled with {runtime} is {psnr_T[worst]:.1f} dB from torch's; at least "
            f"{LEAST_PSNR[precision]:.0f} dB are required, though every network passed on its own"
        )
    size = {"num_frames": len(psnr_T), "height": settings.height, "width": settings.width}
    return {"psnr": float(psnr_T[worst]), "least": LEAST_PSNR[precision], **size, "prompt": prompt}


def _text_encoder(bundle: Bundle) -> TextEncoder:
    """The bundle's text encoder; in float32 if it has a network, as it was exported."""
    encoder = bundle.load_text_encoder()
    return encoder.in_float32() if isinstance(encoder, NetworkTextEncoder) else encoder
