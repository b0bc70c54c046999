"""`megadit generate`: prompts to videos on disk.

Has every flag of NeMo's and DFM's `inference_dit_model.py`, under the same names; each does what it says or says why
it cannot. Flags that are left out take the checkpoint's defaults.
"""

import mimetypes
import re
import sys
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import Annotated

import tyro

from megadit.infer.checkpoints import open_bundle
from megadit.infer.guidance import GuidanceConvention, guidance_scale
from megadit.infer.pipeline import GeneratedVideo, TextToVideo, latent_size, resolve_settings
from megadit.infer.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, write_video
from megadit.models.bundle import Bundle, SamplingDefaults
from megadit.models.support import Progress, UserError, run_command, write_json
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

_INT = tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the checkpoint's)")
_FLOAT = tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: the checkpoint's)")
_TEXT = tyro.conf.arg(metavar="STR", help_behavior_hint="(default: the checkpoint's)")
_PATH = tyro.conf.arg(metavar="PATH", help_behavior_hint="")
_NO_HINT = tyro.conf.arg(help_behavior_hint="")
_OPTIONAL_INT = tyro.conf.arg(metavar="INT", help_behavior_hint="")

SUBJECT = "{subject}"
"""The place in a prompt that --subject_name fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateFlags:
    """Generate videos, or images, from prompts. `--debug` shows the traceback of an error."""

    checkpoint_path: Annotated[str, _PATH] = ""
    """A bundle, or a training directory, whose newest checkpoint is then converted to a bundle once."""
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], _NO_HINT] = ()
    """One prompt or several; the flag may be repeated."""
    prompt_file: Annotated[str, _PATH] = ""
    """A text file of prompts, one a line, after those of --prompt."""
    negative_prompt: Annotated[str | None, _TEXT] = None
    """What to steer away from; replaces the empty text of the unconditional half."""
    subject_name: Annotated[str, _NO_HINT] = ""
    """Replaces {subject} in every prompt, as in: --prompt "a {subject} on the beach" --subject_name "teal robot"."""
    guidance: Annotated[float | None, _FLOAT] = None
    """Scale of classifier-free guidance; 1 is none."""
    guidance_convention: GuidanceConvention = "standard"
    """What --guidance means: uncond + scale (cond - uncond), or NeMo's cond + g (cond - uncond)."""
    sampler: Annotated[str | None, _TEXT] = None
    """euler, heun or dpmpp_2m."""
    num_steps: Annotated[int | None, _INT] = None
    """Sampling steps."""
    seed: Annotated[int | None, _OPTIONAL_INT] = None
    """Decides the initial noise, alone: the same seed gives the same video in any batch. (default: 0)"""
    seeds: Annotated[tuple[int, ...], _NO_HINT] = ()
    """Several seeds: one video for each prompt and seed."""
    num_video_frames: Annotated[int | None, _INT] = None
    """Frames of the video, any number; 1 makes an image."""
    height: Annotated[int | None, _INT] = None
    """Pixels."""
    width: Annotated[int | None, _INT] = None
    """Pixels."""
    fps: Annotated[float | None, _FLOAT] = None
    """Frames per second, of the file and as the network is told."""
    video_save_path: Annotated[str, tyro.conf.arg(metavar="PATH")] = "outputs"
    """A file (mp4; png or jpg for one frame), or a directory. Several videos are numbered. A .json with the settings
    is written beside each."""
    batch_size: Annotated[int | None, _OPTIONAL_INT] = None
    """Videos made at once. (default: as many as make 32,768 video tokens)"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "float32"
    """Of the network: float32, bfloat16 or float16."""
    tokenizer_model: Annotated[str, _PATH] = ""
    """Directory of the video tokenizer to load instead of the checkpoint's copy; must be the same one."""
    tokenizer_cache_dir: Annotated[str, _PATH] = ""
    """Directory in which --tokenizer_model is looked up."""
    t5_cache_dir: Annotated[str, _PATH] = ""
    """Directory of the text encoder to load instead of the checkpoint's copy; must be the same one."""
    num_devices: int = 1
    """Only 1: to use several devices, start one process for each with --device cuda:N and its share of the prompts."""
    cp_size: int = 1
    """Only 1: a video is not split over devices."""
    guardrail_dir: Annotated[str, _PATH] = ""
    """Not available: screen prompts and videos outside this command."""


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit generate`; returns its exit code."""
    return run_command(_generate, sys.argv[1:] if argv is None else argv)


def _generate(argv: list[str]) -> None:
    flags = tyro.cli(GenerateFlags, args=argv, prog="megadit generate", use_underscores=True)
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
            progress=lambda done, total: bar.advance(),
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
    _refuse(flags.batch_size is not None and flags.batch_size < 1, f"--batch_size={flags.batch_size} must be positive")


def _refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UserError(reason)


def _prompts(flags: GenerateFlags) -> list[str]:
    """Those of --prompt, then those of --prompt_file, with their subject named."""
    prompts = [*chain.from_iterable(flags.prompt), *_file_lines(flags.prompt_file)]
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
        UserError: for a file type that cannot be written, and a directory that cannot be made.
    """
    path = Path(save_path)
    is_file = not path.is_dir() and _names_file(path, num_frames)
    directory = path.parent if is_file else path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--video_save_path={save_path}: cannot make the directory {directory}: {error}") from error
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
    origin = {"checkpoint_path": str(flags.checkpoint_path), "dtype": flags.dtype}
    write_json(path.with_suffix(".json"), settings | origin)
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
