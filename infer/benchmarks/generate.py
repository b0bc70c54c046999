"""`megadit benchmark generate`: times a bundle under several runtimes, each network and a whole video.

    megadit benchmark generate runs/demo/exported --runtime eager compiled onnx --rounds 5 --json figures.json

The runtimes take turns in every round, so that a slowdown of the machine affects all. Results: export/BENCHMARKS.md.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megadit.infer.benchmarks.profile import in_turns, shares, watch
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.exported import video_size
from megadit.infer.runtimes.torch import find_dtype, use_device
from megadit.infer.sampling.resolve import latent_size, resolve_settings
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.flops import forward_flops
from megadit.models.machine import datasheet_flops, describe, describe_in_words, matmul_flops
from megadit.models.packing.segments import Segment
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import write_json

RUNTIMES = {
    "eager": {"runtime": "torch"},
    "compiled": {"runtime": "torch", "compile": True},
    "onnx": {"runtime": "onnx"},
    "onnx_tensorrt": {"runtime": "onnx_tensorrt"},
    "openvino": {"runtime": "openvino"},
    "tensorrt": {"runtime": "tensorrt"},
}
"""Name -> arguments of `TextToVideo.from_pretrained`."""
PROMPT = "a red seven moving left"
SIGMA = 1.0
NETWORK, DECODER, ENCODER, WHOLE = "guided denoiser call", "decoder", "encoder", "whole video"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValue:
    """Times of one task under one runtime, in seconds."""

    runtime: str
    what: str
    median: float
    lowest: float
    highest: float
    tokens_per_second: float | None
    """Video tokens of the call, conditional and unconditional pass together; None for other tasks."""
    tflops: float | None
    """FLOPs by `models/flops.py`; None for other tasks."""
    peak_gpu_gb: float | None
    """Peak GPU memory of torch; None without a GPU."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens and FLOPs of one guided call of the denoiser."""

    tokens: int
    flops: int

    @classmethod
    def of(cls, pipeline: TextToVideo, settings: SamplingSettings, prompt: str) -> "Workload | None":
        """Workload of a prompt and the negative prompt; None for networks without tokens."""
        if not isinstance(pipeline.config, DiTConfig):
            return None
        _, shape = latent_size(settings, pipeline.config, pipeline.tokenizer)
        lengths = pipeline.text_encoder.encode([prompt, settings.negative_prompt]).length_B.tolist()
        segments = [Segment(pipeline.config.token_grid(*shape[1:]), length) for length in lengths]
        flops = sum(forward_flops(segment, pipeline.config) for segment in segments)
        return cls(sum(segment.num_tokens for segment in segments), flops)


def measure(
    pipelines: dict[str, TextToVideo], settings: SamplingSettings, prompt: str, rounds: int
) -> list[MetricValue]:
    """Times every network and a whole video under every runtime, `rounds` times in turn after a warm-up round. Raises
    UserError for fewer rounds than one."""
    if rounds < 1:
        raise UserError(f"--rounds={rounds} must be at least 1")
    tasks = {(name, what): task for name, one in pipelines.items() for what, task in _tasks(one, settings, prompt)}
    one = next(iter(pipelines.values()))  # all are on one device
    found = in_turns(tasks, rounds, lambda task: _timed(task, one.device), "measuring")
    seconds = {key: [elapsed for elapsed, _ in measured] for key, measured in found.items()}
    peaks = {key: max(peak for _, peak in measured) for key, measured in found.items()}
    on_gpu, work = one.device.type == "cuda", Workload.of(one, settings, prompt)
    return [
        MetricValue(
            runtime=runtime,
            what=what,
            median=statistics.median(times),
            lowest=min(times),
            highest=max(times),
            tokens_per_second=work.tokens / statistics.median(times) if work and what == NETWORK else None,
            tflops=work.flops / statistics.median(times) / 1e12 if work and what == NETWORK else None,
            peak_gpu_gb=peaks[runtime, what] if on_gpu else None,
        )
        for (runtime, what), times in seconds.items()
    ]


def _tasks(pipeline: TextToVideo, settings: SamplingSettings, prompt: str) -> list[tuple[str, Callable[[], Any]]]:
    """Functions to time, by name: one call of the denoiser with guidance, the decoder, the encoder, a whole video."""
    _, shape = latent_size(settings, pipeline.config, pipeline.tokenizer)
    x = torch.randn(2, *shape, device=pipeline.device)
    sigma = torch.full((2,), SIGMA, device=pipeline.device)
    texts = [prompt, settings.negative_prompt]
    conditioning = pipeline.text_encoder.conditioning(texts, float(settings.fps)).to(pipeline.device)
    video = torch.zeros(1, 3, *video_size(pipeline.tokenizer, *shape[1:]), device=pipeline.device)
    return [
        (NETWORK, lambda: pipeline.denoiser(x, sigma, conditioning)),
        (DECODER, lambda: pipeline.tokenizer.decode(x[:1])),
        (ENCODER, lambda: pipeline.tokenizer.encode(video)),
        (WHOLE, lambda: list(pipeline.stream([prompt], settings))),
    ]


