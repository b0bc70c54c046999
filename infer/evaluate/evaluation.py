"""All metrics of an evaluation, computed from features on disk.

Shapes: N videos, F features of each, D width, R resamplings.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megadit.infer.evaluate.extractors.base import Extractor
from megadit.infer.evaluate.features import FeatureStore, Scorer
from megadit.infer.evaluate.metrics import table as metrics
from megadit.infer.evaluate.metrics.distances import Features, check_enough, frechet_estimate
from megadit.infer.evaluate.metrics.intervals import Estimate, mean_estimate, resamplings
from megadit.infer.evaluate.metrics.table import ADHERENCE, METRICS, Better, Metric
from megadit.infer.evaluate.videos import VideoSet
from megadit.infer.runtimes.ranks import Ranks
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress

VERSION = 1
"""Version of the metrics; raised when the same videos would get other values."""
FEWEST = 8
"""Least videos of a set, and of half of the real ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Videos that are evaluated together: of one model at one guidance scale, or of a folder."""

    model: str
    guidance: float | None
    videos: VideoSet

    @property
    def label(self) -> str:
        return self.model if self.guidance is None else f"{self.model}, guidance {self.guidance:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValue:
    candidate: Candidate
    metric: str
    title: str
    of: str
    """Name of the extractor."""
    better: Better
    estimate: Estimate
    protocol: str
    baseline: Estimate | None = None
    """Real-against-real baseline: one half of the real videos against the other."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Metric of the first candidate minus that of the second, for the same prompts and seeds."""

    first: MetricValue
    second: MetricValue
    estimate: Estimate

    @property
    def winner(self) -> str:
        """Label of the better candidate, or "" if the interval includes 0."""
        low, high = self.estimate.interval
        if low <= 0 <= high:
            return ""
        is_first_higher = low > 0
        return (self.first if is_first_higher == (self.first.better == "higher") else self.second).candidate.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    store: FeatureStore
    real: VideoSet | None
    extractors: Sequence[Extractor]
    scorers: Sequence[Scorer] = ()
    metrics: Sequence[str] = ()
    """Names in `METRICS`, or `ADHERENCE`; () means all that the extractors support."""
    sent_as: str = ""
    """Format that generated videos were encoded in before their evaluation; "" means none."""
    _baselines: dict[tuple[str, str], Estimate | None] = field(default_factory=dict, init=False)

    def check(self, num_made: int) -> None:
        """Raises UserError for requested metrics that cannot be computed from `num_made` videos."""
        chosen_metrics = self._requested()
        for side, count in (("generated", num_made), ("real", FEWEST if self.real is None else self.real.count)):
            if count < FEWEST:
                raise UserError(f"{count} {side} videos are too few for metrics with intervals: give {FEWEST} or more")
        for name, extractor in chosen_metrics:
            self._check_rank(name, extractor, num_made)

    def possible(self, num_made: int) -> tuple[str, ...]:
        """Metrics that can be computed from `num_made` videos."""
        found = []
        for name, extractor in self._requested():
            with suppress(UserError):
                self._check_rank(name, extractor, num_made)
                found.append(name)
        return tuple(dict.fromkeys(found))

    def _check_rank(self, name: str, extractor: Extractor, num_made: int) -> None:
        if name != ADHERENCE and METRICS[name].estimate is frechet_estimate:
            each = self.store.window.frames if extractor.sees == "pictures" else 1
            check_enough(num_made, self.real.count, each, extractor.width)

    def compute_features(self, candidates: Sequence[Candidate], ranks: Ranks, *, shows_progress: bool = True) -> None:
        """Compute and store the features of all candidates' videos, and of the real ones for extractors. Raises
        UserError for videos that do not fit the window or the extractors."""
        self.store.fill([each.videos for each in candidates], [*self.extractors, *self.scorers], ranks, shows_progress)
        if self.real is not None and self.extractors:
            self.store.fill([self.real], self.extractors, ranks, shows_progress)

    def metric_values(self, candidates: Sequence[Candidate], *, shows_progress: bool = True) -> list[MetricValue]:
        """Metrics of all candidates. Raises UserError for metrics that cannot be computed from these videos."""
        found = []
        chosen_metrics = self._requested()
        total = len(candidates) * (len(chosen_metrics) + len(self.scorers))
        with Progress(total, "metrics", enabled=shows_progress) as bar:
            for candidate in candidates:
                for name, extractor in chosen_metrics:
                    found.append(self._metric_value(candidate, name, extractor))
                    bar.advance()
                for scorer in self.scorers:
                    found += self._scores(candidate, scorer)
                    bar.advance()
        return found

    def quality(self, candidate: Candidate) -> tuple[Tensor, str] | None:
        """Score of each video [N], higher is better, and its name, to show the best and worst videos; None if nothing
        scores single videos."""
        for scorer in self.scorers:
            features_NFS, _ = self.store.load(candidate.videos, scorer)
            sign_S = torch.tensor([1.0 if scorer.better[column] == "higher" else -1.0 for column in scorer.columns])
            score_NS = sign_S * features_NFS[:, 0]  # scales differ: use standard deviations from the mean
            score_NS = (score_NS - score_NS.mean(0)) / score_NS.std(0).clamp_min(1e-9)
            return score_NS.mean(1), f"standard deviations from the mean of {', '.join(scorer.columns)}"
        for extractor in self.extractors:
            if hasattr(extractor, "of_texts"):
                features_NFD, prompts = self.store.load(candidate.videos, extractor)
                if all(prompts):
                    return metrics.clip_scores(features_NFD, _texts(extractor, prompts)), "CLIP score"
        for extractor in sorted(self.extractors, key=lambda each: each.sees):  # clips before pictures
            if self.real is not None and extractor.sees in ("clips", "pictures"):
                made, real = (self.store.load(each, extractor)[0] for each in (candidate.videos, self.real))
                return -metrics.distance_to_real(made, real), f"nearness to a real video, by {extractor.name}"
        return None

    def _requested(self) -> list[tuple[str, Extractor]]:
        """Return metrics with their extractors; a requested metric without an extractor is an error."""
        found = []
        for name in self.metrics or (*METRICS, ADHERENCE):
            able = [each for each in self.extractors if _suits(name, each)]
            if self.metrics and not able:
                raise UserError(f"--metrics {name} needs {_NEEDS[_sight(name)]}: add one to --extractors")
            if self.metrics and name != ADHERENCE and self.real is None:
                raise UserError(f"--metrics {name} compares with real videos: give --real")
            found += [(name, each) for each in able if name == ADHERENCE or self.real is not None]
        return found

    def _metric_value(self, candidate: Candidate, name: str, extractor: Extractor) -> MetricValue:
        features_NFD, prompts = self.store.load(candidate.videos, extractor)
        weight_RN = resamplings(_groups(prompts), "made")
        about = {"candidate": candidate, "metric": name, "of": extractor.name}
        if name == ADHERENCE:
            _check_prompts(candidate, prompts)
            return MetricValue(
                title="CLIP score",
                better="higher",
                estimate=metrics.clip_estimate(features_NFD, _texts(extractor, prompts), weight_RN),
                protocol=self._protocol(name, extractor, candidate, with_real=False),
                **about,
            )
        metric, real = METRICS[name], self._real(extractor)
        return MetricValue(
            title=metric.title,
            better=metric.better,
            estimate=metric.estimate(Features(features_NFD, weight_RN), real),
            baseline=self._baseline(name, metric, extractor, real),
            protocol=self._protocol(name, extractor, candidate),
            note=_note(features_NFD, real.features_NFD),
            **about,
        )

    def _scores(self, candidate: Candidate, scorer: Scorer) -> list[MetricValue]:
        features_NFS, prompts = self.store.load(candidate.videos, scorer)
        if scorer.needs_prompts:
            _check_prompts(candidate, prompts)
        weight_RN = resamplings(_groups(prompts), "made")
        return [
            MetricValue(
                candidate=candidate,
                metric=column,
                title=f"{column.replace('_', ' ')}, by {scorer.name}",
                of=scorer.name,
                better=scorer.better[column],
                estimate=mean_estimate(features_NFS[:, 0, place], weight_RN),
                protocol=self._protocol(column, scorer, candidate, with_real=False),
            )
            for place, column in enumerate(scorer.columns)
        ]

    def _real(self, extractor: Extractor) -> Features:
        features_NFD, prompts = self.store.load(self.real, extractor)
        return Features(features_NFD, resamplings(_groups(prompts), "real"))

    def _baseline(self, name: str, metric: Metric, extractor: Extractor, real: Features) -> Estimate | None:
        """Real-against-real baseline, computed once for all candidates; None if half of the videos are too few."""
        key = name, extractor.name
        if key not in self._baselines:
            order = torch.randperm(len(real.features_NFD), generator=torch.Generator().manual_seed(0))
            sides = [
                Features(real.features_NFD[half], resamplings(range(len(half)), side))
                for half, side in zip(order.chunk(2), ("made", "real"), strict=False)
            ]
            try:
                self._baselines[key] = metric.estimate(*sides) if len(order) >= 2 * FEWEST else None
            except UserError:  # too few for a covariance
                self._baselines[key] = None
        return self._baselines[key]

    def _protocol(self, name: str, of: Extractor | Scorer, candidate: Candidate, with_real: bool = True) -> str:
        """Protocol: everything that affects a metric except the model; only metrics of one protocol are comparable."""
        real = f", {self.real.count} real videos {self.real.key}" if with_real and self.real else ""
        return (
            f"megadit {VERSION}: {name} by {of.name} {of.fingerprint} ({of.protocol}); {self.store.window.text}; "
            f"{candidate.videos.count} videos{self.sent_as and f' sent as {self.sent_as}'}{real}"
        )


