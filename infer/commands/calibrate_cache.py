"""`megadit calibrate-cache`: measures which denoiser calls can be cached, and stores the plan in the bundle.

`megadit check-cache` measures how well a stored plan keeps its budget on other prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megadit.infer.conditioning.items import Media, Target, check_conditioning, places_of
from megadit.infer.evaluate.metrics.lpips import LPIPS
from megadit.infer.generate.options import GenerateOptions, parse, refuse
from megadit.infer.generate.specs import VideoSpec, load_media, video_grid
from megadit.infer.media.signing import SigningOptions
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.step_cache import CachePlan, bundle_plans, find_plan, plan_key
from megadit.infer.runtimes.options import AUTO, Measure, RuntimeOptions, print_dtype
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import Bundle, open_bundle, update_manifest
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.progress import Progress

NUM_DISTRIBUTED = 8
"""Number of videos that rank the calls by the error of skipping each."""
NUM_ROUNDS = 3
MARGIN = 0.85
"""Fraction of the budget that calibration may use, which leaves a margin for other videos."""
FEWEST_VIDEOS = 16
_OF_GENERATING = "dry_run", "device_memory", "even_if_too_large", "tokenizer_model", "t5_cache_dir", "cfg_parallel"
_OF_MEASURING = "device", "dtype", "compile", "cache_measure"
"""Options that would use other components, or other processes; those of `RuntimeOptions` that would not."""

Sample = Callable[[int, Sequence[int]], Tensor]
"""(number of videos, calls to skip) -> the latents, or the frames, of the first of them."""
Errors = Callable[[Tensor, Tensor], Tensor]
"""(sampled, exact) -> the error of each video."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Videos of the same settings, which can be sampled with any calls skipped."""

    options: GenerateOptions
    bundle: Bundle
    settings: SamplingSettings
    places: tuple[Any, ...]
    """Places of the conditioning media, equal for all videos (`items.places_of`)."""
    num_videos: int
    num_calls: int
    """Denoiser calls of a video without the cache."""
    sample: Sample
    errors: Errors


def calibrate(trial: Trial, bar: Progress) -> CachePlan:
    """A plan that keeps every video within the budget, found by a greedy search.

    In each of `NUM_ROUNDS`, the remaining calls are ranked by the error of skipping each in addition to those chosen
    before, and as many of the cheapest are added as the budget allows (by bisection).
    """
    exact = trial.sample(trial.num_videos, ())
    num_distributed, budget = min(NUM_DISTRIBUTED, trial.num_videos), trial.settings.cache_budget

    def error(count: int, skipped: Sequence[int]) -> float:
        bar.advance()
        return trial.errors(trial.sample(count, tuple(sorted(skipped))), exact).max().item()

    skipped, largest_error = [], 0.0
    for _ in range(NUM_ROUNDS):
        left = [call for call in range(1, trial.num_calls) if call not in skipped]
        cost = {call: error(num_distributed, [*skipped, call]) for call in left}
        by_cost = sorted(left, key=cost.__getitem__)
        fits, too_many = 0, len(by_cost) + 1
        while too_many - fits > 1:
            tried = (fits + too_many) // 2
            tried_error = error(trial.num_videos, [*skipped, *by_cost[:tried]])
            if tried_error <= MARGIN * budget:
                fits, largest_error = tried, tried_error
            else:
                too_many = tried
        skipped += by_cost[:fits]
    return CachePlan(
        budget=budget,
        skipped=tuple(sorted(skipped)),
        num_calls=trial.num_calls,
        largest_error=largest_error,
        num_videos=trial.num_videos,
        settings=plan_key(trial.settings, trial.places),
        measure=trial.options.running.cache_measure,
    )


def relative_errors(latents_BCTHW: Tensor, exact_BCTHW: Tensor) -> Tensor:
    """||latents - exact|| / ||exact|| of each video, [B]; `exact` may have more videos."""
    exact_BCTHW = exact_BCTHW[: len(latents_BCTHW)]
    return (latents_BCTHW - exact_BCTHW).flatten(1).norm(dim=1) / exact_BCTHW.flatten(1).norm(dim=1)


def perceptual_errors(network: LPIPS) -> Errors:
    """LPIPS of videos BTHWC (uint8), the mean over their frames."""

    def errors(videos: Tensor, exact: Tensor) -> Tensor:
        return torch.stack([network(*map(_pictures, pair)).mean() for pair in zip(videos, exact, strict=False)])

    return errors


def _pictures(video_THWC: Tensor) -> Tensor:
    return video_THWC.permute(0, 3, 1, 2).float() / 127.5 - 1


