"""`megadit generate`: prompts to videos on disk.

Has every flag of NeMo's and DFM's `inference_dit_model.py`, under the same names; each does what it says or says why
it cannot. Flags that are left out take the checkpoint's defaults.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from megadit.infer.cache import bundle_plans, find_plan
from megadit.infer.checkpoints import open_bundle, weaker_bundle
from megadit.infer.conditions import GivenVideo, check_given
from megadit.infer.contact_sheet import contact_sheet, middle_frame
from megadit.infer.flags import DEFAULT_DTYPE, DEFAULT_RUNTIME, GenerateFlags, parse, refuse
from megadit.infer.jobs import Grid, Job, plan_jobs
from megadit.infer.outputs import checkpoint_fingerprint, make_record, output_paths, read_record, repeated, save
from megadit.infer.pipeline import GeneratedVideo, TextToVideo
from megadit.infer.ranks import device_name, finish, is_first, start
from megadit.infer.settings import far_from_training, latent_size
from megadit.infer.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, write_video
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.command import run_command
from megadit.models.shared.errors import told_once
from megadit.models.shared.progress import Progress
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit generate`; returns its exit code."""
    return run_command(_generate, sys.argv[1:] if argv is None else argv)


def _generate(argv: list[str]) -> None:
    with told_once():
        flags, bundle, grid = _plan(parse(argv))
        tokenizer = _tokenizer(flags, bundle)
        given = _check_jobs(grid.jobs, flags, bundle, tokenizer)
        paths = output_paths(flags.video_save_path, grid.jobs, flags.format)
        ranks = start(tensor=flags.tp_size, context=flags.cp_size, split_guidance=flags.cfg_parallel)
        pipeline = TextToVideo.load(
            bundle,
            device=device_name(flags.device),
            dtype=flags.dtype or DEFAULT_DTYPE,
            tokenizer=tokenizer,
            text_encoder=load_text_encoder(flags.t5_cache_dir) if flags.t5_cache_dir else None,
            batch_guidance=not flags.sequential_guidance,
            offload_text_encoder=flags.offload_text_encoder,
            compile=flags.compile,
            cuda_graphs=flags.cuda_graphs,
            overlap_decoding=flags.overlap_decoding,
            cache_measure=flags.cache_measure,
            guardrail_dir=flags.guardrail_dir,
            runtime=flags.runtime or DEFAULT_RUNTIME,
            tensor_parallel=flags.tp_size,
            context_parallel=flags.cp_size,
            split_guidance=ranks.halves,
        )
    jobs, videos = ranks.mine(grid.jobs), []
    for path, job, result in zip(ranks.mine(paths), jobs, _videos(pipeline, jobs, given, flags), strict=True):
        if ranks.writes:
            save(path, result, make_record(result, job, flags, bundle), flags.format)
            print(f"{path}\n", end="", flush=True)  # in one write: several ranks share the output
        if flags.contact_sheet:
            videos.append(result.video)
    if flags.contact_sheet and (everyones := ranks.gathered(videos)):
        _write_contact_sheet(flags.contact_sheet, grid, everyones)
        print(flags.contact_sheet)
    finish()


def _plan(flags: GenerateFlags) -> tuple[GenerateFlags, Bundle, Grid]:
    """What is to be made, of which checkpoint; `--repeat` fills the options in first."""
    refuse(flags.lpips_weights, "--lpips_weights is for `megadit calibrate-cache`: plans need it no more; leave it out")
    record = read_record(flags.repeat) if flags.repeat else None
    wants_other_checkpoint = bool(flags.checkpoint_path)
    flags, recorded = repeated(flags, record) if record else (flags, None)
    bundle = open_bundle(flags.checkpoint_path)
    is_other = record is not None and record.get("checkpoint") != checkpoint_fingerprint(bundle)
    refuse(
        is_other and not wants_other_checkpoint,
        f"{bundle.path} is no longer the checkpoint that made {flags.repeat}; to use it nevertheless, name it with "
        "--checkpoint_path",
    )
    return flags, bundle, plan_jobs(flags, recorded or bundle.defaults, trained=bundle.defaults)


def _check_jobs(
    jobs: Sequence[Job], flags: GenerateFlags, bundle: Bundle, tokenizer: VideoTokenizer
) -> dict[Job, GivenVideo]:
    """Refuses what cannot be made before the network is loaded; gives the videos that jobs start from."""
    given: dict[Job, GivenVideo] = {}
    for settings in dict.fromkeys(job.settings for job in jobs):
        latent_size(settings, bundle.config, tokenizer)
        warning = far_from_training(settings, bundle.defaults, bundle.config, tokenizer)
        if warning and is_first():
            print(f"warning: {warning}", file=sys.stderr)
        find_plan(bundle_plans(bundle, flags.cache_measure), settings)
        if settings.autoguidance:
            weaker_bundle(settings.autoguidance, bundle)
    loaded = {}
    for job in jobs:
        if job.given is not None:
            if job.given not in loaded:
                loaded[job.given] = job.given.load()
            given[job] = loaded[job.given]
            check_given(given[job], job.settings, tokenizer)
    suffix, names = Path(flags.contact_sheet).suffix.lower(), (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    is_picture = not flags.contact_sheet or suffix in names
    refuse(not is_picture, f"--contact_sheet={flags.contact_sheet}: use a name that ends in {', '.join(names)}")
    return given


def _tokenizer(flags: GenerateFlags, bundle: Bundle) -> VideoTokenizer:
    if not flags.tokenizer_model:
        return bundle.load_tokenizer()
    return load_tokenizer(Path(flags.tokenizer_cache_dir, flags.tokenizer_model))


def _videos(
    pipeline: TextToVideo, jobs: Sequence[Job], given: dict[Job, GivenVideo], flags: GenerateFlags
) -> Iterator[GeneratedVideo]:
    """The video of each job, in order; neighbours with the same settings share batches."""
    groups = [list(group) for _, group in groupby(jobs, key=lambda job: (job.settings, job.given))]

    def num_calls(group: list[Job]) -> int:
        source = given.get(group[0])
        return pipeline.num_denoiser_calls(len(group), group[0].settings, flags.batch_size, source)

    with Progress(sum(map(num_calls, groups)), "sampling", enabled=is_first()) as bar:
        for group in groups:
            yield from pipeline.stream(
                [job.prompt for job in group],
                group[0].settings,
                seeds=[job.seed for job in group],
                batch_size=flags.batch_size,
                given=given.get(group[0]),
                on_step=lambda step: bar.advance(),
            )


def _write_contact_sheet(path: str, grid: Grid, videos: list[np.ndarray]) -> None:
    if Path(path).suffix.lower() in IMAGE_SUFFIXES:
        videos = [middle_frame(video) for video in videos]
    captions = [f"{job.prompt} · seed {job.seed} · guidance {job.settings.guidance:g}" for job in grid.jobs]
    fps = max(job.settings.fps for job in grid.jobs)
    write_video(path, contact_sheet(videos, captions, grid.num_columns), fps)


if __name__ == "__main__":
    raise SystemExit(main())