def differences(metric_values: Sequence[MetricValue]) -> list[Difference]:
    """Compare the first model with each other one, at equal guidance, metric by metric. Raises UserError for metrics of
    different protocols."""
    models = list(dict.fromkeys(metric_value.candidate.model for metric_value in metric_values))
    found = []
    for first in metric_values:
        for second in metric_values:
            scales = {first.candidate.guidance, second.candidate.guidance} - {None}  # unknown for a folder
            is_guidance_curve = first.candidate.model == models[0] != second.candidate.model and len(scales) <= 1
            if not is_guidance_curve or (first.metric, first.of) != (second.metric, second.of):
                continue
            check_same_protocol(first.protocol, second.protocol)
            found.append(Difference(first=first, second=second, estimate=first.estimate - second.estimate))
    return found


def check_same_protocol(first: str, second: str) -> None:
    """Raises UserError for metrics of different protocols."""
    if first != second:
        raise UserError(f"metrics of different protocols cannot be compared: {first} | {second}")


_NEEDS = {
    "pictures": "an extractor of pictures (inception, clip, digits)",
    "clips": "an extractor of clips (i3d, videomae, digits)",
    "motion": "optical flow",
    "texts": "an extractor of pictures and texts (clip)",
}


def _sight(name: str) -> str:
    return "texts" if name == ADHERENCE else METRICS[name].sees


