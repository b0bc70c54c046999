"""`megadit evaluate`: the quality of a model's videos, as metrics with confidence intervals, and an HTML report.

    megadit evaluate BUNDLE --real data/clips --extractors inception.safetensors i3d.safetensors clip/ --out runs/eval
    megadit evaluate BUNDLE --against OTHER --guidances 1 2 4 6 ...     # two models, the same prompts and seeds
    megadit evaluate --videos FOLDER --real data/clips ...              # existing videos
    megadit evaluate http://HOST:PORT --key_file alice.key ...          # a service

The stages (videos, features, metrics) store their results: after an interruption the same command continues. Under
torchrun the ranks share the first two.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megadit.infer.evaluate.evaluation import Candidate, Evaluation, differences
from megadit.infer.evaluate.export import EXPORTS
from megadit.infer.evaluate.extractors import Extractor, open_extractors
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.generated import BundleMaker, Maker, Request, made_videos, make_videos
from megadit.infer.evaluate.metrics.loss import LOSS, LossScorer
from megadit.infer.evaluate.metrics.motion import MotionClips
from megadit.infer.evaluate.metrics.scorer import ProgramScorer
from megadit.infer.evaluate.metrics.table import ADHERENCE, METRICS
from megadit.infer.evaluate.report.show import write_report
from megadit.infer.evaluate.videos import Clip, VideoSet, open_videos, prompts_of
from megadit.infer.evaluate.window import MOST_FRAMES, Window, window_of
from megadit.infer.generate.options import refuse
from megadit.infer.pipeline.results import checkpoint_fingerprint
from megadit.infer.runtimes.options import AUTO, print_dtype
from megadit.infer.runtimes.ranks import Ranks, device_name, finish, is_first, start, world_size
from megadit.infer.runtimes.torch import use_device
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import open_bundle
from megadit.models.diffusion.settings import OF_PROMPTS, PartialSettings
from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError, choose_one, report_once
from megadit.models.shared.folder_lock import FolderLock


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    model: str = setting(
        "", "a bundle, a training directory, or http://HOST:PORT of a service", positional=True, metavar="MODEL"
    )
    videos: Path | None = setting(None, "a folder of videos to evaluate in place of a model's")
    against: str = setting(
        "", "a second model, which gets the same prompts and seeds, or a second folder of videos", metavar="MODEL"
    )
    real: Path | None = setting(None, "real videos to compare with: a folder, or a data set of `megadit prepare`")
    prompts: str = setting(
        "", "a text file, one prompt a line, or .jsonl (default: the captions of --real)", metavar="PATH"
    )
    out: Path = setting(help="folder for report.json, report.html, and the cache for later evaluations")
    extractors: Sequence[Path] = setting(
        (),
        "feature extractors: files of `megadit evaluate convert`, folders of CLIP and VideoMAE as "
        "transformers saves them, bundles of CLIP and ViT, classifier.safetensors of `megadit demo`",
        metavar="PATH",
    )
    scorer_dir: Path | None = setting(
        None, "folder of your own scorer (scorer.py), whose scores are metrics too", metavar="DIR"
    )
    metrics: Sequence[str] = setting(
        (),
        f"metrics to compute, of {', '.join((*METRICS, ADHERENCE, LOSS))} (default: all that the extractors support)",
        metavar="NAME",
    )
    guidances: Sequence[float] = setting((), "several guidance scales: a curve of quality against prompt adherence")
    count: int | None = setting(
        None, "videos of each model (default: one for each prompt), and maximum number of real ones", above=1
    )
    seed: int = setting(0, "seed of the first video; further ones count up from it (default: {default})", low=0)
    frames: int | None = setting(None, "frames from the middle of each video (default: 16, at most all)", above=0)
    size: tuple[int, int] | None = setting(None, "crop and resize all videos to this height and width: 64x64")
    features: Path | None = setting(
        None, "cache of features that several evaluations may share (default: a folder in --out)"
    )
    export_for: str | None = setting(
        None, "also export the videos for this program, to OUT/exported", choices=tuple(EXPORTS)
    )
    key_file: Path | None = setting(None, "file with the API key of a service, as `megadit serve keys add` prints it")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")
    dtype: str = setting(AUTO, "dtype of the models' networks (default: {default})", metavar="NAME")
    settings: PartialSettings = group(PartialSettings, "sampling (default: as the checkpoint says)", only=OF_PROMPTS)


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("real", "prompts", "out", "extractors", "metrics", "count", "guidances", "against", "videos"),
    "what is evaluated": ("frames", "size", "scorer_dir", "features", "export_for", "seed"),
    "sampling (default: as the checkpoint says)": OF_PROMPTS,
    "machine and service": ("device", "dtype", "key_file"),
}
EXAMPLES = (
    "megadit evaluate runs/demo/bundle --real runs/demo/dataset --extractors runs/demo/classifier.safetensors --out o",
    "megadit evaluate my_model --real clips --metrics motion --out report",
    "megadit evaluate my_model --against other_model --prompts prompts.txt --extractors clip_folder --out report",
    "megadit evaluate --videos made --real clips --metrics motion --out report",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model and its requests, one for each guidance scale."""

    label: str
    maker: Maker
    requests: Sequence[Request]


