"""Rewards of generated videos: weighted sums of scores, relative to the videos of the same prompt.

Scores come from a user's programs (`infer/hooks/scorer.py`), each in a process of its own, from CLIP and optical flow,
and from the group itself.

Shapes: N videos, F frames, T/H/W frames, height, width, C colour channels, D width of features.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.extractors.base import Extractor, TextExtractor
from megadit.infer.evaluate.metrics.motion import MotionClips
from megadit.infer.evaluate.metrics.scorer import scorer_fingerprint
from megadit.infer.evaluate.metrics.table import ADHERENCE, clip_scores
from megadit.infer.hooks.scorer import find_scorer
from megadit.infer.hooks.scorer_process import ScorerProcess
from megadit.infer.pipeline.results import GeneratedVideo
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError

OF_MOTION = {"motion", "flicker"}
"""Scores by optical flow: displacement between frames, and the change that it does not explain."""
EQUAL = 1e-6
"""Standard deviation below which scores count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Groups of videos, and what is rewarded in them."""

    group_size: int = setting(
        8, "videos of each prompt, which are compared with one another (default: {default})", low=2
    )
    scorer_dir: Sequence[Path] = setting(
        (), "folders of scorers (scorer.py), whose scores are rewarded", nargs="+", metavar="DIR"
    )
    watch_dir: Sequence[Path] = setting(
        (), "folders of scorers whose scores are only reported", nargs="+", metavar="DIR"
    )
    reward: Sequence[str] = setting(
        (),
        "weights of scores: those of the scorers (default: 1 or -1, by their BETTER), clip, motion, flicker, diversity",
        nargs="+",
        metavar="NAME=WEIGHT",
    )
    clip: Path | None = setting(
        None, "CLIP model (a folder of transformers, or a bundle) for the score `clip`", metavar="DIR"
    )
    extractors: Sequence[Path] = setting(
        (),
        "feature extractors, as for `megadit evaluate`: the score `diversity` uses the first one of clips, else of "
        "pictures (default: latents); comparisons with the base, that of clips (default: downscaled frames)",
        nargs="+",
        metavar="PATH",
    )
    scorer_seconds: float = setting(60.0, "time limit of a scorer for one video (default: {default})", above=0)

    def check(self) -> None:
        """Raises UserError if nothing is rewarded, or if a folder holds no scorer."""
        if not self.scorer_dir and not self.reward:
            raise UserError(
                "there is nothing to reward: give --scorer_dir DIR, a folder with a scorer.py, or --reward NAME=WEIGHT"
            )
        for folder in (*self.scorer_dir, *self.watch_dir):
            find_scorer(folder)

    @property
    def request(self) -> dict[str, Any]:
        """JSON values that determine the rewards."""
        folders = {"scorers": self.scorer_dir, "watched": self.watch_dir}
        prints = {name: [scorer_fingerprint(folder) for folder in several] for name, several in folders.items()}
        clip = None if self.clip is None else str(self.clip.resolve())
        extractors = [str(path.resolve()) for path in self.extractors]
        asked = {"group_size": self.group_size, "reward": list(self.reward), "clip": clip, "extractors": extractors}
        return asked | prints

    @property
    def arguments(self) -> list[str]:
        """These settings as a command line."""
        several = {
            "--scorer_dir": self.scorer_dir,
            "--watch_dir": self.watch_dir,
            "--extractors": self.extractors,
            "--reward": self.reward,
        }
        found = ["--group_size", str(self.group_size), "--scorer_seconds", f"{self.scorer_seconds:g}"]
        found += [] if self.clip is None else ["--clip", str(self.clip)]
        return found + [word for name, values in several.items() if values for word in (name, *map(str, values))]


class VideoScores:
    """Scores of videos, as a context manager: by a user's programs, and by networks of our own."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self.weights: dict[str, float] = {}
        """Weight of each rewarded score."""

    def __enter__(self) -> "VideoScores":
        """Start the programs.

        Raises:
            UserError: if one fails, as `weights_of`, and as `_measures`.
        """
        scoring = self._scoring
        with ExitStack() as stack:  # ends those that have started if a later one fails
            self._scorers, self._watchers = (
                [stack.enter_context(ScorerProcess(folder, seconds=scoring.scorer_seconds)) for folder in folders]
                for folders in (scoring.scorer_dir, scoring.watch_dir)
            )
            self.weights = weights_of(scoring.reward, self._scorers)
            self._measures = _measures(self.weights, scoring.clip)
            self._seer = _seer_of(scoring.extractors) if OF_GROUPS.keys() & self.weights.keys() else None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def describe(self, video: GeneratedVideo) -> dict[str, Any]:
        """`scores` of a video, and `features`, if scores of groups compare those of an extractor."""
        described = {"scores": self.of(video)}
        if self._seer is None:
            return described
        if len(video.video) < self._seer.fewest_frames:
            raise UserError(
                f"--extractors: {self._seer.name} needs videos of {self._seer.fewest_frames} frames or more"
            )
        frames_THWC = torch.from_numpy(video.video)
        clips_NTHWC = frames_THWC[None] if self._seer.sees == "clips" else frames_THWC[:, None]
        return described | {"features": self._seer(clips_NTHWC).mean(0).tolist()}

    def of(self, video: GeneratedVideo) -> dict[str, float]:
        """All scores of a video; those of a program that fails are left out.

        Raises:
            UserError: for a reward that nothing scores, at the first video that all programs have scored.
        """
        asked = [each.scores(video.video, video.prompt) for each in (*self._scorers, *self._watchers)]
        scores = {name: score for found in asked for name, score in found.items()}
        for measure in self._measures:
            scores |= measure(video)
        known = {*scores, *OF_GROUPS, *(name for each in self._scorers for name in each.better)}
        missing = [name for name in self.weights if name not in known]
        if missing and all(asked):
            raise UserError(f"--reward {missing[0]}=...: there is no such score; known are {', '.join(sorted(known))}")
        return scores


