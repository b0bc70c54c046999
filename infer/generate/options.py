"""The options of `megadit generate`: names, meanings, and which exclude each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadit.infer.media.signing import SigningOptions
from megadit.infer.pipeline.adapters import MERGE_FIRST
from megadit.infer.pipeline.batches import TOKENS_PER_BATCH
from megadit.infer.runtimes.load import check_runtime
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.infer.runtimes.ranks import world_size
from megadit.infer.sampling.guidance import GuidanceConvention
from megadit.models.diffusion.conditioning_settings import NEEDED, ConditioningOptions
from megadit.models.diffusion.settings import PartialSettings
from megadit.models.shared.cli.options import read_options, with_rest
from megadit.models.shared.cli.setting import check_text, group, setting, settings_of
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import ANYWAY_HELP

FORMATS = ("mp4", "gif", "webp", "png", "jpg", "safetensors")


def _path(help: str) -> Any:
    """A path as text; "" means none."""
    return setting("", help, metavar="PATH")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(ConditioningOptions):
    """The options of the command; None means the checkpoint's default."""

    checkpoint_path: str = _path(
        "a bundle, or a training directory, whose newest checkpoint is converted to a bundle once"
    )
    repeat: str = _path(
        "a file that this command wrote: generate it again, from the settings inside it or in the .json next to it; "
        "other options replace those"
    )
    recorded_files: bool = setting(
        False,
        "also open the checkpoint, adapters and conditioning files that the file of --repeat names (default: none, "
        "since anybody may have written it)",
    )

    # what to make
    prompt: Sequence[str] = setting(
        (), "one prompt or several; the flag may be repeated", nargs="+", repeated=True, metavar="TEXT"
    )
    prompt_file: str = _path(
        "file of further prompts: .txt, one a line, # begins a comment; .jsonl, each line an object with "
        '"prompt" and settings of that prompt; .json or .yaml, a list of either'
    )
    adapter: Sequence[str] = setting(
        (),
        "a LoRA adapter and its scale (default: 1); repeat for several. high=PATH or low=PATH: for the high-noise or "
        "low-noise expert alone (Wan 2.2). A line of a .jsonl prompt file may have a list of its own",
        repeated=True,
        metavar="PATH[:SCALE]",
    )
    subject_name: str = setting(
        "",
        'replaces {subject} in every prompt, as in: --prompt "a {subject} on the beach" --subject_name "teal robot"',
        metavar="TEXT",
    )
    seed: int | None = setting(
        None, "seed of the initial noise: the same seed gives the same video in any batch (default: 0)"
    )
    seeds: Sequence[int] = setting((), "several seeds: one video for each prompt and seed")
    guidances: Sequence[float] = setting((), "several guidance scales: one video for each prompt, scale and seed")
    guidance_convention: GuidanceConvention = setting(
        "standard", "meaning of --guidance g: uncond + g (cond - uncond), or NeMo's cond + g (cond - uncond)"
    )
    total_frames: int | None = setting(
        None,
        "frames of a longer video, an mp4: generated in windows of --num_frames; each begins with the last "
        "--keep_frames (default: 1) of the one before",
        above=0,
    )
    story: bool = setting(
        False,
        "one video of all prompts: each is for one window of --total_frames, the last for all that follow",
    )
    keep_first: bool = setting(
        False,
        "condition every window of --total_frames on the first one too, as a clip to edit, so that subjects "
        "stay consistent (needs a model with edit conditioning)",
    )
    lpips_weights: str = _path(
        "for calibrate-cache with lpips: the folder of alexnet*.pth (torchvision's) and alex.pth (LPIPS')"
    )

    # output
    video_save_path: str = setting(
        "outputs",
        "a file (mp4, gif, webp; png or jpg for one frame; safetensors for latents), or a directory; several videos "
        "are numbered, and NAME.mp4.json with the settings is written next to each (default: outputs)",
        metavar="PATH",
    )
    format: str | None = setting(
        None,
        "format of files in a directory: mp4 (default), gif, webp, safetensors (latents), or png and jpg "
        "(a folder of frames for a video, a file for an image)",
        choices=FORMATS,
    )
    contact_sheet: str = _path(
        "also write one grid of all videos, a row for each prompt and scale: an image of their middle frames, or an "
        "mp4, gif or webp"
    )

    # machine
    batch_size: int | None = setting(
        None, f"videos per batch (default: as many as make {TOKENS_PER_BATCH:,} video tokens)", above=0
    )
    dry_run: bool = setting(
        False,
        "print the memory that the videos need and what fits; load and generate nothing",
        names=("--dry_run", "--dry-run"),
    )
    device_memory: float | None = setting(
        None,
        "memory of the device that may be used, in GiB (default: all that is free on --device)",
        above=0,
        metavar="GIB",
    )
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    tokenizer_model: str = _path(
        "directory of the video tokenizer, in place of the checkpoint's copy; another one is refused"
    )
    tokenizer_cache_dir: str = _path("directory in which --tokenizer_model is looked up")
    t5_cache_dir: str = _path(
        "directory of the text encoder, in place of the checkpoint's copy; another one is refused"
    )
    num_devices: int | None = setting(None, "expected number of torchrun's processes; any other is refused")
    cfg_parallel: bool = setting(
        False,
        "run the conditional and unconditional pass on two processes; further processes share the prompts",
    )

    running: RuntimeOptions = group(RuntimeOptions)
    signing: SigningOptions = group(SigningOptions, "signatures (C2PA) in output files")
    settings: PartialSettings = group(PartialSettings, "sampling (default: as the checkpoint says)")

    @property
    def guidance(self) -> float | None:
        """Guidance in the convention that the options name."""
        return self.settings.guidance


