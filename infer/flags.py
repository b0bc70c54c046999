"""The options of `megadit generate`: what they are called, what they mean, and which of them exclude each other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from megadit.infer.cache import Measure
from megadit.infer.guidance import GuidanceConvention
from megadit.infer.pipeline import TOKENS_PER_BATCH
from megadit.infer.ranks import world_size
from megadit.infer.runtimes.load import check_runtime
from megadit.infer.samplers import SAMPLERS, STOCHASTIC
from megadit.infer.schedules import SCHEDULES
from megadit.models.shared.command import CommandParser
from megadit.models.shared.errors import UserError

DEFAULT_DTYPE = "float32"
DEFAULT_RUNTIME = "torch"
FORMATS = ("mp4", "gif", "webp", "png", "jpg", "safetensors")


def _flag(default: Any, help: str, **options: Any) -> Any:
    """A field of `GenerateFlags`, with what argparse is to know of its option."""
    return field(default=default, metadata={"help": help, **options})


def _number(help: str) -> Any:
    return _flag(None, help, type=float, metavar="NUMBER")


def _integer(help: str, default: int | None = None) -> Any:
    return _flag(default, help, type=int, metavar="INT")


def _numbers(help: str, count: int | str = "+") -> Any:
    return _flag(None, help, type=float, metavar="NUMBER", nargs=count)


def _path(help: str) -> Any:
    return _flag("", help, metavar="PATH")


def _switch(help: str) -> Any:
    return _flag(False, help, action="store_true")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateFlags:
    """The options of the command; None is the checkpoint's default."""

    checkpoint_path: str = _path(
        "a bundle, or a training directory, whose newest checkpoint is then converted to a bundle once"
    )
    repeat: str = _path(
        "a file that this command wrote: make it again, from the settings inside it or beside it; other options "
        "replace what it says"
    )

    # what to make
    prompt: Sequence[str] = _flag(
        (), "one prompt or several; the flag may be repeated", nargs="+", action="extend", metavar="TEXT"
    )
    prompt_file: str = _path(
        'prompts after those of --prompt: a text file, one a line; or .jsonl, each line an object with "prompt" and '
        "the settings of that prompt alone"
    )
    subject_name: str = _flag(
        "",
        'replaces {subject} in every prompt, as in: --prompt "a {subject} on the beach" --subject_name "teal robot"',
        metavar="TEXT",
    )
    seed: int | None = _integer(
        "decides the initial noise, alone: the same seed gives the same video in any batch (default: 0)"
    )
    seeds: Sequence[int] = _flag(
        (), "several seeds: one video for each prompt and seed", type=int, metavar="INT", nargs="+"
    )
    num_video_frames: int | None = _integer("frames of the video, any number; 1 makes an image")
    height: int | None = _integer("pixels")
    width: int | None = _integer("pixels")
    fps: float | None = _number("frames per second, of the file and as the network is told")
    input_video: str = _path("a video or image to make anew in part (video-to-video), see --strength")
    strength: float | None = _number("share of the steps, 0 to 1, that is done again on --input_video (default: 0.6)")
    continue_video: str = _path("a video or image to continue: its last frames become the first ones")
    keep_frames: int | None = _integer("how many frames of --continue_video to keep (default: half of the video)")

    # guidance
    negative_prompt: str | None = _flag(
        None, "what to steer away from; replaces the empty text of the unconditional half", metavar="TEXT"
    )
    guidance: float | None = _number("scale of classifier-free guidance; 1 is none")
    guidances: Sequence[float] = _flag(
        (), "several scales: one video for each prompt, scale and seed", type=float, metavar="NUMBER", nargs="+"
    )
    guidance_convention: GuidanceConvention = _flag(
        "standard",
        "what --guidance means: uncond + scale (cond - uncond), or NeMo's cond + g (cond - uncond)",
        choices=get_args(GuidanceConvention),
    )
    guidance_interval: Sequence[float] | None = _numbers("lowest and highest noise level at which guidance acts", 2)
    guidance_rescale: float | None = _number("0 to 1: how far guided latents get their unguided deviation back")
    autoguidance: str | None = _flag(
        None, "a weaker checkpoint to lead away from, in place of the negative prompt", metavar="PATH"
    )
    second_prompt: str | None = _flag(None, "a second condition for every video, with its own scale", metavar="TEXT")
    second_guidance: float | None = _number("the scale of --second_prompt")

    # solver
    sampler: str | None = _flag(None, ", ".join(SAMPLERS) + " (RES is res_2ab)", metavar="NAME")
    num_steps: int | None = _integer("sampling steps; heun and dpm2 call the network twice in each")
    schedule: str | None = _flag(None, "noise levels: " + ", ".join(SCHEDULES), metavar="NAME")
    sigmas: Sequence[float] | None = _numbers("the noise levels themselves, decreasing, in place of a schedule")
    sigma_min: float | None = _number("the lowest noise level before 0")
    sigma_max: float | None = _number("the highest noise level")
    rho: float | None = _number("exponent of the karras schedule")
    shift: str | None = _flag(None, "multiplies all noise levels; auto: what suits the resolution", metavar="NUMBER")
    churn: float | None = _number(f"S_churn: noise added before steps ({', '.join(STOCHASTIC)})")
    churn_interval: Sequence[float] | None = _numbers("lowest and highest noise level at which churn acts", 2)
    eta: float | None = _number(f"0 to 1: share of ancestral noise after steps ({', '.join(STOCHASTIC)})")

    cache_budget: float | None = _number(
        "step caching: relative error of the latents that sparing denoiser calls may cause, such as 0.02; "
        "`megadit calibrate-cache` with the same options comes first"
    )
    cache_measure: Measure = _flag(
        "latents",
        "what --cache_budget is a share of: the relative error of the latents (default), or lpips, how different the "
        "frames look",
        choices=get_args(Measure),
    )
    lpips_weights: str = _path(
        "for calibrate-cache with lpips: the folder of alexnet*.pth (torchvision's) and alex.pth (LPIPS')"
    )

    # output
    video_save_path: str = _flag(
        "outputs",
        "a file (mp4, gif, webp; png or jpg for one frame; safetensors for latents), or a directory; several videos "
        "are numbered, and a .json with the settings is written beside each (default: outputs)",
        metavar="PATH",
    )
    format: str | None = _flag(
        None,
        "what is written into a directory: mp4 (default), gif, webp, safetensors (latents), or png and jpg, which "
        "make a folder of frames of a video and a file of an image",
        choices=FORMATS,
    )
    contact_sheet: str = _path(
        "also one picture of all videos, a row for each prompt and scale: an image of their middle frames, or an mp4, "
        "gif or webp"
    )

    # machine
    batch_size: int | None = _integer(
        f"videos made at once (default: as many as make {TOKENS_PER_BATCH:,} video tokens)"
    )
    device: str = _flag("auto", "auto, cpu, cuda or cuda:N (default: auto)", metavar="NAME")
    dtype: str | None = _flag(None, "of the network: float32, bfloat16 or float16 (default: float32)", metavar="NAME")
    runtime: str | None = _flag(
        None,
        "torch; onnx, onnx_tensorrt or tensorrt for a bundle of `megadit export` (default: torch)",
        metavar="NAME",
    )
    sequential_guidance: bool = _switch("ask for the halves of guidance in turn: less memory, a little slower")
    offload_text_encoder: bool = _switch("free the text encoder's memory while sampling")
    compile: bool = _switch("compile the network (torch.compile), with sizes left open")
    cuda_graphs: bool = _switch("record the network's kernels once for each size and launch them all at once (GPU)")
    overlap_decoding: bool = _switch("decode a batch while the next one is sampled")
    tokenizer_model: str = _path(
        "directory of the video tokenizer to load instead of the checkpoint's copy; must be the same one"
    )
    tokenizer_cache_dir: str = _path("directory in which --tokenizer_model is looked up")
    t5_cache_dir: str = _path(
        "directory of the text encoder to load instead of the checkpoint's copy; must be the same one"
    )
    num_devices: int | None = _integer("processes that torchrun starts, which decides: any other number is refused")
    tp_size: int = _integer("processes that share the network's matrices (tensor parallelism)", default=1)
    cp_size: int = _integer("processes that share the tokens of a video (context parallelism)", default=1)
    cfg_parallel: bool = _switch(
        "split the halves of guidance over two processes; what torchrun starts beyond --tp_size and this shares the "
        "prompts"
    )
    guardrail_dir: str = _path("directory with guardrail.py, a content filter for prompts and videos")