def _suits(name: str, extractor: Extractor) -> bool:
    return hasattr(extractor, "of_texts") if name == ADHERENCE else METRICS[name].sees == extractor.sees


def _groups(prompts: Sequence[str]) -> Sequence:
    """Group of each video by its prompt; a video without one is its own group."""
    return [prompt or number for number, prompt in enumerate(prompts)]


def _texts(extractor: Extractor, prompts: Sequence[str]) -> Tensor:
    """Features of the prompts, [N, D], each computed once."""
    unique = list(dict.fromkeys(prompts))
    found = torch.cat([extractor.of_texts(unique[first : first + 64]).cpu() for first in range(0, len(unique), 64)])
    places = {prompt: place for place, prompt in enumerate(unique)}
    return found[[places[prompt] for prompt in prompts]]


def _check_prompts(candidate: Candidate, prompts: Sequence[str]) -> None:
    missing = sum(not prompt for prompt in prompts)
    if missing:
        raise UserError(
            f"{missing} of {len(prompts)} videos of {candidate.label} have no caption: write NAME.txt next to "
            "NAME.mp4, or leave out metrics that compare with texts"
        )


def _note(made_NFD: Tensor, real_NFD: Tensor) -> str:
    fewest, width = min(len(made_NFD), len(real_NFD)), made_NFD.shape[2]
    return f"{fewest} videos for {width} features: give more" if fewest < width else ""
