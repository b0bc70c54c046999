"""`megadit generate`: prompts to videos on disk.

Has every flag of NeMo's and DFM's `inference_dit_model.py`, under the same names; each does what it says or says why
it cannot. Flags that are left out take the checkpoint's defaults.
"""

import mimetypes
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from megadit.infer.checkpoints import open_bundle
from megadit.infer.guidance import GuidanceConvention, guidance_scale
from megadit.infer.pipeline import TOKENS_PER_BATCH, GeneratedVideo, TextToVideo
from megadit.infer.samplers import SAMPLERS
from megadit.infer.settings import latent_size, resolve_settings
from megadit.infer.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, write_video
from megadit.models.bundle import Bundle, SamplingDefaults
from megadit.models.support import CommandParser, Progress, UserError, run_command, write_json
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

SUBJECT = "{subject}"
"""The place in a prompt that --subject_name fills."""


def _flag(default: Any, help: str, **options: Any) -> Any:
    """A field of `GenerateFlags`, with what argparse is to know of its option."""
    return field(default=default, metadata={"help": help, **options})


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateFlags:
    """The options of the command; None is the checkpoint's default."""

    checkpoint_path: str = _flag(
        "",
        "a bundle, or a training directory, whose newest checkpoint is then converted to a bundle once",
        metavar="PATH",
    )
    prompt: Sequence[str] = _flag(
        (), "one prompt or several; the flag may be repeated", nargs="+", action="extend", metavar="TEXT"
    )
    prompt_file: str = _flag("", "a text file of prompts, one a line, after those of --prompt", metavar="PATH")
    negative_prompt: str | None = _flag(
        None, "what to steer away from; replaces the empty text of the unconditional half", metavar="TEXT"
    )
    subject_name: str = _flag(
        "",
        'replaces {subject} in every prompt, as in: --prompt "a {subject} on the beach" --subject_name "teal robot"',
        metavar="TEXT",
    )
    guidance: float | None = _flag(None, "scale of classifier-free guidance; 1 is none", type=float, metavar="NUMBER")
    guidance_convention: GuidanceConvention = _flag(
        "standard",
        "what --guidance means: uncond + scale (cond - uncond), or NeMo's cond + g (cond - uncond)",
        choices=get_args(GuidanceConvention),
    )
    sampler: str | None = _flag(None, ", ".join(SAMPLERS), metavar="NAME")
    num_steps: int | None = _flag(None, "sampling steps", type=int, metavar="INT")
    seed: int | None = _flag(
        None,
        "decides the initial noise, alone: the same seed gives the same video in any batch (default: 0)",
        type=int,
        metavar="INT",
    )
    seeds: Sequence[int] = _flag(
        (), "several seeds: one video for each prompt and seed", type=int, metavar="INT", nargs="+"
    )
    num_video_frames: int | None = _flag(
        None, "frames of the video, any number; 1 makes an image", type=int, metavar="INT"
    )
    height: int | None = _flag(None, "pixels", type=int, metavar="INT")
    width: int | None = _flag(None, "pixels", type=int, metavar="INT")
    fps: float | None = _flag(
        None, "frames per second, of the file and as the network is told", type=float, metavar="NUMBER"
    )
    video_save_path: str = _flag(
        "outputs",
        "a file (mp4; png or jpg for one frame), or a directory; several videos are numbered, and a .json with the "
        "settings is written beside each (default: outputs)",
        metavar="PATH",
    )
    batch_size: int | None = _flag(
        None,
        f"videos made at once (default: as many as make {TOKENS_PER_BATCH:,} video tokens)",
        type=int,
        metavar="INT",
    )
    device: str = _flag("auto", "auto, cpu, cuda or cuda:N (default: auto)", metavar="NAME")
    dtype: str = _flag("float32", "of the network: float32, bfloat16 or float16 (default: float32)", metavar="NAME")
    tokenizer_model: str = _flag(
        "",
        "directory of the video tokenizer to load instead of the checkpoint's copy; must be the same one",
        metavar="PATH",
    )
    tokenizer_cache_dir: str = _flag("", "directory in which --tokenizer_model is looked up", metavar="PATH")
    t5_cache_dir: str = _flag(
        "",
        "directory of the text encoder to load instead of the checkpoint's copy; must be the same one",
        metavar="PATH",
    )
    num_devices: int = _flag(
        1,
        "only 1: to use several devices, start one process for each with --device cuda:N and its share of the prompts",
        type=int,
        metavar="INT",
    )
    cp_size: int = _flag(1, "only 1: a video is not split over devices", type=int, metavar="INT")
    guardrail_dir: str = _flag("", "not available: screen prompts and videos outside this command", metavar="PATH")