SETTING_FLAGS = (
    "negative_prompt", "guidance_interval", "guidance_rescale", "autoguidance", "second_prompt", "second_guidance",
    "sampler", "num_steps", "schedule", "sigmas", "sigma_min", "sigma_max", "rho", "shift", "churn", "churn_interval",
    "eta", "height", "width", "fps", "cache_budget",
)  # fmt: skip
"""Options that are sampling settings of the same name."""


_DESCRIPTIONS = {
    "generate": "Generates videos, or images, from prompts. What is left out takes the checkpoint's default.",
    "calibrate-cache": "Measures with these prompts which denoiser calls `megadit generate --cache_budget` can spare "
    "under these settings, and stores that in the bundle. Options of output are not used.",
    "check-cache": "Measures with these prompts how well a cache that was calibrated for these settings keeps its "
    "budget. Options of output are not used.",
}


def parse(argv: list[str], verb: str = "generate") -> GenerateFlags:
    """The options in `argv`.

    Raises:
        UserError: for an unknown or malformed option, and for what no checkpoint could make right.
    """
    parser = CommandParser(
        prog=f"megadit {verb}",
        usage=f"megadit {verb} --checkpoint_path PATH --prompt TEXT [TEXT ...] [options]",
        description=_DESCRIPTIONS[verb],
        epilog="--debug shows the traceback of an error.",
    )
    for argument in argv:
        is_text = not any("\ud800" <= letter <= "\udfff" for letter in argument)  # bytes that were left undecoded
        refuse(not is_text, f"the argument {argument!a} is not valid text (UTF-8)")
    for flag in fields(GenerateFlags):
        parser.add_argument(f"--{flag.name}", **flag.metadata)
    # argparse's own defaults are None, so that `extend` starts from nothing
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    flags = GenerateFlags(**given)
    check(flags)
    return flags


