"""`megadit benchmark cpu`: one network of a published size on this CPU, ours and diffusers', under each runtime.

    megadit benchmark cpu --threads 1 --rounds 7 --json figures.json

Both networks have equal width, depth, heads, tokens and text, and random weights. The candidates take turns, so that
each round gives a ratio to diffusers' network in torch; figures: infer/BENCHMARKS.md.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megadit.export.networks import DenoiserGraph
from megadit.export.quantize import quantise, recorded_ranges
from megadit.export.signatures import sample_inputs, trace_sizes
from megadit.export.to_onnx import export_onnx
from megadit.infer.benchmarks.beside_diffusers import (
    COSMOS,
    TEXT_LENGTH,
    BenchmarkOptions,
    Inputs,
    Setting,
    networks,
    training_steps,
)
from megadit.infer.benchmarks.profile import in_turns
from megadit.infer.runtimes.network_spec import Axis, NetworkSpec, TensorSpec
from megadit.infer.runtimes.onnx import OnnxNetwork
from megadit.infer.runtimes.openvino import OpenVinoNetwork
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.diffusion.parameterization import EDMDenoiser, parameterization_of
from megadit.models.machine import describe, describe_in_words
from megadit.models.networks.conditioning import Conditioning
from megadit.models.ops.crossover import tune_for_cpu
from megadit.models.shared.cli.options import command
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json

SIGMA = 1.0
BASELINE = "diffusers, torch"
EIGHT_BITS = "megadit in int8"
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One contestant: processor seconds of each round, beside those of its baseline, and its error."""

    name: str
    seconds: list[float]
    of_baseline: list[float]
    error: float | None
    """Largest difference from the same network in torch, as a part of its largest value; None for steps."""

    @property
    def ratios(self) -> list[float]:
        return sorted(ours / theirs for ours, theirs in zip(self.seconds, self.of_baseline, strict=True))


class DiffusersDenoiser(nn.Module):
    """D(x; sigma) by diffusers' network, behind the same preconditioning as ours."""

    def __init__(self, setting: Setting, network: nn.Module) -> None:
        super().__init__()
        self.network, self._call = network, setting.call_theirs
        self._scalings = parameterization_of(setting.config).scalings

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        c_skip, c_out, c_in, c_noise = self._scalings(sigma.reshape(-1, 1, 1, 1, 1))
        unread_B = torch.zeros_like(sigma)
        inputs = Inputs(c_in * x, c_noise.flatten(), Conditioning(text, unread_B.long(), unread_B))
        return c_skip * x + c_out * self._call(self.network, inputs)