def _parse(argv: list[str]) -> GenerateFlags:
    parser = CommandParser(
        prog="megadit generate",
        usage="megadit generate --checkpoint_path PATH --prompt TEXT [TEXT ...] [options]",
        description="Generates videos, or images, from prompts. What is left out takes the checkpoint's default.",
        epilog="--debug shows the traceback of an error.",
    )
    for flag in fields(GenerateFlags):
        parser.add_argument(f"--{flag.name}", **flag.metadata)
    # argparse's own defaults are None, so that `extend` starts from nothing
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    return GenerateFlags(**given)


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit generate`; returns its exit code."""
    return run_command(_generate, sys.argv[1:] if argv is None else argv)


def _generate(argv: list[str]) -> None:
    flags = _parse(argv)
    _check(flags)
    jobs = list(product(_prompts(flags), flags.seeds or (flags.seed or 0,)))
    bundle = open_bundle(flags.checkpoint_path)
    settings = _settings(flags, bundle.defaults)
    tokenizer = _tokenizer(flags, bundle)
    latent_size(settings, bundle.config, tokenizer)  # a bad size is told before the network is loaded
    paths = output_paths(flags.video_save_path, jobs, num_frames=settings.num_frames)
    text_encoder = load_text_encoder(flags.t5_cache_dir) if flags.t5_cache_dir else None
    pipeline = TextToVideo.load(
        bundle, device=flags.device, dtype=flags.dtype, tokenizer=tokenizer, text_encoder=text_encoder
    )
    with Progress(pipeline.num_denoiser_calls(len(jobs), settings, flags.batch_size), "sampling") as bar:
        videos = pipeline.stream(
            [prompt for prompt, _ in jobs],
            settings,
            seeds=[seed for _, seed in jobs],
            batch_size=flags.batch_size,
            on_step=lambda step: bar.advance(),
        )
        for path, video in zip(paths, videos, strict=True):
            _save(path, video, flags)


def _check(flags: GenerateFlags) -> None:
    """Refuses what no checkpoint could make right."""
    _refuse(not flags.checkpoint_path, "give --checkpoint_path: a bundle or a training directory")
    _refuse(
        flags.guidance is None and flags.guidance_convention != "standard",
        f"--guidance_convention={flags.guidance_convention} says what --guidance means; give that too",
    )
    _refuse(flags.seed is not None and flags.seeds, "give --seed or --seeds, not both")
    _refuse(
        flags.num_devices != 1,
        f"--num_devices={flags.num_devices}: start one process for each device, with --device cuda:N and its share "
        "of the prompts",
    )
    _refuse(
        flags.cp_size != 1,
        f"--cp_size={flags.cp_size}: a video is not split over devices; to save memory, use --dtype bfloat16",
    )
    _refuse(
        flags.guardrail_dir,
        f"--guardrail_dir={flags.guardrail_dir}: there are no guardrails here; screen prompts and videos yourself",
    )
    _refuse(
        flags.tokenizer_cache_dir and not flags.tokenizer_model,
        f"--tokenizer_cache_dir={flags.tokenizer_cache_dir} needs --tokenizer_model, which is looked up in it",
    )
    for name in ("num_video_frames", "batch_size"):
        value = getattr(flags, name)
        _refuse(value is not None and value < 1, f"--{name}={value} must be greater than 0")


def _refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UserError(reason)


def _prompts(flags: GenerateFlags) -> list[str]:
    """Those of --prompt, then those of --prompt_file, with their subject named."""
    prompts = [*flags.prompt, *_file_lines(flags.prompt_file)]
    _refuse(not prompts, "there is no prompt; give --prompt TEXT or --prompt_file FILE")
    has_place = any(SUBJECT in prompt for prompt in prompts)
    _refuse(has_place and not flags.subject_name, f"a prompt contains {SUBJECT}; say what it is with --subject_name")
    _refuse(
        flags.subject_name and not has_place,
        f"--subject_name={flags.subject_name} has no place: write {SUBJECT} where a prompt should name it",
    )
    return [prompt.replace(SUBJECT, flags.subject_name) for prompt in prompts]


def _file_lines(path: str) -> list[str]:
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt_file {path}: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _settings(flags: GenerateFlags, defaults: SamplingDefaults) -> SamplingDefaults:
    guidance = None if flags.guidance is None else guidance_scale(flags.guidance, flags.guidance_convention)
    return resolve_settings(
        defaults,
        negative_prompt=flags.negative_prompt,
        guidance=guidance,
        sampler=flags.sampler,
        num_steps=flags.num_steps,
        num_frames=flags.num_video_frames,
        height=flags.height,
        width=flags.width,
        fps=flags.fps,
    )


def _tokenizer(flags: GenerateFlags, bundle: Bundle) -> VideoTokenizer:
    if not flags.tokenizer_model:
        return bundle.load_tokenizer()
    return load_tokenizer(Path(flags.tokenizer_cache_dir, flags.tokenizer_model))


def output_paths(save_path: str, jobs: list[tuple[str, int]], *, num_frames: int) -> list[Path]:
    """Where the video of each (prompt, seed) goes: `save_path` itself, or numbered names beside or inside it.

    Raises:
        UserError: for a file type that cannot be written, and a directory that cannot be made or written to.
    """
    path = Path(save_path)
    is_file = not path.is_dir() and _names_file(path, num_frames)
    directory = path.parent if is_file else path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--video_save_path={save_path}: cannot make the directory {directory}: {error}") from error
    _refuse(not os.access(directory, os.W_OK), f"--video_save_path={save_path}: {directory} may not be written to")
    if is_file and len(jobs) == 1:
        return [path]
    if is_file:
        return [directory / f"{path.stem}_{i:04d}{path.suffix}" for i in range(len(jobs))]
    suffix = ".png" if num_frames == 1 else ".mp4"
    return [directory / f"{i:04d}_{_slug(prompt)}_seed{seed}{suffix}" for i, (prompt, seed) in enumerate(jobs)]


def _names_file(path: Path, num_frames: int) -> bool:
    """Whether this is the name of a video or image, rather than of a directory."""
    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        return True
    if suffix in IMAGE_SUFFIXES:
        _refuse(num_frames > 1, f"--video_save_path={path} is an image; use .mp4 for {num_frames} frames")
        return True
    media_type = mimetypes.guess_type(path.name)[0] or ""
    _refuse(
        media_type.startswith(("video/", "image/")),
        f"--video_save_path={path}: cannot write {suffix}; use {', '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)}",
    )
    return False


def _slug(prompt: str) -> str:
    """A part of a file name: letters, digits and dashes alone, so that no prompt leads out of the directory."""
    return re.sub("[^a-z0-9]+", "-", prompt.lower())[:48].strip("-") or "video"


def _save(path: Path, result: GeneratedVideo, flags: GenerateFlags) -> None:
    write_video(path, result.video, result.settings.fps, metadata={"comment": result.prompt})
    settings = {"prompt": result.prompt, "seed": result.seed, **asdict(result.settings)}
    origin = {"checkpoint_path": flags.checkpoint_path, "dtype": flags.dtype}
    write_json(path.with_suffix(".json"), settings | origin)
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