_SAMPLING = "sampling (default: as the checkpoint says)"
_GROUPS = {
    "most used": (
        *("checkpoint_path", "prompt", "video_save_path", "num_steps", "guidance", "seed"),
        *("num_frames", "height", "width", "fps", "negative_prompt", "format"),
    ),
    "prompts": ("prompt_file", "subject_name", "seeds", "guidances", "adapter", "repeat", "recorded_files"),
    _SAMPLING: (
        *("sampler", "schedule", "sigmas", "sigma_min", "sigma_max", "rho", "shift", "noise_scale"),
        *("churn", "churn_interval", "eta"),
    ),
    "guidance": (
        *("guidance_convention", "guidance_interval", "guidance_rescale", "image_guidance", "low_guidance"),
        *("autoguidance", "second_prompt", "second_guidance", "adapter_interval"),
    ),
    "conditioning: images and videos": (
        *("image", "last_image", "keyframe", "input_video", "strength", "continue_video", "lead_to_video"),
        *("keep_frames", "video", "mask", "instruction"),
    ),
    "length: videos longer than one window": ("total_frames", "story", "keep_first"),
    "output": ("contact_sheet",),
    "speed and memory": (
        *("device", "dtype", "runtime", "batch_size", "compile", "cuda_graphs", "overlap_decoding"),
        *("cache_budget", "cache_measure", "lpips_weights", "batch_guidance", "offload_text_encoder"),
        *("resident_blocks", "dry_run", "device_memory", "even_if_too_large"),
    ),
    "several devices, under torchrun": ("tensor_parallel", "context_parallel", "cfg_parallel", "num_devices"),
    "components from other directories": ("tokenizer_model", "tokenizer_cache_dir", "t5_cache_dir"),
    "safety": ("guardrail_dir", "c2pa_certificate", "c2pa_key"),
}
GROUPS = with_rest(_GROUPS, _SAMPLING, PartialSettings)
"""Title in the help -> the options below it; every option stands in one group."""
EXAMPLES = {
    "generate": (
        'megadit generate --checkpoint_path runs/demo/bundle --prompt "a red seven moving left"',
        'megadit generate --checkpoint_path runs/demo/bundle --prompt "a seven" --seeds 1 2 3 --contact_sheet all.png',
        "megadit generate --checkpoint_path bundle --prompt_file prompts.txt --video_save_path videos --format gif",
        'megadit generate --checkpoint_path bundle --prompt "waves" --image first.png --num_video_frames 33',
        "megadit generate --repeat videos/0000_waves_seed0.mp4 --recorded_files --guidance 5",
    ),
    "calibrate-cache": (
        "megadit calibrate-cache --checkpoint_path bundle --prompt_file prompts.txt --cache_budget 0.02",
    ),
    "check-cache": ("megadit check-cache --checkpoint_path bundle --prompt_file others.txt --cache_budget 0.02",),
}

