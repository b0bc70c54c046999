"""One video by a teacher and by its student of four calls, by the clock: random weights of the sizes of two networks.

    python tests/benchmarks/student.py [--rounds 9] [--runtime eager onnx compiled] [--network demo wide] [--threads 1]
        [--sequential_guidance]

The teacher is asked twenty times: ten steps with guidance, whose halves are a batch of two, or calls of one in turn, as
diffusers' Cosmos pipelines make them; the student four times, without. Both are the same network in the same pipeline,
turn about. Figures: train/BENCHMARKS.md.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from side_by_side import Comparison, compare, show

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.benchmarks.generate import RUNTIMES, load_pipelines
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.guidance import in_turn
from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import choose_one
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

DEMO = NAMED_CONFIGS["digits"]
NETWORKS: dict[str, tuple[DiTConfig, tuple[int, int, int]]] = {
    "demo": (DEMO, (9, 32, 32)),
    "wide": (replace(DEMO, hidden_size=512, num_layers=8, num_attention_heads=8), (17, 128, 128)),
}
"""Name -> network, and frames, height and width of its videos."""
STUDENT = {"sampler": "consistency", "num_steps": 4, "sigmas": (12.0, 4.0, 1.5, 0.5), "guidance": 1.0}
TEACHER = {"sampler": "euler", "num_steps": 10, "eta": 1.0, "guidance": 4.0}
PROMPT = "a red seven moving left"
AT_LEAST = 4.5
"""Times faster that a student is to be."""


def write(path: Path, name: str) -> None:
    """The bundle of a network, with random weights and defaults of a student."""
    config, (frames, height, width) = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    clips = 2 * torch.rand(32, 3, frames, 32, 32, generator=generator) - 1
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in DiT(config).state_dict().items()}
    write_bundle(
        path,
        config=config,
        state_dict={key: 0.02 * torch.randn(shape, generator=generator) for key, shape in shapes.items()},
        tokenizer=HaarTokenizer.fit([clips], channels=config.in_channels),
        text_encoder=HashedWordEncoder(dim=config.crossattn_emb_size),
        defaults=SamplingSettings(num_frames=frames, height=height, width=width, fps=8.0, **STUDENT),
    )


def sizes_of(name: str) -> tuple[str, ...]:
    """Profiles of an export that is asked for these videos and no larger ones."""
    _, (frames, height, width) = NETWORKS[name]
    sizes = {
        "batch": (1, 2, 2),
        "frames": (1, frames, frames),
        "height": (32, height, height),
        "width": (32, width, width),
    }
    return tuple(f"{side}={','.join(map(str, bounds))}" for side, bounds in sizes.items())


def opened(folder: Path, name: str, runtimes: Sequence[str]) -> dict[str, TextToVideo]:
    """A pipeline for each runtime, of networks that were exported where a runtime wants that."""
    path = folder / name
    if not path.exists():
        write(path, name)
    if any(RUNTIMES[runtime]["runtime"] != "torch" for runtime in runtimes):
        exported = folder / f"{name}-exported"
        if not exported.exists():
            export_bundle(str(path), str(exported), ExportSettings(profiles=sizes_of(name)))
        path = exported
    return load_pipelines(Bundle.open(path), runtimes, "cpu", "float32")


def compare_calls(name: str, pipeline: TextToVideo, runtime: str, rounds: int) -> Comparison:
    """The student's seconds by those of the teacher."""
    return compare(
        f"{name}, {runtime}",
        lambda: pipeline([PROMPT]),
        lambda: pipeline([PROMPT], **TEACHER),
        rounds,
        limit=1 / AT_LEAST,
        clock=time.perf_counter,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentOptions:
    rounds: int = setting(9, "pairs timed, after one that is not counted (default: {default})")
    runtime: tuple[str, ...] = setting(("eager", "onnx"), f"{', '.join(RUNTIMES)} (default: eager onnx)")
    network: tuple[str, ...] = setting(tuple(NETWORKS), f"{', '.join(NETWORKS)} (default: both)")
    threads: int | None = setting(None, "threads (default: torch's own choice)")
    sequential_guidance: bool = setting(False, "the halves of guidance are calls of one in turn")
    folder: Path | None = setting(None, "where the bundles are kept (default: nowhere)")
    json: str = setting("", "also write the figures here", metavar="FILE")


def _run(argv: list[str]) -> None:
    options = read_options(
        StudentOptions,
        argv,
        prog="python tests/benchmarks/student.py",
        description="Times a video by a student of four calls, and by its teacher of twenty.",
    )
    for name in options.network:
        choose_one(name, NETWORKS, f"--network {name}: there is no such network")
    if options.threads:
        torch.set_num_threads(options.threads)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.network:
            pipelines = opened(options.folder or Path(temporary), name, options.runtime)
            if options.sequential_guidance:
                for pipeline in pipelines.values():
                    pipeline.evaluate = in_turn
            found += [compare_calls(name, pipeline, kind, options.rounds) for kind, pipeline in pipelines.items()]
    show("one video: a student of four calls / its teacher of twenty", found, options.json)
    for one in found:
        times = [1 / ratio for ratio in reversed(one.ratios)]
        print(f"{one.name}: {1 / one.ratio:.2f} times as fast ({times[0]:.2f} to {times[-1]:.2f})")


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
