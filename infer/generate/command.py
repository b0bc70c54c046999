"""`megadit generate`: prompts to videos on disk.

Has every flag of NeMo's and DFM's `inference_dit_model.py`, under the same names; each does what it says or says why
it cannot. Flags that are left out take the checkpoint's defaults.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import (
    ConditioningFile,
    ConditioningItem,
    Media,
    Target,
    check_conditioning,
    encodable_frames,
    places_of,
)
from megadit.infer.generate.memory_plan import Choices, describe_plan, fitting, plan_memory
from megadit.infer.generate.options import GenerateOptions, parse, refuse
from megadit.infer.generate.outputs import make_record, output_paths, read_record, repeated, save, save_long
from megadit.infer.generate.specs import Grid, VideoSpec, load_media, video_grid
from megadit.infer.media.contact_sheet import contact_sheet, grid_columns, middle_frame
from megadit.infer.media.signing import Marker, load_marker
from megadit.infer.media.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, write_video
from megadit.infer.pipeline.adapters import NO_ADAPTER_INPUTS
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import GeneratedVideo, checkpoint_fingerprint
from megadit.infer.pipeline.step_cache import bundle_plans, find_plan
from megadit.infer.pipeline.windows import later_conditioning, num_windows, stream_windows, windows_of
from megadit.infer.runtimes.load import adapter_inputs, autoguidance_bundle, taken
from megadit.infer.runtimes.options import AUTO, chosen_dtype, print_dtype
from megadit.infer.runtimes.ranks import device_name, finish, is_first, start, world_size
from megadit.infer.runtimes.torch import find_device, find_dtype, use_device
from megadit.infer.sampling.resolve import far_from_training, latent_size, video_work
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.convert.adapters.files import read_adapter_of
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.machine import enough_memory, free_memory
from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.errors import report_once
from megadit.models.shared.files import can_be_folder
from megadit.models.shared.progress import Progress
from megadit.models.shared.resources import GIB, check_memory_fits
from megadit.models.shared.words import far_longer, unseen_words
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer


@entry_point
@enough_memory(
    "make smaller or shorter videos or fewer at a time (--height, --width, --num_frames, --batch_size 1), or keep less "
    "on the device (--sequential_guidance, --offload_text_encoder, --resident_blocks); --dry-run says what fits"
)
def main(argv: list[str]) -> None:
    """Runs `megadit generate`; returns its exit code."""
    with report_once():
        options, bundle, grid = _plan(parse(argv))
        options = replace(options, running=replace(options.running, dtype=_dtype(options, bundle)))
        running = options.running
        tokenizer = _tokenizer(options, bundle)
        if options.total_frames:
            grid = stories(grid, options, taken(bundle, running.name))
        media = _check_videos(grid.specs, options, bundle, tokenizer)
        asked, free = _asked_of_memory(grid.specs, options, bundle, tokenizer)
        if options.dry_run:
            print(describe_plan(plan_memory(*asked), free, fitting(*asked, free)))
            return
        device = device_name(running.device)
        use_device(device)
        if not options.even_if_too_large and world_size() == 1:
            _check_memory(asked, free)
        mark = load_marker(options.signing)
        paths = output_paths(options.video_save_path, grid.specs, options.format)
        is_video = options.contact_sheet and Path(options.contact_sheet).resolve() in [path.resolve() for path in paths]
        refuse(is_video, f"--contact_sheet={options.contact_sheet} is the file of a video, too; give another name")
        sizes = {"tensor": running.tensor_parallel, "context": running.context_parallel}
        ranks = start(**sizes, split_guidance=options.cfg_parallel)
        if running.compile and is_first():
            print("the network is compiled at its first call, which may take minutes", file=sys.stderr)
        pipeline = TextToVideo.from_pretrained(
            bundle,
            tokenizer=tokenizer,
            text_encoder=load_text_encoder(options.t5_cache_dir) if options.t5_cache_dir else None,
            split_guidance=ranks.passes,
            **asdict(replace(running, device=device)),
        )
    work = [video_work(spec.settings, bundle.config, tokenizer) for spec in grid.specs if world_size() > 1]
    specs, paths, videos = ranks.mine(grid.specs, work), ranks.mine(paths, work), []
    if options.total_frames:
        write_long_videos(pipeline, specs, paths, media, options, bundle, mark)
        finish()
        return
    for path, spec, result in zip(paths, specs, _videos(pipeline, specs, media, options), strict=True):
        if ranks.writes:
            save(path, result, make_record(result, spec), options.format, mark)
            print(f"{path}\n", end="", flush=True)  # in one write: several ranks share the output
        if options.contact_sheet:
            videos.append(result.video)
    if options.contact_sheet and (everyones := ranks.gathered(videos, work)):
        _write_contact_sheet(options.contact_sheet, grid, everyones, mark)
        print(options.contact_sheet)
    finish()


def _plan(options: GenerateOptions) -> tuple[GenerateOptions, Bundle, Grid]:
    """Return the options (completed by `--repeat`), the checkpoint, and the videos to generate."""
    refuse(
        options.lpips_weights,
        "--lpips_weights is for `megadit calibrate-cache`: generation does not use it; leave it out",
    )
    record = read_record(options.repeat) if options.repeat else None
    wants_other_checkpoint = bool(options.checkpoint_path)
    options, recorded = repeated(options, record) if record else (options, None)
    bundle = open_bundle(options.checkpoint_path)
    is_other = record is not None and record.get("checkpoint") != checkpoint_fingerprint(bundle)
    refuse(
        is_other and not wants_other_checkpoint,
        f"{bundle.path} is no longer the checkpoint that made {options.repeat}; to use it anyway, pass "
        "--checkpoint_path",
    )
    return options, bundle, video_grid(options, bundle.defaults, recorded)


def _check_videos(
    specs: Sequence[VideoSpec], options: GenerateOptions, bundle: Bundle, tokenizer: VideoTokenizer
) -> dict[ConditioningFile, ConditioningItem]:
    """Check the videos before the network is loaded; return the conditioning media by their files."""
    for settings in dict.fromkeys(spec.settings for spec in specs):
        latent_size(settings, bundle.config, tokenizer)
        warning = far_from_training(settings, bundle.defaults, bundle.config, tokenizer)
        if warning and is_first():
            print(f"warning: {warning}", file=sys.stderr)
        if settings.autoguidance:
            autoguidance_bundle(settings.autoguidance, bundle)
    # adapters do not record the sizes they were trained on
    prompts = [spec.prompt for spec in specs if not spec.adapters]
    for warning in (unseen_words(prompts, bundle.path), far_longer(prompts, bundle.longest_caption)):
        if warning and is_first():
            print(f"warning: {warning}", file=sys.stderr)
    media = load_media(specs)
    conditionings = taken(bundle, options.running.name)
    for conditioning, settings in dict.fromkeys((spec.conditioning, spec.settings) for spec in specs):
        conditioning_media, target = (
            tuple(media[file] for file in conditioning),
            Target.of(settings, bundle.config, tokenizer),
        )
        check_conditioning(conditioning_media, conditionings, target)
        has_later = (options.total_frames or 0) > settings.num_frames
        later = [_later_conditioning(options, settings, conditionings, tokenizer)] if has_later else []
        for each in (conditioning_media, *later) if settings.cache_budget else ():
            find_plan(bundle_plans(bundle, options.running.cache_measure), settings, places_of(each, target))
    _check_adapters(specs, options, bundle)
    suffix, names = Path(options.contact_sheet).suffix.lower(), (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    is_picture = not options.contact_sheet or suffix in names
    refuse(not is_picture, f"--contact_sheet={options.contact_sheet}: use a name that ends in {', '.join(names)}")
    has_folder = can_be_folder(Path(options.contact_sheet).parent)
    refuse(not has_folder, f"--contact_sheet={options.contact_sheet}: its folder is a file; give another name")
    return media


def _later_conditioning(
    options: GenerateOptions, settings: SamplingSettings, conditionings: Collection[str], tokenizer: VideoTokenizer
) -> Media:
    """Conditioning media of windows after the first; black frames stand in for frames yet to be generated."""
    nothing = np.zeros((settings.num_frames, settings.height, settings.width, 3), np.uint8)
    keep_frames = encodable_frames(options.keep_frames or 1, tokenizer)
    return later_conditioning(nothing, keep_frames, conditionings, nothing if options.keep_first else None)


def _check_adapters(specs: Sequence[VideoSpec], options: GenerateOptions, bundle: Bundle) -> None:
    paths = dict.fromkeys(adapter.path for spec in specs for adapter in spec.adapters)
    adapters = {path: read_adapter_of(path, bundle) for path in paths}
    for path, adapter in adapters.items():
        if is_first():
            print(f"{path}: {adapter.reading}", file=sys.stderr)
    states = {path: adapter.to_state() for path, adapter in adapters.items()}
    if not paths or options.running.is_torch:
        return
    slots = adapter_inputs(bundle, options.running.name)
    refuse(slots is None, f"{bundle.path} was {NO_ADAPTER_INPUTS}")
    ranks = {path: slots.packed(*state).ranks for path, state in states.items()}
    for scaled_adapters in dict.fromkeys(spec.adapters for spec in specs):
        slots.check_together([ranks[scaled.path] for scaled in scaled_adapters if scaled.scale])


def _dtype(options: GenerateOptions, bundle: Bundle) -> str:
    """Return the dtype in the options, or else one chosen for this bundle; the first rank prints it."""
    choose_dtype = print_dtype if is_first() else chosen_dtype
    running = options.running
    return choose_dtype(running.dtype or AUTO, bundle, device_name(running.device), running.name)


def _asked_of_memory(
    specs: Sequence[VideoSpec], options: GenerateOptions, bundle: Bundle, tokenizer: VideoTokenizer
) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of `plan_memory` for the largest video, and the bytes that the device has for it."""
    running = options.running
    choices = Choices(
        dtype=find_dtype(running.dtype),
        running=running,
        batch_size=options.batch_size,
        num_videos=len(specs),
        slots=None if running.is_torch else adapter_inputs(bundle, running.name),
    )
    largest = max((spec.settings for spec in specs), key=lambda each: each.num_frames * each.height * each.width)
    text_encoder = load_text_encoder(options.t5_cache_dir) if options.t5_cache_dir else bundle.load_text_encoder()
    in_gib = options.device_memory
    free = free_memory(find_device(running.device)) if in_gib is None else int(in_gib * GIB)
    return (bundle, largest, tokenizer, text_encoder, choices), free