def weights_of(asked: Sequence[str], scorers: Sequence[ScorerProcess]) -> dict[str, float]:
    """Weight of each rewarded score.

    Raises:
        UserError: for what is no NAME=WEIGHT, or if no scorer says which scores are better.
    """
    if not asked:
        weights = {
            name: 1.0 if better == "higher" else -1.0 for each in scorers for name, better in each.better.items()
        }
        if not weights:
            raise UserError("the scorer does not say which scores are better (BETTER): give --reward NAME=WEIGHT")
        return weights
    weights = {}
    for each in asked:
        name, _, weight = each.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if not name or not np.isfinite(weights[name]):
            raise UserError(f"--reward {each}: write NAME=WEIGHT, such as beauty=1 or flicker=-0.5")
    return weights


def _measures(weights: Collection[str], clip: Path | None) -> list[Callable[[GeneratedVideo], dict[str, float]]]:
    """Functions from a video to scores by networks of our own.

    Raises:
        UserError: for a score `clip` without a CLIP model, or a folder that holds none.
    """
    found = [_motion] if OF_MOTION & {*weights} else []
    if clip is None:
        if ADHERENCE in weights:
            raise UserError(f"--reward {ADHERENCE}=... needs --clip DIR, a CLIP model")
        return found
    seer = next((each for each in open_extractors(clip, torch.device("cpu")) if hasattr(each, "of_texts")), None)
    if seer is None:
        raise UserError(f"--clip {clip}: it embeds no texts; give a CLIP model")
    return [*found, partial(_clip, seer)]


def _seer_of(paths: Sequence[Path]) -> Extractor | None:
    """The extractor that compares videos: the first of clips, else the first of pictures; None without any."""
    found = [each for path in paths for each in open_extractors(path, torch.device("cpu"))]
    return next((each for each in found if each.sees == "clips"), found[0] if found else None)


def _motion(video: GeneratedVideo) -> dict[str, float]:
    flow = MotionClips()
    if len(video.video) < flow.fewest_frames:
        raise UserError("--reward motion and flicker need videos of two frames or more")
    motion, flicker = flow(torch.from_numpy(video.video)[None])[0].tolist()
    return {"motion": motion, "flicker": flicker}


def _clip(seer: TextExtractor, video: GeneratedVideo) -> dict[str, float]:
    frames_NFD = seer(torch.from_numpy(video.video)[:, None])[None]
    return {ADHERENCE: clip_scores(frames_NFD, seer.of_texts([video.prompt])).item()}


def diversity(values: Iterable[Tensor], group_size: int) -> list[float]:
    """Score of a video within its group: its mean squared distance from the group's other videos, in multiples of that
    of all groups. It holds a policy back from making one video of each prompt, which other scores reward.

    `values` are latents, CTHW each, or features [D]; those of one group are held at a time.
    """
    left, distances = iter(values), []
    while group := list(islice(left, group_size)):
        rows_ND = torch.stack(group).float().flatten(1)
        distances.append(torch.cdist(rows_ND, rows_ND).square().sum(1) / max(1, len(group) - 1))
    distance_N = torch.cat(distances)
    return (distance_N / distance_N.mean().clamp_min(EQUAL)).tolist()


OF_GROUPS = {"diversity": diversity}
"""Name of a score that is computed from a group's latents or features, without a scorer -> (those, group size) ->
scores."""


def rewards(scores_N: Sequence[float | None], group_size: int) -> list[float | None]:
    """Optimality probability of each video, 0 to 1: 1/2 + 1/2 clip((score - mean of its group) / std, -1, 1) (arXiv
    2509.16117, section 3.2), where std is that of all scores; None without a score, or with no other in the group."""
    known = [score for score in scores_N if score is not None]
    std = float(np.std(known)) if known else 0.0
    found: list[float | None] = []
    for first in range(0, len(scores_N), group_size):
        group = scores_N[first : first + group_size]
        of_group = [score for score in group if score is not None]
        mean = float(np.mean(of_group)) if len(of_group) > 1 else None
        for score in group:
            if score is None or mean is None:
                found.append(None)
            else:
                found.append(0.5 + 0.5 * float(np.clip((score - mean) / std, -1, 1)) if std > EQUAL else 0.5)
    return found


def weighted(scores: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the rewarded scores; None if one is missing."""
    if weights.keys() - scores.keys():
        return None
    return sum(weight * scores[name] for name, weight in weights.items())
