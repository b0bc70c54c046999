"""Filter by scores of a user's scorer: `--scorer_dir DIR --min_score beauty=5 --max_score text=0.1`.

The folder holds `scorer.py` (see `infer/hooks/scorer.py`): `score(video, caption)` returns scores by name, of any
models (aesthetics, watermarks, amount of text). Scores are cached in `prepare/scores.jsonl`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megadit.infer.hooks.scorer import Scorer
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.train.data.ingest.clips.annotation_cache import AnnotationCache
from megadit.train.data.ingest.clips.encode import decoded_clips
from megadit.train.data.ingest.clips.select import divide
from megadit.train.data.ingest.lines import LongList
from megadit.train.data.ingest.plan import Clip, Notes, Settings, Skip, clip_from_json
from megadit.train.data.ingest.pool import Pool

NO_SCORE = "no score: "
MOST_PROBED = 32
"""Number of first clips of which at least one must have a score of each requested name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of a score."""

    name: str
    least: float
    most: float

    def broken_by(self, scores: Mapping[str, float]) -> tuple[str, str] | None:
        """Return reason and detail if a score is missing or out of bounds, else None."""
        if self.name not in scores:
            return f"{NO_SCORE}{self.name}", ""
        score = scores[self.name]
        if score < self.least:
            return f"low score: {self.name}", f"{score:g}"
        if score > self.most:
            return f"high score: {self.name}", f"{score:g}"
        return None


def read_limits(settings: Settings) -> list[Limit]:
    """Raises UserError for what is not NAME=SCORE."""
    least = [Limit(*_named("min_score", text), math.inf) for text in settings.min_score]
    most = [Limit(name, -math.inf, score) for name, score in (_named("max_score", text) for text in settings.max_score)]
    return [*least, *most]


def _named(flag: str, text: str) -> tuple[str, float]:
    name, _, score = text.rpartition("=")
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise UserError(f"--{flag} {text}: write NAME=SCORE, such as beauty=5")
    return name, value


def open_scorer(settings: Settings) -> Scorer | None:
    """Load the scorer, if the settings have one.

    Raises:
        UserError: if its folder has none, or limits are given without a scorer.
    """
    limits = read_limits(settings)
    if settings.scorer_dir is not None:
        return Scorer.load(settings.scorer_dir)
    if limits:
        raise UserError("--min_score and --max_score need a scorer; give --scorer_dir DIR, too")
    return None


def score_clips(
    clips: Sequence[Clip], settings: Settings, num_workers: int, notes: Notes
) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """Keep clips whose scores are within all limits, in their order; a clip that lacks a score is dropped.

    Raises:
        UserError: if no clip has a score of a name; for a source that has changed since it was scanned.
    """
    scorer = open_scorer(settings)
    if scorer is None:
        return clips, []
    limits, scores = read_limits(settings), AnnotationCache(notes.scores)
    asked = LongList(clip_from_json)
    asked.extend(clip for clip in clips if scores.of(clip) is None)
    with Pool(num_workers) as pool, Progress(len(asked), "judging", enabled=bool(asked)) as bar:
        for number, decoded in enumerate(decoded_clips(asked, settings, pool), 1):
            # failures, which have no scores, are not cached: they may be repaired
            if values := scorer.scores(decoded.frames_THWC, decoded.clip.source.caption):
                scores.add(decoded.clip, values)
            bar.advance()
            if number == min(MOST_PROBED, len(asked)):
                # cached scores count too, because a retry may consist of failing clips alone
                known = (found for clip in clips if (found := scores.of(clip)))
                _check_names(limits, chain(known, ({} for clip in asked[:number] if not scores.of(clip))))
    broken = ([found for limit in limits if (found := limit.broken_by(scores.of(clip) or {}))] for clip in clips)
    return divide(clips, (found[0] if found else None for found in broken))


def _check_names(limits: Sequence[Limit], values: Iterable[Mapping[str, float]]) -> None:
    known, count = set(), 0
    for count, scores in enumerate(values, 1):  # noqa: B007
        known |= scores.keys()
    for limit in limits:
        if limit.name not in known:
            names = ", ".join(sorted(known)) or "none; it fails, see above"
            raise UserError(f"the scorer returned no score {limit.name!r} for {count} clips; its scores: {names}")