def open_trial(argv: list[str], verb: str, *, fewest_videos: int = 1) -> Trial:
    """Read the command line of a calibration, whose options are those of `megadit generate`.

    Raises:
        UserError: for different settings, options that do not apply, and too few videos.
    """
    options = parse(argv, verb)
    running = options.running
    refuse(
        not options.settings.cache_budget,
        "give --cache_budget: the largest relative error of latents, such as 0.02",
    )
    refuse(
        (running.cache_measure == "lpips") != bool(options.lpips_weights),
        "--cache_measure lpips and --lpips_weights FOLDER go together: give both, or neither",
    )
    changed = [name for name in _OF_GENERATING if getattr(options, name) != getattr(GenerateOptions(), name)]
    for name, about in settings_of(RuntimeOptions).items():
        if name not in _OF_MEASURING and getattr(running, name) != about.default:
            changed.append((about.names or (name,))[0].removeprefix("--"))
    for name in changed:
        refuse(True, f"--{name} is for `megadit generate`: the bundle's own components are measured; leave it out")
    refuse(
        options.signing != SigningOptions(),
        "--c2pa_certificate signs files, and this command writes none: leave it out",
    )
    for name in ("repeat", "total_frames", "story", "keep_first"):
        refuse(getattr(options, name), f"--{name} is for `megadit generate`: leave it out")
    bundle = open_bundle(options.checkpoint_path)
    specs = video_grid(options, bundle.defaults).specs
    refuse(any(spec.adapters for spec in specs), "a plan is made without adapters: leave out --adapter")
    settings = specs[0].settings
    refuse(any(spec.settings != settings for spec in specs), "a plan is made for one set of settings, the same for all")
    refuse(
        len(specs) < fewest_videos,
        f"{len(specs)} videos are too few to calibrate with: give {fewest_videos} or more prompts, or several --seeds",
    )
    conditioning, places = _conditioning_of(specs, bundle, settings)
    network = LPIPS.load(options.lpips_weights) if running.cache_measure == "lpips" else None
    device = use_device(running.device)
    pipeline = TextToVideo.from_pretrained(
        bundle,
        device=str(device),
        dtype=print_dtype(running.dtype or AUTO, bundle, device),
        compile=running.compile,
    )

    def sample(count: int, skipped: Sequence[int]) -> Tensor:
        prompts, seeds = [spec.prompt for spec in specs[:count]], [spec.seed for spec in specs[:count]]
        how = {"batch_size": options.batch_size, "skipped": tuple(skipped)}
        results = pipeline.stream(prompts, settings, seeds=seeds, conditioning=conditioning[:count], **how)
        if network is not None:
            return torch.stack([torch.from_numpy(result.video) for result in results])
        return torch.stack([result.latents_CTHW for result in results])

    return Trial(
        options=options,
        bundle=bundle,
        settings=settings,
        places=places,
        num_videos=len(specs),
        num_calls=pipeline.num_denoiser_calls(1, settings, conditioning=conditioning[:1]),
        sample=sample,
        errors=relative_errors if network is None else perceptual_errors(network),
    )


def _conditioning_of(
    specs: Sequence[VideoSpec], bundle: Bundle, settings: SamplingSettings
) -> tuple[list[Media], tuple[Any, ...]]:
    """Return the conditioning media of each video, and their places, which must be equal for all.

    Raises:
        UserError: for media that do not fit the video, and for places that differ.
    """
    target = Target.of(settings, bundle.config, bundle.load_tokenizer())
    media = load_media(specs)
    conditioning = [tuple(media[file] for file in spec.conditioning) for spec in specs]
    for each in dict.fromkeys(conditioning):
        check_conditioning(each, bundle.conditionings, target)
    places, *others = dict.fromkeys(places_of(each, target) for each in conditioning)
    refuse(others, "a plan needs conditioning in the same places for all videos: give each the same kind of files")
    return conditioning, places


@entry_point
def main(argv: list[str]) -> None:
    """Runs `megadit calibrate-cache`; returns its exit code."""
    trial = open_trial(argv, "calibrate-cache", fewest_videos=FEWEST_VIDEOS)
    with Progress(NUM_ROUNDS * (trial.num_calls + trial.num_calls.bit_length()), "calibrating") as bar:  # at most
        plan = calibrate(trial, bar)
    stored = map(CachePlan.from_dict, trial.bundle.manifest.get("cache", []))
    others = [one.to_dict() for one in stored if _name(one) != _name(plan)]
    update_manifest(trial.bundle.path, cache=[*others, plan.to_dict()])
    print(f"{_saved(plan)}, largest error {plan.largest_error:.4f}")


@entry_point
def check(argv: list[str]) -> None:
    """Runs `megadit check-cache`; returns its exit code."""
    trial = open_trial(argv, "check-cache")
    plan = find_plan(bundle_plans(trial.bundle, trial.options.running.cache_measure), trial.settings, trial.places)
    exact, cached = (trial.sample(trial.num_videos, skipped) for skipped in ((), plan.skipped))
    errors = trial.errors(cached, exact)
    within = int((errors <= trial.settings.cache_budget).sum())
    median, most = errors.double().quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    print(
        f"{_saved(plan)}; {within} of {trial.num_videos} videos are within {trial.settings.cache_budget}: "
        f"median {median:.4f}, 95th percentile {most:.4f}, largest {errors.max():.4f}"
    )


def _saved(plan: CachePlan) -> str:
    share = len(plan.skipped) / plan.num_calls
    return f"{len(plan.skipped)} of {plan.num_calls} calls are cached ({share:.0%})"


def _name(plan: CachePlan) -> tuple[dict, float, Measure]:
    return plan.settings, plan.budget, plan.measure
