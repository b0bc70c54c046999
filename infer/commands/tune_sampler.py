"""`megadit tune-sampler`: the fewest function evaluations (NFE) that match a model's best quality.

    megadit tune-sampler BUNDLE --real data/clips --extractors classifier.safetensors --out runs/tuned

Solvers, schedules and guidance scales (with --noise_scale also initial noise scales) are tried on some of the prompts;
the best of each NFE are compared on all prompts, with the same seeds. The cheapest that is as good as the best becomes
the bundle's default, which generate, export, Triton and the demo page use.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megadit.infer.evaluate.evaluation import Candidate, Evaluation, MetricValue
from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.generated import BundleMaker, Request, made_videos, make_videos
from megadit.infer.evaluate.metrics.scorer import ProgramScorer
from megadit.infer.evaluate.metrics.table import ADHERENCE, METRICS
from megadit.infer.evaluate.videos import open_videos, prompts_of
from megadit.infer.evaluate.window import window_of
from megadit.infer.generate.options import refuse
from megadit.infer.runtimes.options import AUTO, print_dtype
from megadit.infer.runtimes.ranks import ALONE
from megadit.infer.runtimes.torch import use_device
from megadit.infer.sampling.resolve import num_function_evaluations, resolve_settings
from megadit.infer.sampling.schedules import highest_sigma, karras_sigmas, log_linear_sigmas, settings_sigmas
from megadit.models.bundle import Bundle, open_bundle, update_manifest
from megadit.models.diffusion.settings import SAMPLERS as TRAITS
from megadit.models.diffusion.settings import SamplingSettings, check_guidance
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import write_json

SOLVERS: tuple[dict[str, Any], ...] = (
    {"sampler": "consistency"},
    {"sampler": "dpmpp_2m"},
    {"sampler": "euler", "eta": 1.0},
)
"""Solvers with one denoiser call a step; with few steps, a second call per step costs too much."""
LOWEST_SIGMAS = (0.02, 0.3, 0.7, 1.5)
"""Last noise levels before 0 to try, for data with unit standard deviation."""
SECOND_SIGMA = 6.0
"""Second noise level of schedules other than Karras; levels between it and the highest change little."""
SCALES = (0.5, 0.75, 1.0, 1.5)
"""Guidance scales to try, relative to the model's own."""
TRIAL_SHARE = 4
"""All candidates are tried on one of this many prompts."""
FEWEST_PROMPTS = 32
"""Fewest prompts of a trial."""
METRICS_OF_TUNING = ("kid", "kvd")
"""Metrics that must not get worse, by default."""
FINALISTS = 3
"""Candidates for each number of function evaluations that are compared on all prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    model: str = setting(help="a bundle", positional=True, metavar="BUNDLE")
    real: Path = setting(help="real videos to compare with: a folder, or a data set of `megadit prepare`")
    prompts: str = setting(
        "", "a text file, one prompt a line, or .jsonl (default: the captions of --real)", metavar="PATH"
    )
    out: Path = setting(help="folder for tuned.json, videos and features; a second run continues from them")
    extractors: Sequence[Path] = setting((), "feature extractors, as for `megadit evaluate`")
    metrics: Sequence[str] = setting(
        (), f"metrics that must not get worse (default: {' '.join(METRICS_OF_TUNING)})", metavar="NAME"
    )
    scorer_dir: Path | None = setting(
        None, "folder of your own scorer (scorer.py), whose scores must not get worse", metavar="DIR"
    )
    function_evaluations: Sequence[int] = setting(
        (4, 6, 8),
        "numbers of function evaluations (NFE) to try; guidance takes two a step (default: {default})",
    )
    guidance: Sequence[float] = setting(
        (), "guidance scales to try (default: none, and 0.5 to 1.5 times the model's own)", low=1, metavar="NUMBER"
    )
    noise_scale: Sequence[float] = setting(
        (),
        "initial noise scales to try, with solvers that add no noise (default: the model's own)",
        above=0,
        metavar="NUMBER",
    )
    budget: float = setting(
        0.02,
        "accepted loss relative to the best value of a metric; losses within the interval are always accepted "
        "(default: {default})",
        low=0,
    )
    count: int | None = setting(None, "videos of each candidate (default: one for each prompt)", above=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")
    dtype: str = setting(AUTO, "dtype of the network (default: {default})", metavar="NAME")
    dry_run: bool = setting(False, "print the best settings and leave the bundle as it is")


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("real", "out", "function_evaluations", "budget", "count", "dry_run"),
    "what is compared": ("prompts", "extractors", "metrics", "scorer_dir"),
    "what is tried": ("guidance", "noise_scale"),
    "machine": ("device", "dtype"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Sampling settings with their cost and the metrics of their videos."""

    settings: SamplingSettings
    function_evaluations: int
    metric_values: tuple[MetricValue, ...] = ()

    @property
    def text(self) -> str:
        made = self.settings
        how = f"{made.sampler}{' with eta 1' if made.eta else ''}"
        levels = ", ".join(f"{level:.3g}" for level in settings_sigmas(made).tolist()[:-1][:10])
        noise = "" if made.noise_scale == 1 else f", initial noise scale {made.noise_scale:g}"
        return f"NFE {self.function_evaluations}: {how}, guidance {made.guidance:g}, sigma {levels}{noise}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuner:
    """Generates and evaluates videos of a bundle, each variant once."""

    folder: Path
    maker: BundleMaker
    evaluation: Evaluation
    prompts: Sequence[str]

    def measured(
        self, variants: Sequence[Variant], prompts: Sequence[str], *, shows_progress: bool = True
    ) -> list[Variant]:
        """Return the variants with the metrics of their videos of `prompts`."""
        candidates = []
        for number, variant in enumerate(variants, 1):
            if shows_progress:
                print(f"{number}/{len(variants)} {variant.text}", flush=True)
            request = Request(maker=self.maker, prompts=prompts, settings=variant.settings)
            make_videos(self.folder / "videos", request, ALONE, shows_progress=shows_progress)
            videos = made_videos(self.folder / "videos", request, variant.text)
            candidates.append(Candidate(model=variant.text, guidance=None, videos=videos))
        of = replace(self.evaluation, metrics=self.evaluation.possible(len(prompts)))
        of.compute_features(candidates, ALONE, shows_progress=shows_progress)
        metric_values = of.metric_values(candidates, shows_progress=shows_progress)
        return [
            replace(
                variant,
                metric_values=tuple(
                    metric_value for metric_value in metric_values if metric_value.candidate is candidate
                ),
            )
            for variant, candidate in zip(variants, candidates, strict=True)
        ]

    def tune(
        self,
        function_evaluations: Sequence[int],
        budget: float,
        scales: Sequence[float] = (),
        noise_scales: Sequence[float] = (),
    ) -> tuple[list[Variant], Variant]:
        """Return all variants that were compared on all prompts, the model's own first, and the cheapest that is good
        enough. The candidates are those of `candidates_of`."""
        part = self.prompts[:: max(1, min(TRIAL_SHARE, len(self.prompts) // FEWEST_PROMPTS))]
        if self.evaluation.extractors and not self.evaluation.possible(len(part)):
            part = self.prompts  # a Fréchet distance needs more videos than its features have dimensions
        defaults = self.maker.defaults
        own = Variant(
            settings=defaults, function_evaluations=num_function_evaluations(defaults, self.maker.bundle.config)
        )
        tried = self.measured(
            [own, *candidates_of(self.maker.bundle, function_evaluations, scales, noise_scales)], part
        )
        finalists = [own]
        for cost in sorted(set(function_evaluations)):
            able = [variant for variant in tried[1:] if variant.function_evaluations == cost]
            finalists += sorted(able, key=lambda variant: shortfall(variant, tried))[:FINALISTS]
        final = self.measured([replace(variant, metric_values=()) for variant in finalists], self.prompts)
        best = {name: best_of(final, name) for name in names_of(final)}
        good = [variant for variant in final if all(is_good_enough(variant, best[name], name, budget) for name in best)]
        chosen = min(good or final[:1], key=lambda variant: (variant.function_evaluations, shortfall(variant, final)))
        return final, chosen


def candidates_of(
    bundle: Bundle,
    function_evaluations: Sequence[int],
    scales: Sequence[float] = (),
    noise_scales: Sequence[float] = (),
) -> Iterator[Variant]:
    """Solvers, schedules and scales with one of these numbers of function evaluations; by default, guidance `scales`
    around the model's own are tried, and its own initial noise scale."""
    own, unit = bundle.defaults, bundle.config.sigma_data
    highest = highest_sigma(own)
    for cost in sorted(set(function_evaluations)):
        for guidance in scales or _scales(own.guidance, bundle.config.guidance_embedding_range):
            num_steps = cost if guidance == 1 or bundle.config.guidance_embedding_range else cost // 2
            if not num_steps:
                continue
            for sigmas, solver in product(_levels(num_steps, highest, unit), _solvers(num_steps, noise_scales)):
                levels = {"sigmas": sigmas, "num_steps": num_steps, "shift": 1.0}
                settings = resolve_settings(own, **{"churn": 0.0, "eta": 0.0, "guidance": guidance} | levels | solver)
                if num_function_evaluations(settings, bundle.config) == cost:
                    yield Variant(settings=settings, function_evaluations=cost)


def _scales(own: float, guidance_embedding_range: tuple[float, float] | None) -> list[float]:
    """Guidance scales to try: none, and some around the model's own, within a guidance-distilled network's range."""
    low, high = guidance_embedding_range or (1.0, math.inf)
    return sorted({low, *(min(max(low, own * scale), high) for scale in SCALES)})


def _solvers(num_steps: int, noise_scales: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield solvers, with each of these initial noise scales if the solver keeps the initial noise."""
    for solver in SOLVERS if num_steps > 1 else SOLVERS[:1]:  # with one step, all solvers are the same
        is_renewed = num_steps > 2 and (solver.get("eta") or TRAITS[solver["sampler"]].renews_noise)
        tried = [] if is_renewed else sorted(set(noise_scales))
        yield from ({**solver, "noise_scale": each} for each in tried) if tried else (solver,)


def _levels(num_steps: int, highest: float, unit: float) -> list[tuple[float, ...]]:
    """Schedules of `num_steps` noise levels, from the highest on."""
    if num_steps == 1:
        return [(highest,)]
    found = []
    for lowest in (unit * sigma for sigma in LOWEST_SIGMAS):
        found.append(tuple(karras_sigmas(num_steps, lowest, highest).tolist()[:-1]))
        if num_steps > 2:
            found.append((highest, *log_linear_sigmas(num_steps - 1, lowest, unit * SECOND_SIGMA).tolist()[:-1]))
    return found


def names_of(variants: Sequence[Variant]) -> list[tuple[str, str]]:
    """(metric, extractor) of the metrics that all variants have."""
    return [(metric_value.metric, metric_value.of) for metric_value in variants[0].metric_values]


def value_of(variant: Variant, name: tuple[str, str]) -> MetricValue:
    return next(
        metric_value for metric_value in variant.metric_values if (metric_value.metric, metric_value.of) == name
    )


def best_of(variants: Sequence[Variant], name: tuple[str, str]) -> MetricValue:
    """Best value of this metric among all variants."""
    metric_values = [value_of(variant, name) for variant in variants]
    return min(metric_values, key=lambda metric_value: _lost(metric_value, metric_value.estimate.value, 0.0))


def _lost(metric_value: MetricValue, value: float, best: float) -> float:
    """Loss of a value of this metric against the best one."""
    return best - value if metric_value.better == "higher" else value - best


def is_good_enough(variant: Variant, best: MetricValue, name: tuple[str, str], budget: float) -> bool:
    """Whether it loses at most the fraction `budget` of the best value, or less than its interval resolves."""
    metric_value = value_of(variant, name)
    lost = _lost(metric_value, metric_value.estimate.value, best.estimate.value)
    return lost <= budget * abs(best.estimate.value) or lost <= (metric_value.estimate - best.estimate).error


def shortfall(variant: Variant, among: Sequence[Variant]) -> float:
    """Loss of its worst metric against the best variant, in standard errors."""
    behind = []
    for name in names_of(among):
        metric_value, best = value_of(variant, name), best_of(among, name)
        error = max(metric_value.estimate.error, 1e-9)
        behind.append(_lost(metric_value, metric_value.estimate.value, best.estimate.value) / error)
    return max(behind) if all(map(math.isfinite, behind)) else math.inf


def report(final: Sequence[Variant], chosen: Variant) -> dict[str, Any]:
    """Return the comparison as plain values."""
    return {
        "chosen": asdict(chosen.settings),
        "candidates": [
            {
                "text": variant.text,
                "function_evaluations": variant.function_evaluations,
                "is_chosen": variant is chosen,
                "metrics": {
                    f"{metric_value.metric} by {metric_value.of}": {
                        "value": metric_value.estimate.value,
                        "interval": list(metric_value.estimate.interval),
                        "protocol": metric_value.protocol,
                    }
                    for metric_value in variant.metric_values
                },
                "settings": asdict(variant.settings),
            }
            for variant in final
        ],
    }


def table(final: Sequence[Variant], chosen: Variant) -> str:
    """Table of the metrics of all compared variants, the chosen one marked."""
    lines = []
    for variant in final:
        values = "  ".join(
            f"{metric_value.metric} {metric_value.estimate.value:.4g}" for metric_value in variant.metric_values
        )
        lines.append(f"{'->' if variant is chosen else '  '} {values}  {variant.text}")
    return "\n".join(lines)


def write_defaults(bundle: Bundle, settings: SamplingSettings) -> None:
    """Writes these settings into the bundle as defaults, atomically."""
    update_manifest(bundle.path, defaults=settings.to_dict())


# --- the command --------------------------------------------------------------------------------------------------


@command(
    TuneOptions,
    groups=GROUPS,
    examples=("megadit tune-sampler runs/demo/bundle --real runs/demo/dataset --out tuned --function_evaluations 6 8",),
    prog="megadit tune-sampler",
    description="Finds the fewest function evaluations (NFE) that match a model's best quality, and makes them its "
    "defaults.",
)
def main(options: TuneOptions) -> None:
    """Runs `megadit tune-sampler`; returns its exit code."""
    tuner = _tuner(options)
    final, chosen = tuner.tune(options.function_evaluations, options.budget, options.guidance, options.noise_scale)
    write_json(options.out / "tuned.json", report(final, chosen))
    print(table(final, chosen))
    before, own = final[0].function_evaluations, final[0].settings.guidance
    if chosen is final[0]:
        print(f"nothing with an NFE below {before} is as good: {options.model} is unchanged")
    elif options.dry_run:
        print(f"best: {chosen.text}, instead of NFE {before}; {options.model} is unchanged (--dry_run)")
    else:
        write_defaults(tuner.maker.bundle, chosen.settings)
        print(f"{options.model} now has NFE {chosen.function_evaluations} instead of {before}; export it again")
    if chosen.settings.guidance < own and ADHERENCE not in options.metrics and options.scorer_dir is None:
        print(
            f"note: guidance {chosen.settings.guidance:g} instead of {own:g}; distances from real videos do not "
            f"measure prompt adherence: --guidance {own:g} keeps the scale, --metrics {ADHERENCE} measures adherence "
            "by CLIP, --scorer_dir by your own program"
        )
    if chosen.settings.noise_scale < final[0].settings.noise_scale:
        print(
            f"note: initial noise scale {chosen.settings.noise_scale:g}: lower diversity of videos of one prompt, "
            "which distances and scores of single videos do not measure; look at some (megadit generate --seeds 1 2 3)"
        )


def _tuner(options: TuneOptions) -> Tuner:
    """Build the tuner of the command; checks everything before anything is generated."""
    bundle = open_bundle(options.model)
    for name in options.metrics:
        choose_one(name, (*METRICS, ADHERENCE), f"--metrics {name} is unknown")
    refuse(
        not options.extractors and (options.metrics or options.scorer_dir is None),
        "no metric compares the videos: give --extractors, or --scorer_dir and no --metrics, or both",
    )
    refuse(
        any(cost < 1 for cost in options.function_evaluations),
        f"--function_evaluations {' '.join(map(str, options.function_evaluations))}: each must be 1 or more",
    )
    for scale in options.guidance:
        check_guidance(replace(bundle.defaults, guidance=scale), bundle.config.guidance_embedding_range)
    device = use_device(options.device)
    extractors = [each for path in options.extractors for each in open_extractors(path, device)]
    real = open_videos(options.real, options.count)
    prompts = prompts_of(options.prompts, real, options.real, options.count)
    store = FeatureStore(options.out / "features", window_of(real.parts[0].read()[0], None, None))
    evaluation = Evaluation(
        store=store,
        real=real,
        extractors=extractors,
        scorers=() if options.scorer_dir is None else [ProgramScorer.open(options.scorer_dir)],
        metrics=tuple(options.metrics) or (METRICS_OF_TUNING if extractors else ()),
    )
    evaluation.check(len(prompts))
    made = bundle.defaults
    if (made.height, made.width) != (store.window.height, store.window.width) or made.num_frames < store.window.frames:
        raise UserError(
            f"{options.model} makes {made.num_frames} frames of {made.height}x{made.width}, the real videos are "
            f"{store.window.frames} of {store.window.height}x{store.window.width}: prepare them alike"
        )
    return Tuner(
        folder=options.out,
        maker=BundleMaker(bundle, device=str(device), dtype=print_dtype(options.dtype, bundle, device)),
        evaluation=evaluation,
        prompts=prompts,
    )