_DESCRIPTIONS = {
    "generate": "Generates videos, or images, from prompts. Options left out take the checkpoint's defaults.",
    "calibrate-cache": "Measures on these prompts which denoiser calls `megadit generate --cache_budget` can skip with "
    "the same settings, and stores them in the bundle. Output options are ignored.",
    "check-cache": "Measures on these prompts whether the cache calibrated for the same settings keeps its budget. "
    "Output options are ignored.",
}


def parse(argv: list[str], verb: str = "generate") -> GenerateOptions:
    """The options in `argv`.

    Raises:
        UserError: for an unknown or malformed option, and for options that are wrong with any checkpoint.
    """
    options = read_options(
        GenerateOptions,
        argv,
        prog=f"megadit {verb}",
        groups=GROUPS,
        examples=EXAMPLES[verb],
        usage=f"megadit {verb} --checkpoint_path PATH --prompt TEXT [TEXT ...] [options]",
        description=_DESCRIPTIONS[verb],
        epilog="--debug shows the traceback of an error.",
    )
    check(options)
    return options


def check(options: GenerateOptions) -> None:
    """Raises UserError for options that exclude each other, or lack one that they need."""
    refuse(not (options.checkpoint_path or options.repeat), "give --checkpoint_path: a bundle or a training directory")
    refuse(options.seed is not None and options.seeds, "give --seed or --seeds, not both")
    refuse(options.guidance is not None and options.guidances, "give --guidance or --guidances, not both")
    refuse(
        options.guidance is None and not options.guidances and options.guidance_convention != "standard",
        f"--guidance_convention={options.guidance_convention} says what --guidance means; give --guidance too",
    )
    others = {"story": ("total_frames",), "keep_first": ("total_frames",), "tokenizer_cache_dir": ("tokenizer_model",)}
    others["recorded_files"] = ("repeat",)
    others["keep_frames"] = (*NEEDED["keep_frames"], "total_frames")
    for name, needed in (NEEDED | others).items():
        value = getattr(options, name)
        missing = value not in (None, "", False) and not (
            any(getattr(options, one) for one in needed) or options.repeat
        )
        refuse(missing, f"--{name}={value} needs --{' or --'.join(needed)}")
    refuse(options.instruction and options.prompt, "--instruction replaces the prompt: give one of them")
    for one in (options, options.running, options.settings):
        for name, about in settings_of(type(one)).items():
            if about.metavar == "PATH":
                check_path(name, getattr(one, name) or "")
    _check_machine(options)


def _check_machine(options: GenerateOptions) -> None:
    running = options.running
    refuse(
        options.adapter and (running.compile or running.cuda_graphs or running.resident_blocks),
        f"--adapter needs a network with all blocks, neither compiled nor recorded; {MERGE_FIRST}",
    )
    is_whole = running.is_torch and running.tensor_parallel == running.context_parallel == 1
    refuse(
        running.resident_blocks and (not is_whole or running.compile or running.cuda_graphs),
        f"--resident_blocks={running.resident_blocks} needs the torch runtime on one rank, neither compiled nor "
        "recorded: leave it out",
    )
    for name, value in (("tp_size", running.tensor_parallel), ("cp_size", running.context_parallel)):
        refuse(
            value > 1 and not running.is_torch,
            f"--{name}={value} divides torch's network: leave out --runtime={running.runtime}",
        )
    refuse(
        running.context_parallel > 1 and running.compile,
        f"--cp_size={running.context_parallel} cannot be compiled: leave out --compile",
    )
    check_runtime(RuntimeOptions(runtime=running.runtime, dtype=running.dtype, compile=running.compile))
    refuse(
        options.num_devices not in (None, world_size()),
        f"--num_devices={options.num_devices}, but {world_size()} were started: use torchrun --nproc-per-node "
        f"{options.num_devices} -m megadit.infer.generate.command ...",
    )


def check_path(name: str, path: str) -> None:
    """Raises UserError for a path that no file system takes, with a temporary suffix."""
    check_text(f"--{name}", Path(path))


def refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UserError(reason)