@partial(entry_point, is_run=True)
def main(argv: list[str]) -> None:
    """Runs `megadit evaluate`; returns its exit code."""
    with report_once():
        options = read_options(
            EvaluateOptions,
            argv,
            prog="megadit evaluate",
            groups=GROUPS,
            examples=EXAMPLES,
            usage="megadit evaluate MODEL --out PATH [options]",
            description="Measures the quality of a model's videos: metrics with intervals, and an HTML report.",
        )
        _check(options)
        device = use_device(device_name(options.device))
        real = None if options.real is None else open_videos(options.real, options.count)
        prompts = [] if options.videos else prompts_of(options.prompts, real, options.real, options.count)
        models, folders = _subjects(options, prompts, device)
        window = _window(options, real, folders, models)
        _print_unread([each for each in (real, *(folder.videos for folder in folders)) if each is not None])
        extractors = _extractors(options.extractors, device, window)
        store = FeatureStore(options.features or options.out / "features", window)
        names = tuple(name for name in options.metrics if name != LOSS)
        wants_values = bool(names) or not options.metrics
        evaluation = Evaluation(
            store=store,
            real=real,
            extractors=extractors if wants_values else (),
            scorers=() if options.scorer_dir is None else [ProgramScorer.open(options.scorer_dir)],
            metrics=names,
            sent_as="mp4" if _has_service(options) else "",
        )
        for model in models:
            _check_window(model, window, options)
        _check_counts(
            [*((each.model, each.videos.count) for each in folders), *((each.label, len(prompts)) for each in models)]
        )
        evaluation.check(min([each.videos.count for each in folders] + [len(prompts)] * bool(models)))
        ranks = start(tensor=1, context=1, split_guidance=False)
    with FolderLock(options.out, "evaluates") if is_first() else nullcontext():
        _evaluate(options, evaluation, models, folders, real, store, device, ranks)
    finish()


def _evaluate(
    options: EvaluateOptions,
    evaluation: Evaluation,
    models: Sequence[Model],
    folders: Sequence[Candidate],
    real: VideoSet | None,
    store: FeatureStore,
    device: torch.device,
    ranks: Ranks,
) -> None:
    seconds: dict[str, float] = {}
    candidates = list(folders)
    with _timed(seconds, "videos"):
        for model in models:
            candidates += _generated(options.out, model, ranks)
    losses = _losses(options, models, real, store, device)
    with _timed(seconds, "features"):
        evaluation.compute_features(candidates, ranks, shows_progress=is_first())
        for each, of_real in losses:
            each.compute_features([of_real], ranks, shows_progress=is_first())
        _wait()
    if is_first():
        with _timed(seconds, "metrics"):
            metric_values = evaluation.metric_values(candidates)
            for each, of_real in losses:
                metric_values += each.metric_values([of_real], shows_progress=False)
            found = differences(metric_values)
        if options.export_for:
            EXPORTS[options.export_for](options.out / "exported", candidates)
        write_report(options.out, evaluation, candidates, metric_values, found, seconds)


