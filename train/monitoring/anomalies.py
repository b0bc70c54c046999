"""Detection of failing steps, unusable samples and slow readers, for the reactions of `health.*`."""

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from megadit.train.config.upkeep import HealthConfig, Remedy

WARM_UP_STEPS = 10
"""Steps at the start of a process in which readers fill their buffers."""
READING_WINDOW = 20
"""Number of steps over which the time spent waiting for data is measured."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A step whose update must not be trusted."""

    what: str
    """Description for the log."""
    remedy: Remedy
    samples: tuple[str, ...] = ()
    """Samples of the step, or those with a non-finite loss."""
    is_usual: bool = False
    """Whether it also occurs in healthy runs, so that no sample is to blame."""

    def describe(self) -> str:
        if self.is_usual:
            return self.what
        shown = ", ".join(self.samples[:20])
        more = f" and {len(self.samples) - 20} more" if len(self.samples) > 20 else ""
        return f"{self.what}; samples: {shown}{more}"

    def record(self, step: int) -> dict[str, Any]:
        """Record for events.jsonl."""
        return {"step": step, "what": self.what, "remedy": self.remedy, "samples": list(self.samples)}


class AnomalyDetector:
    """Checks the loss and gradient of each step; all ranks see the same numbers and decide alike."""

    def __init__(self, config: HealthConfig, recent_losses: list[float]) -> None:
        """`recent_losses` belongs to the state of the run, and is updated in place."""
        self._config = config
        self._recent = recent_losses

    @property
    def checks_before_update(self) -> bool:
        """Whether gradients must be checked before the update (not needed if the run stops anyway)."""
        return self._config.on_not_finite != "stop"

    def loss(self, step: int, loss: float) -> Anomaly | None:
        if not math.isfinite(loss):
            return Anomaly(f"the loss of step {step} is not a finite number", self._config.on_not_finite)
        if self._config.on_spike is None:
            return None
        usual = statistics.median(self._recent) if len(self._recent) >= self._config.spike_window // 2 else math.inf
        if loss > self._config.spike_factor * usual:
            what = f"the loss of step {step} is {loss:.4g}, {loss / usual:.1f} times the usual {usual:.4g}"
            return Anomaly(what, self._config.on_spike)
        self._recent.append(loss)
        del self._recent[: -self._config.spike_window]
        return None

    def gradient(self, step: int, norm: float) -> Anomaly | None:
        if math.isfinite(norm):
            return None
        return Anomaly(f"the gradient of step {step} has norm {norm}", self._config.on_not_finite)

    def overflow(self, step: int, scale: float) -> Anomaly:
        """Anomaly of a non-finite fp16 gradient; the loss scale has been lowered, if that was possible."""
        what = f"the gradient of step {step} overflows with a loss scale of {scale:g}"
        if scale > 1:
            return Anomaly(what, "skip", is_usual=True)
        return Anomaly(what, self._config.on_not_finite)


CHOSEN = frozenset({"low_score"})
"""Reasons to reject a sample that are settings, not defects."""
_SHARDS_NAMED = 3
"""Number of shards that an error names."""
REFUSALS_WINDOW = 2000
"""Minimum number of samples over which the fraction of rejected ones is measured."""


class Refusals:
    """Fraction of unusable samples over the last steps; all ranks see the same numbers and decide alike."""

    def __init__(self, config: HealthConfig, *, read_ahead: int) -> None:
        """`read_ahead`: maximum number of samples that have been read, and counted if rejected, for later steps."""
        self._most, self._ahead = config.max_refused_share, read_ahead
        self._steps: deque[tuple[int, dict[str, int]]] = deque()

    def complaint(self, *, used: int, refused: dict[str, int]) -> str | None:
        """Add the counts of one step; return an error message, or None."""
        self._steps.append((used, {reason: count for reason, count in refused.items() if reason not in CHOSEN}))
        while len(self._steps) > 1 and sum(map(_read_in, self._steps)) - _read_in(self._steps[0]) >= REFUSALS_WINDOW:
            self._steps.popleft()
        counts = Counter[str]()
        for _, reasons in self._steps:
            counts.update(reasons)
        lost, most = counts.total(), self._most
        read = lost + self._ahead + sum(used for used, _ in self._steps)
        if lost <= most * read or most >= 1:
            return None
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
        return (
            f"{lost:,} of the last {read:,} samples read could not be used ({reasons}), more than "
            f"health.max_refused_share={most:g}"
        )


def _read_in(step: tuple[int, dict[str, int]]) -> int:
    return step[0] + sum(step[1].values())


def worst_shards(shards: Counter[str]) -> str:
    """List the shards with most unreadable samples, in brackets; empty if there are none."""
    named = ", ".join(f"{count:,} of {shard}" for shard, count in shards.most_common(_SHARDS_NAMED))
    return f" ({named})" if named else ""


class ReadingTime:
    """Measures the time that training waits for its data."""

    def __init__(self, config: HealthConfig) -> None:
        self._limit = config.starving_share
        self._shares: deque[float] = deque(maxlen=READING_WINDOW)
        self._steps = self._warnings = 0

    def warning(self, *, reading: float, whole: float) -> str | None:
        """Add the seconds of one step; return a message for the user, ever more rarely, or None."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            return None
        self._shares.append(reading / whole)
        share = sum(self._shares) / READING_WINDOW
        if len(self._shares) < READING_WINDOW or share <= self._limit:
            return None
        self._shares.clear()
        self._warnings += 1
        if str(self._warnings).strip("0") != "1":
            return None
        return f"warning: {share:.0%} of the last {READING_WINDOW} steps was spent waiting for data"