def candidates(setting: Setting, folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, a call that samples once): both networks under each runtime that is installed."""
    ours, theirs = networks(setting, torch.float32)
    inputs = Inputs.of(setting, torch.float32)
    x, sigma, conditioning = inputs.x_BCTHW, torch.full((1,), SIGMA), inputs.conditioning
    theirs_named = {"x": x, "sigma": sigma, "text": conditioning.text_BLE}
    named = theirs_named | {"text_length": conditioning.text_length_B, "fps": conditioning.fps_B}
    diffusers = DiffusersDenoiser(setting, theirs).eval().requires_grad_(False)
    eager = TorchDenoiser(ours)
    graph = DenoiserGraph(EDMDenoiser(ours)).eval().requires_grad_(False)
    yield BASELINE, lambda: diffusers(**theirs_named)
    yield "megadit, torch", lambda: eager(x, sigma, conditioning)
    with recorded_ranges(ours) as ranges:
        eager(x, sigma, conditioning)
    for who, network, held, spec in (
        ("diffusers", diffusers, theirs_named, fixed_spec(theirs_named)),
        ("megadit", graph, named, dynamic_spec(setting, named)),
        (EIGHT_BITS, graph, named, dynamic_spec(setting, named)),
    ):
        path, traced = folder / f"{who}.onnx", sample_inputs(spec, trace_sizes(spec))
        export_onnx(network, spec, traced, path, metadata={"megadit_version": metadata.version("megadit")})
        if who == EIGHT_BITS:
            quantise(path, ranges, "int8")
        for runtime, open_network in (
            ("ONNX Runtime", lambda path, spec: OnnxNetwork(path, spec, device=CPU)),
            ("OpenVINO", OpenVinoNetwork),
        ):
            with suppress(UserError):  # not installed
                opened = open_network(path, spec)
                yield f"{who}, {runtime}", lambda opened=opened, held=held: opened(held, tuple(x.shape))
        if who != EIGHT_BITS:
            compiled = torch.compile(network)
            yield f"{who}, torch.compile with freezing", lambda compiled=compiled, held=held: compiled(**held)


def fixed_spec(inputs: dict[str, Tensor]) -> NetworkSpec:
    """A graph for the sizes of these inputs alone."""
    specs = (TensorSpec(name=name, dtype=_dtype(x), axes=tuple(x.shape)) for name, x in inputs.items())
    return NetworkSpec(name="denoiser", inputs=tuple(specs), output="x0")


def dynamic_spec(setting: Setting, inputs: dict[str, Tensor]) -> NetworkSpec:
    """A graph as `megadit export` makes it, for one or two videos of up to twice these sides and text."""

    def axis(name: str, size: int, step: int = 1) -> Axis:
        return Axis(name=name, min=step, opt=size, max=2 * size, step=step)

    patch, sides = setting.config.patch_spatial, setting.latents
    batch, text = axis("batch", 1), axis("text", TEXT_LENGTH)
    size = (axis("time", sides[0]), axis("height", sides[1], patch), axis("width", sides[2], patch))
    axes = {"x": (batch, inputs["x"].shape[1], *size), "text": (batch, text, inputs["text"].shape[2])}
    specs = (TensorSpec(name=name, dtype=_dtype(x), axes=axes.get(name, (batch,))) for name, x in inputs.items())
    return NetworkSpec(name="denoiser", inputs=tuple(specs), output="x0")


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def measure(setting: Setting, rounds: int) -> list[Timed]:
    """Sampling calls of all candidates, then a training step of each network."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(freezing=True):
        calls = dict(candidates(setting, Path(folder)))
        exact = {who: calls[f"{who}, torch"]() for who in ("diffusers", "megadit")}
        errors = {name: _error(call(), exact[re.split(" in |,", name)[0]]) for name, call in calls.items()}
        seconds = in_turns(calls, rounds, _processor_seconds, "timing sampling calls")
    timed = [
        Timed(name=name, seconds=of_call, of_baseline=seconds[BASELINE], error=errors[name])
        for name, of_call in seconds.items()
    ]
    steps = dict(zip(("megadit", "diffusers"), training_steps(setting, torch.float32), strict=True))
    seconds = in_turns(steps, rounds, _processor_seconds, "timing training steps")
    step = Timed(
        name="megadit, training step", seconds=seconds["megadit"], of_baseline=seconds["diffusers"], error=None
    )
    return [*timed, step]


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


def _processor_seconds(call: Callable[[], object]) -> float:
    """Seconds of this process alone: others' work does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def show(timed: list[Timed]) -> None:
    """A table of medians and ratios, the fastest first."""
    table = Table("what", "processor s", "of diffusers in torch", "lowest", "highest", "error")
    for one in sorted(timed, key=lambda one: statistics.median(one.ratios)):
        ratios = [f"{value:.3f}" for value in (statistics.median(one.ratios), one.ratios[0], one.ratios[-1])]
        error = "" if one.error is None else f"{one.error:.0e}"
        table.add_row(one.name, f"{statistics.median(one.seconds):.4f}", *ratios, error)
    Console().print(table)


@command(
    BenchmarkOptions, prog="megadit benchmark cpu", description="Times this CPU's runtimes beside diffusers' network."
)
def main(options: BenchmarkOptions) -> None:
    """Runs `megadit benchmark cpu`; returns its exit code."""
    options.set_threads()
    tune_for_cpu()
    timed = measure(COSMOS, options.rounds)
    about = describe(CPU)
    show(timed)
    print(describe_in_words(about))
    if options.json:
        rows = [asdict(one) | {"ratio": statistics.median(one.ratios)} for one in timed]
        write_json(options.json, {"machine": about, "candidates": rows})
        print(options.json)