# ---------------------------------------------------------------------------------------------------------- options


def _check(options: EvaluateOptions) -> None:
    refuse(bool(options.model) == bool(options.videos), "give a model, or --videos FOLDER: one of them")
    for name in options.metrics:
        choose_one(name, (*METRICS, ADHERENCE, LOSS), f"--metrics {name} is unknown")
    refuse(
        options.key_file and not _has_service(options),
        "--key_file is for a service: give its http://HOST:PORT as the model",
    )
    refuse(options.guidances and options.videos, "--guidances are for a model: leave them out with --videos")
    refuse(options.guidances and options.settings.guidance, "give --guidance or --guidances, not both")
    has_weights = options.model and not _is_service(options.model)
    refuse(LOSS in options.metrics and not (options.real and has_weights), f"{LOSS} needs a bundle and --real")
    refuse(
        options.real is None and not options.prompts and not options.videos,
        "give --real (videos to compare with, whose captions are then the prompts), or --prompts FILE, or both",
    )


def _extractors(paths: Sequence[Path], device: torch.device, window: Window) -> list[Extractor]:
    """Open the extractors of these paths that support the window's frames, and optical flow, which needs no weights.

    If no extractor of a file supports them, all are returned, and refused later with a message.
    """
    found = []
    for path in paths:
        several = open_extractors(path, device)
        found += [each for each in several if each.fewest_frames <= window.frames] or several
    return [*found, MotionClips()] if window.frames >= MotionClips.fewest_frames else found


def _subjects(
    options: EvaluateOptions, prompts: Sequence[str], device: torch.device
) -> tuple[list[Model], list[Candidate]]:
    """Return the models, and the folders of videos, to evaluate."""
    models, folders = [], []
    paths = [str(path) for path in (options.model or options.videos, options.against) if path]
    labels = [Path(path).resolve().name for path in paths]
    if len(set(labels)) < len(labels):
        labels = ["/".join(Path(path).resolve().parts[-2:]) for path in paths]
    is_sent = _has_service(options)  # then videos of a bundle are compressed in the same way
    for number, (path, label) in enumerate(zip(paths, labels, strict=True)):
        if _is_service(path):
            maker = _service(path, options.key_file)
        elif (number == 0 and options.videos) or not _is_model(Path(path)):
            videos = open_videos(Path(path), options.count)
            folders.append(Candidate(model=label, guidance=None, videos=replace(videos, label=label)))
            continue
        else:
            bundle = open_bundle(path)
            dtype = print_dtype(options.dtype, bundle, device)
            maker = BundleMaker(bundle, device=str(device), dtype=dtype, is_sent=is_sent)
        models.append(Model(label=label, maker=maker, requests=_requests(options, maker, prompts)))
    return models, folders


def _has_service(options: EvaluateOptions) -> bool:
    return _is_service(options.model) or _is_service(options.against)


def _is_service(path: str) -> bool:
    return "://" in path


def _service(url: str, key_file: Path | None) -> Maker:
    try:
        from megadit.infer.evaluate.service import open_service
    except ImportError as error:
        raise UserError(f"{url} needs httpx: pip install 'megadit[evaluate]'") from error
    return open_service(url, key_file)


def _is_model(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "transformer").is_dir() or not path.is_dir()


def _requests(options: EvaluateOptions, maker: Maker, prompts: Sequence[str]) -> list[Request]:
    refuse(not prompts, "a model needs prompts: give --prompts FILE")
    asked = asdict(options.settings)
    scales = options.guidances or [asked["guidance"]]
    settings = [resolve_settings(maker.defaults, **asked | {"guidance": scale}) for scale in scales]
    return [Request(maker=maker, prompts=prompts, settings=each, seed=options.seed) for each in settings]


def _first_clip(real: VideoSet | None, folders: Sequence[Candidate], models: Sequence[Model]) -> Clip:
    """Return the first video, which determines the number and size of frames."""
    for videos in [each for each in (real, *(folder.videos for folder in folders)) if each is not None]:
        return videos.parts[0].read()[0]
    made = models[0].requests[0].settings
    blank = np.zeros((made.num_frames, made.height, made.width, 3), np.uint8)
    return Clip(blank, float(made.fps), "")