def check(flags: GenerateFlags) -> None:
    """Raises UserError for options that exclude each other, or lack one that they need."""
    refuse(not (flags.checkpoint_path or flags.repeat), "give --checkpoint_path: a bundle or a training directory")
    for one, several in (("seed", "seeds"), ("guidance", "guidances")):
        both = getattr(flags, one) is not None and getattr(flags, several)
        refuse(both, f"give --{one} or --{several}, not both")
    refuse(
        flags.guidance is None and not flags.guidances and flags.guidance_convention != "standard",
        f"--guidance_convention={flags.guidance_convention} says what --guidance means; give that too",
    )
    for name in ("tp_size", "cp_size"):
        value = getattr(flags, name)
        refuse(
            value > 1 and flags.runtime not in (None, "torch"),
            f"--{name}={value} divides torch's network: leave out --runtime={flags.runtime}",
        )
    refuse(flags.cp_size > 1 and flags.compile, f"--cp_size={flags.cp_size} cannot be compiled: leave out --compile")
    check_runtime(flags.runtime or DEFAULT_RUNTIME, dtype=flags.dtype, compile=flags.compile)
    refuse(flags.input_video and flags.continue_video, "give --input_video or --continue_video, not both")
    for name, needed in (
        ("strength", "input_video"),
        ("keep_frames", "continue_video"),
        ("tokenizer_cache_dir", "tokenizer_model"),
    ):
        value = getattr(flags, name)
        missing = value not in (None, "") and not (getattr(flags, needed) or flags.repeat)
        refuse(missing, f"--{name}={value} needs --{needed}")
    for name in ("num_video_frames", "batch_size"):
        value = getattr(flags, name)
        refuse(value is not None and value < 1, f"--{name}={value} must be greater than 0")
    for flag in fields(GenerateFlags):
        if flag.metadata.get("metavar") == "PATH":
            check_path(flag.name, getattr(flags, flag.name) or "")
    _check_upstream_flags(flags)


def check_path(name: str, path: str) -> None:
    """Raises UserError for what no file system takes, room for a temporary name included."""
    refuse("\0" in path, f"--{name}={path!a}: no path holds a null character")
    too_long = [part for part in Path(path).parts if len(os.fsencode(part)) > 230]
    refuse(too_long, f"--{name}: the name {''.join(too_long)[:40]}... is too long")


def _check_upstream_flags(flags: GenerateFlags) -> None:
    """NeMo's and DFM's options that have no meaning here."""
    refuse(
        flags.num_devices not in (None, world_size()),
        f"--num_devices={flags.num_devices}, but {world_size()} were started: use torchrun --nproc-per-node "
        f"{flags.num_devices} -m megadit.infer.generate ...",
    )


def refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UserError(reason)