def _timed(task: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """(seconds, peak memory of the GPU in GB)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    task()
    if device.type != "cuda":
        return time.perf_counter() - start, 0.0
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated(device) / 1e9


def parts(measurements: list[MetricValue], num_calls: int) -> dict[str, dict[str, float]]:
    """Fractions of a whole video's time by runtime: denoiser calls, decoder, everything else; from the medians."""
    medians = {(one.runtime, one.what): one.median for one in measurements}
    found = {}
    for runtime in dict.fromkeys(one.runtime for one in measurements):
        calls, decoder = num_calls * medians[runtime, NETWORK], medians[runtime, DECODER]
        rest = max(0.0, medians[runtime, WHOLE] - calls - decoder)
        found[runtime] = shares({"denoiser": calls, "decoder": decoder, "all else": rest})
    return found


def show(title: str, measurements: list[MetricValue], about: dict[str, Any]) -> None:
    """Prints a table; ratios are to the first runtime."""
    columns = ("what", "runtime", "median (s)", "lowest", "highest", "times as fast")
    table = Table(*columns, "tokens/s", "TFLOP/s", "peak GPU (GB)", title=title)
    first = {measurement.what: measurement.median for measurement in reversed(measurements)}
    for one in sorted(measurements, key=lambda measurement: measurement.what):
        rates = [_or_dash(one.tokens_per_second, ",.0f"), _or_dash(one.tflops, ".4g"), _or_dash(one.peak_gpu_gb, ".2f")]
        times = [f"{value:.4f}" for value in (one.median, one.lowest, one.highest)]
        table.add_row(one.what, one.runtime, *times, f"{first[one.what] / one.median:.2f}", *rates)
    console = Console()
    console.print(table)
    console.print(describe_in_words(about), soft_wrap=True)


def _show_shares(title: str, of_what: dict[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{name} {share:.1%}" for name, share in of_what.items()))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def load_pipelines(bundle: Bundle, runtimes: Sequence[str], device: str, dtype: str) -> dict[str, TextToVideo]:
    """A pipeline for each runtime. Raises UserError for an unknown runtime, or one that the bundle was not exported
    for."""
    for name in runtimes:
        choose_one(name, RUNTIMES, f"--runtime {name} is unknown")
    return {
        name: TextToVideo.from_pretrained(
            bundle,
            device=device,
            dtype=dtype if RUNTIMES[name]["runtime"] == "torch" else "float32",  # an export has its own precision
            **RUNTIMES[name],
        )
        for name in runtimes
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkGenerateOptions:
    bundle: str = setting(
        help="bundle to time; onnx, openvino and tensorrt need one that `megadit export` made",
        positional=True,
        metavar="BUNDLE",
    )
    runtime: tuple[str, ...] = setting(
        ("eager",),
        f"runtimes to compare with the first of them: {', '.join(RUNTIMES)} (default: eager)",
        metavar="NAME",
    )
    rounds: int = setting(5, "timed rounds, after a warm-up round (default: {default})")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")
    dtype: str = setting("float32", "dtype of the torch network (default: {default})", metavar="NAME")
    prompt: str = setting(PROMPT, metavar="TEXT")
    num_steps: int | None = setting(None, "sampling steps (default: the bundle's)")
    num_frames: int | None = setting(None, "frames of the video (default: the bundle's)")
    height: int | None = setting(None, "height in pixels (default: the bundle's)")
    width: int | None = setting(None, "width in pixels (default: the bundle's)")
    trace: str | None = setting(None, "also write a Chrome trace of a video under the first runtime", metavar="FILE")
    json: str = setting("", "also write the timings to this JSON file", metavar="PATH")


@command(
    BenchmarkGenerateOptions,
    prog="megadit benchmark generate",
    description="Times the networks of a bundle, and a whole video, under several runtimes in one run.",
)
def main(options: BenchmarkGenerateOptions) -> None:
    bundle = open_bundle(options.bundle)
    sizes = {name: getattr(options, name) for name in ("num_steps", "num_frames", "height", "width")}
    settings = resolve_settings(bundle.defaults, **sizes)
    pipelines = load_pipelines(bundle, options.runtime, str(use_device(options.device)), options.dtype)
    measurements = measure(pipelines, settings, options.prompt, options.rounds)
    name, first = next(iter(pipelines.items()))
    about = describe(first.device)
    rates = _rates(first.device, find_dtype(options.dtype))
    operations = watch(lambda: list(first.stream([options.prompt], settings)), first.device, options.trace)
    of_video = parts(measurements, first.num_denoiser_calls(1, settings))
    size = f"{settings.num_frames}x{settings.height}x{settings.width}, {settings.num_steps} steps"
    show(f"{bundle.path.name}, {size}", measurements, about)
    for runtime, part in of_video.items():
        _show_shares(f"whole video, {runtime}", part)
    _show_shares(f"operations, {name}", operations)
    call = next(one for one in measurements if one.what == NETWORK)
    for rate, tflops in rates.items() if call.tflops is not None else ():
        known = "not known" if tflops is None else f"{tflops:.4g} TFLOP/s, MFU {call.tflops / tflops:.1%}"
        print(f"{rate}: {known}")
    if options.json:
        record = {
            "settings": settings.to_dict(),
            "machine": about,
            "rates": rates,
            "measurements": [asdict(one) for one in measurements],
            "parts": of_video,
            "operations": operations,
        }
        write_json(options.json, record)
        print(options.json)


def _rates(device: torch.device, dtype: torch.dtype) -> dict[str, float | None]:
    """TFLOP/s of the data sheet, and measured with a large matrix product."""
    datasheet = datasheet_flops(device, dtype)
    measured = matmul_flops(device, dtype, seconds=0.5)
    return {"data sheet": None if datasheet is None else datasheet / 1e12, "matrix products": measured / 1e12}