def _window(
    options: EvaluateOptions, real: VideoSet | None, folders: Sequence[Candidate], models: Sequence[Model]
) -> Window:
    """Return the window of every video: by default no more frames than a model generates."""
    most = [request.settings.num_frames for model in models for request in model.requests]
    clip, rate = _first_clip(real, folders, models), _rate(folders, models)
    return window_of(clip, options.frames, options.size, rate, min([MOST_FRAMES, *most]))


def _rate(folders: Sequence[Candidate], models: Sequence[Model]) -> float:
    """Frame rate of the evaluation, to which faster real videos are subsampled; 0 if unknown."""
    rates = [float(request.settings.fps) for model in models for request in model.requests]
    rates += [folder.videos.parts[0].read()[0].fps for folder in folders]
    return min(rates, default=0.0)


def _print_unread(sets: Sequence[VideoSet]) -> None:
    for videos in sets if is_first() else ():
        if videos.unread:
            names = ", ".join(videos.unread[:3]) + (", ..." if len(videos.unread) > 3 else "")
            print(f"left out of {videos.label}: {len(videos.unread)} that cannot be read ({names})", file=sys.stderr)


def _check_window(model: Model, window: Window, options: EvaluateOptions) -> None:
    """Raises UserError, before anything is generated, for videos that could not be compared."""
    for request in model.requests:
        made = request.settings
        model.maker.check(made)
        refuse(
            made.num_frames < window.frames,
            f"{model.label} makes {made.num_frames} frames, the window has {window.frames}: give --frames "
            f"{made.num_frames}, or --num_frames {window.frames}",
        )
        is_other = (made.height, made.width) != (window.height, window.width)
        refuse(
            is_other and options.size is None,
            f"{model.label} makes {made.height}x{made.width}, the real videos are {window.height}x{window.width}: "
            f"give --size {window.height} {window.width} to crop and resize all",
        )
        refuse(
            window.fps and abs(made.fps / window.fps - 1) > 0.01,
            f"{model.label} makes {made.fps:g} frames per second, the real videos have {window.fps:g}: motion cannot "
            f"be compared; give --fps {window.fps:g}",
        )


def _check_counts(counts: Sequence[tuple[str, int]]) -> None:
    """Raises UserError for different numbers of videos, whose metrics cannot be compared."""
    counted, least = ", ".join(f"{label} has {count}" for label, count in counts), min(count for _, count in counts)
    refuse(
        any(count > least for _, count in counts),
        f"metrics of different numbers of videos cannot be compared ({counted}): give --count {least}",
    )


# ------------------------------------------------------------------------------------------------------------ stages


def _generated(out: Path, model: Model, ranks: Ranks) -> list[Candidate]:
    candidates = []
    for request in model.requests:
        make_videos(out / "videos", request, ranks, shows_progress=is_first())
        videos = made_videos(out / "videos", request, model.label)
        candidates.append(Candidate(model=model.label, guidance=request.settings.guidance, videos=videos))
    _wait()
    return candidates


def _losses(
    options: EvaluateOptions, models: Sequence[Model], real: VideoSet | None, store: FeatureStore, device: torch.device
) -> list[tuple[Evaluation, Candidate]]:
    """Return an evaluation of each model by its loss on the real videos, with its own store."""
    return [
        (
            Evaluation(
                store=FeatureStore(store.folder / checkpoint_fingerprint(model.maker.bundle), store.window),
                real=None,
                extractors=(),
                scorers=[LossScorer(model.maker.bundle, device, options.dtype)],
            ),
            Candidate(model=model.label, guidance=None, videos=real),
        )
        for model in models
        if LOSS in options.metrics and isinstance(model.maker, BundleMaker)
    ]


def _wait() -> None:
    if world_size() > 1:
        dist.barrier()


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start_time = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - start_time


if __name__ == "__main__":
    raise SystemExit(main())
