"""`megadit generate --total_frames`: videos of any length, written window by window."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate.conditioning_files import ConditioningFile
from megadit.infer.generate.options import GenerateOptions, refuse
from megadit.infer.generate.outputs import save_long
from megadit.infer.generate.specs import Grid, VideoSpec
from megadit.infer.media.signing import Marker
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.windows import num_windows, stream_windows
from megadit.infer.runtimes.ranks import is_first
from megadit.models.bundle import Bundle
from megadit.models.shared.progress import Progress


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
    return Grid(specs=[first], num_columns=1)


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
    windows = [num_windows(options.total_frames, spec.settings.num_frames, keep_frames) for spec in specs]
    total = sum(calls * count for calls, count in zip(per_window, windows, strict=True))
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
