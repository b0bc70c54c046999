"""Whether a student's videos are as various, and as near to real ones, as its teacher's.

A student that has learnt one video for each prompt does what prompts ask for: judges of that do not see its collapse.
The spread of a prompt's videos does, and so does a distance from real ones (arXiv 2405.14867, section 6).

Shapes: N videos, F features of each, D width.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.infer.evaluate.evaluation import Candidate, Evaluation
from megadit.infer.evaluate.extractors.base import Extractor, resized
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.generated import BundleMaker, Request, made_videos, make_videos
from megadit.infer.evaluate.videos import VideoSet
from megadit.infer.evaluate.window import window_of
from megadit.infer.pipeline.adapters import NO_ADAPTERS, Scales
from megadit.infer.runtimes.ranks import ALONE
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError

DISTANCES = ("fvd", "kvd")
"""The first that so many videos allow."""
NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Allowed range of a student's results, as multiples of its teacher's."""

    least_spread: float
    most_spread: float
    most_distance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A student beside its teacher, as multiples."""

    spread: float
    """Diversity of the videos of one prompt."""
    distance: float | None
    """Distance from real videos; None if there is no extractor to measure it."""
    seen_by: str
    """The extractor."""
    count: int
    """Videos of each."""

    @property
    def text(self) -> str:
        distance = "" if self.distance is None else f", {self.distance:.2f} times its distance from real videos"
        return f"{self.spread:.2f} times the teacher's spread{distance} ({self.count} videos, seen by {self.seen_by})"

    def fault(self, bounds: Bounds) -> str | None:
        """Describe the sign of a collapsed student; None if there is none."""
        if not bounds.least_spread <= self.spread <= bounds.most_spread:
            return f"its spread is not within {bounds.least_spread:g} to {bounds.most_spread:g} times the teacher's"
        if self.distance is not None and not self.distance <= bounds.most_distance:
            return f"its distance from real videos is more than {bounds.most_distance:g} times the teacher's"
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Pixels:
    """Small pictures of frames, where no network is given that sees more."""

    name, sees, fewest_frames, fingerprint = "pixels", "clips", 1, ""
    size = 16
    width = 0
    """Another for each number of frames."""
    protocol = f"frames of {size}x{size}"

    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return (resized(video_BTHWC, self.size, self.size) / 255).flatten(1)


def compare(
    folder: Path,
    teacher: Bundle,
    student: Bundle,
    prompts: Sequence[str],
    *,
    adapters: Scales = NO_ADAPTERS,
    extractors: Sequence[Extractor] = (),
    real: VideoSet | None = None,
    device: str = "cpu",
) -> Comparison:
    """Makes two videos of each prompt by both, of the same noise, at the settings of each; what is in `folder` is kept.
    `adapters` are beside the student's network.

    Raises:
        UserError: for videos that cannot be made, or looked at.
    """
    seer = next((each for each in extractors if each.sees == "clips"), None) or Pixels()
    made = []
    for label, bundle, other_adapters in (("teacher", teacher, NO_ADAPTERS), ("student", student, adapters)):
        maker = BundleMaker(bundle, device=device, dtype="float32", adapters=other_adapters)
        request = Request(maker=maker, prompts=[*prompts, *prompts], settings=bundle.defaults)
        make_videos(folder / "videos", request, ALONE, shows_progress=True)
        made.append(Candidate(model=label, guidance=None, videos=made_videos(folder / "videos", request, label)))
    store = FeatureStore(folder / "features", window_of(made[0].videos.parts[0].read()[0], None, None))
    evaluation = Evaluation(store=store, real=real, extractors=[seer])
    evaluation.compute_features(made, ALONE)
    of_teacher, of_student = (spread(store.load(each.videos, seer)[0]) for each in made)
    return Comparison(
        spread=of_student / max(of_teacher, NOTHING),
        distance=None if real is None else _distance(evaluation, made),
        seen_by=seer.name,
        count=2 * len(prompts),
    )


def spread(features_NFD: Tensor) -> float:
    """Half the mean squared distance between two videos of a prompt: the first half of N has one of each, in order."""
    if len(features_NFD) % 2:
        raise UserError(f"{len(features_NFD)} videos are not two of each prompt")
    first, second = features_NFD.double().mean(1).chunk(2)
    return (first - second).square().sum(1).mean().item() / 2


def spread_within(features_NFD: Tensor, group_N: Tensor) -> float:
    """Mean squared distance of videos from the mean of their group (int64 [N]: what several prompts have in common)."""
    features_ND = features_NFD.double().mean(1)
    groups = [features_ND[group_N == group] for group in group_N.unique()]
    return sum((group_ND - group_ND.mean(0)).square().sum().item() for group_ND in groups) / len(features_ND)


def _distance(evaluation: Evaluation, made: Sequence[Candidate]) -> float | None:
    """The student's distance from real videos as a multiple of the teacher's, at least of what chance makes of that."""
    possible = evaluation.possible(made[0].videos.count)
    name = next((each for each in DISTANCES if each in possible), None)
    if name is None or isinstance(evaluation.extractors[0], Pixels):
        return None
    of = replace(evaluation, metrics=(name,))
    teacher, student = (metric_value.estimate for metric_value in of.metric_values(made, shows_progress=False))
    return max(0.0, student.value) / max(teacher.value, teacher.error, NOTHING)