def _check_memory(asked: tuple[Any, ...], free: int) -> None:
    """Raises UserError if far more memory is needed than is free; the message names flags that need less."""
    needed = plan_memory(*asked).peak
    if needed > free:
        fits = fitting(*asked, free)
        check_memory_fits(needed, free, "this", f"use {fits.flags}" if fits else "make the video smaller")


def _tokenizer(options: GenerateOptions, bundle: Bundle) -> VideoTokenizer:
    if not options.tokenizer_model:
        return bundle.load_tokenizer()
    return load_tokenizer(Path(options.tokenizer_cache_dir, options.tokenizer_model))


def _videos(
    pipeline: TextToVideo,
    specs: Sequence[VideoSpec],
    media: dict[ConditioningFile, ConditioningItem],
    options: GenerateOptions,
) -> Iterator[GeneratedVideo]:
    """The video of each spec, in order; consecutive specs with the same settings share batches."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: (spec.settings, spec.conditioning))]

    def conditioning(group: list[VideoSpec]) -> tuple[ConditioningItem, ...]:
        return tuple(media[file] for file in group[0].conditioning)

    def num_calls(group: list[VideoSpec]) -> int:
        return pipeline.num_denoiser_calls(len(group), group[0].settings, options.batch_size, conditioning(group))

    with Progress(sum(map(num_calls, groups)), "sampling", enabled=is_first()) as bar:
        for group in groups:
            yield from pipeline.stream(
                [spec.prompt for spec in group],
                group[0].settings,
                seeds=[spec.seed for spec in group],
                batch_size=options.batch_size,
                conditioning=conditioning(group),
                adapters=[{adapter.path: adapter.scale for adapter in spec.adapters} for spec in group],
                on_step=lambda step: bar.advance(),
            )


def _write_contact_sheet(path: str, grid: Grid, videos: list[np.ndarray], mark: Marker | None) -> None:
    if Path(path).suffix.lower() in IMAGE_SUFFIXES:
        videos = [middle_frame(video) for video in videos]
    captions = [f"{spec.prompt} · seed {spec.seed} · guidance {spec.settings.guidance:g}" for spec in grid.specs]
    fps = max(spec.settings.fps for spec in grid.specs)
    num_columns = grid.most_seeds if grid.most_seeds > 1 else grid_columns(len(videos))
    write_video(path, contact_sheet(videos, captions, num_columns), fps, mark=mark)


# --- `megadit generate --total_frames`: videos of any length, written window by window --------------------------------


def stories(grid: Grid, options: GenerateOptions, conditionings: Collection[str]) -> Grid:
    """The videos to generate: one for each prompt, or with --story one for all prompts.

    `conditionings` are the kinds that the network was trained with.

    Raises:
        UserError: for options that do not work with windows.
    """
    refuse(options.format not in (None, "mp4"), f"--total_frames makes an mp4: leave out --format={options.format}")
    refuse(options.contact_sheet, "--total_frames makes no contact sheet: leave out --contact_sheet")
    suffix = Path(options.video_save_path).suffix.lower()
    refuse(suffix not in ("", ".mp4"), f"--video_save_path={options.video_save_path}: --total_frames makes an mp4")
    refuse(options.keep_first and "edit" not in conditionings, "--keep_first needs a model with edit conditioning")
    for spec in grid.specs:
        num_windows(options.total_frames, spec.settings.num_frames, options.keep_frames or 1)
    if not options.story:
        return grid
    first, *others = grid.specs
    alike = all(
        (spec.settings, spec.conditioning, spec.seed) == (first.settings, first.conditioning, first.seed)
        for spec in others
    )
    refuse(not alike, "--story makes one video: its prompts need the same seed, settings and conditioning files")
    return Grid(specs=[first], most_seeds=1)


def write_long_videos(
    pipeline: TextToVideo,
    specs: Sequence[VideoSpec],
    paths: Sequence[Path],
    media: Mapping[ConditioningFile, ConditioningItem],
    options: GenerateOptions,
    bundle: Bundle,
    mark: Marker | None = None,
) -> None:
    """Generate the videos one after another, and print the path of each."""
    keep_frames = options.keep_frames or 1
    per_window = [pipeline.num_denoiser_calls(1, spec.settings) for spec in specs]
    windows = [
        windows_of(options.total_frames, spec.settings.num_frames, keep_frames, pipeline.tokenizer) for spec in specs
    ]
    total = sum(calls * count for calls, (count, _) in zip(per_window, windows, strict=True))
    with Progress(total, "sampling", enabled=is_first()) as bar:
        for spec, path in zip(specs, paths, strict=True):
            story = list(options.prompt) if options.story else [spec.prompt]

            def parts(spec: VideoSpec = spec, story: list[str] = story) -> Iterator[np.ndarray]:
                for (frames,) in stream_windows(
                    pipeline,
                    [story],
                    spec.settings,
                    total_frames=options.total_frames,
                    keep_frames=keep_frames,
                    keep_first=options.keep_first,
                    seeds=[spec.seed],
                    conditioning=[tuple(media[file] for file in spec.conditioning)],
                    on_step=lambda step: bar.advance(),
                ):
                    yield frames

            save_long(path, parts(), spec, story, options, bundle, mark)
            print(f"{path}\n", end="", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
