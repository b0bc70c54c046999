"""Check of a student against its teacher: diversity of videos, and distance from real ones.

A collapsed student, which generates one video for each prompt, may still follow prompts well. The diversity of a
prompt's videos and a distance from real ones detect it (arXiv 2405.14867, section 6).

Shapes: N videos, F features of each, D width.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
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
"""Distances by preference; the first that the number of videos allows is used."""
NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Allowed values of a student, as multiples of its teacher's."""

    least_spread: float
    most_spread: float
    most_distance: float
    most_moved: float = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Measurements of a student as multiples of its teacher's."""

    spread: float
    """Diversity of the videos of one prompt."""
    distance: float | None
    """Distance from real videos; None without a feature extractor."""
    moved: float
    """Half the mean squared distance of a video from the teacher's video of the same noise, as a multiple of the
    teacher's diversity: 1 for an unrelated video of the same prompt."""
    seen_by: str
    """Name of the feature extractor."""
    count: int
    """Number of videos of each."""

    def text(self, of: str = "teacher") -> str:
        """The measurements in words; `of`: what the teacher is called."""
        distance = "" if self.distance is None else f", {self.distance:.2f} times its distance from real videos"
        moved = f", moved by {self.moved:.2f} of that diversity"
        return f"{self.spread:.2f} times the {of}'s diversity{moved}{distance} ({self.count} videos; {self.seen_by})"

    def fault(self, bounds: Bounds, of: str = "teacher") -> str | None:
        """Describe the sign of a collapsed student; None if there is none. `of` as in `text`."""
        if not bounds.least_spread <= self.spread <= bounds.most_spread:
            return f"its diversity is not within {bounds.least_spread:g} to {bounds.most_spread:g} times the {of}'s"
        if self.distance is not None and not self.distance <= bounds.most_distance:
            return f"its distance from real videos is more than {bounds.most_distance:g} times the {of}'s"
        if not self.moved <= bounds.most_moved:
            return f"its videos are further than {bounds.most_moved:g} times the {of}'s diversity from the {of}'s"
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Pixels:
    """Feature extractor of last resort: downscaled frames."""

    name, sees, fewest_frames, fingerprint = "pixels", "clips", 1, ""
    size = 16
    width = 0
    """Number of features; 0, because it depends on the number of frames."""
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
    """Generate two videos of each prompt with both, from the same noise and with the settings of each, and compare
    them.

    Videos found in `folder` are reused. `adapters` are attached to the student's network.

    Raises:
        UserError: for videos that cannot be generated or read.
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
    teacher_NFD, student_NFD = (store.load(each.videos, seer)[0] for each in made)
    of_teacher = max(spread(teacher_NFD), NOTHING)
    return Comparison(
        spread=spread(student_NFD) / of_teacher,
        moved=spread(torch.cat([teacher_NFD, student_NFD])) / of_teacher,
        distance=None if real is None else _distance(evaluation, made),
        seen_by=seer.name,
        count=2 * len(prompts),
    )


def spread(features_NFD: Tensor) -> float:
    """Diversity: half the mean squared distance of the two videos of a prompt, which are n and n + N/2."""
    if len(features_NFD) % 2:
        raise UserError(f"{len(features_NFD)} videos are not two of each prompt")
    first, second = features_NFD.double().mean(1).chunk(2)
    return (first - second).square().sum(1).mean().item() / 2


def spread_within(features_NFD: Tensor, group_N: Tensor) -> float:
    """Mean squared distance of videos from the mean of their group (int64 [N], common to several prompts)."""
    features_ND = features_NFD.double().mean(1)
    groups = [features_ND[group_N == group] for group in group_N.unique()]
    return sum((group_ND - group_ND.mean(0)).square().sum().item() for group_ND in groups) / len(features_ND)


def _distance(evaluation: Evaluation, made: Sequence[Candidate]) -> float | None:
    """The student's distance from real videos, divided by the teacher's or, if that is larger, its chance level."""
    possible = evaluation.possible(made[0].videos.count)
    name = next((each for each in DISTANCES if each in possible), None)
    if name is None or isinstance(evaluation.extractors[0], Pixels):
        return None
    of = replace(evaluation, metrics=(name,))
    teacher, student = (metric_value.estimate for metric_value in of.metric_values(made, shows_progress=False))
    return max(0.0, student.value) / max(teacher.value, teacher.error, NOTHING)
