"""Hook for a scorer of videos, `--scorer_dir DIRECTORY`.

`build-repository` uses it for requests that ask for scores, `evaluate` and `tune-sampler` for metrics, `prepare` for
filtering. The directory holds `scorer.py`, a user program, which is executed, and the files that it needs. It defines:

    def score(video: numpy.ndarray, prompt: str) -> dict[str, float]:
        "Name -> score of a video (uint8 THWC) that was generated from this prompt."

    BETTER = {"beauty": "higher", "overlay": "lower"}    # the scores that are metrics, and their better direction

If it fails for a video, the video is kept without scores; metrics need the scores of all videos, and end in an error.
"""

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megadit.infer.hooks.user_program import FAILURES, find_program, run_program
from megadit.models.shared.errors import UserError

FILE = "scorer.py"
MOST_SCORES, LONGEST_NAME = 64, 100
"""Most scores of a video, and the longest name of one; a service stores them with its job."""


@dataclass(frozen=True, slots=True)
class Scorer:
    score: Callable[[np.ndarray, str], Mapping[str, float]]
    better: Any = None
    """The program's BETTER: scores that are metrics; checked where metrics are computed."""

    @classmethod
    def load(cls, directory: str | Path) -> "Scorer":
        """Run the directory's scorer.py.

        Raises:
            UserError: if there is none, it fails, or defines no `score`.
        """
        path = find_scorer(directory)
        program = run_program(path)
        score = getattr(program, "score", None)
        if not callable(score):
            raise UserError(f"{path} defines no function score(video, prompt)")
        return cls(score, getattr(program, "BETTER", None))

    def scores(self, video_THWC: np.ndarray, prompt: str) -> dict[str, float]:
        """Return the program's scores of a video, uint8; if it fails, {}, and the error is printed to stderr."""
        try:
            return _checked(self.score(video_THWC.copy(), prompt))
        except FAILURES as error:
            traceback.print_exception(error)
            return {}


def _checked(scores: Mapping[str, float]) -> dict[str, float]:
    plain = {name: float(score) for name, score in scores.items()}
    are_names = all(isinstance(name, str) and name.isprintable() and len(name) <= LONGEST_NAME for name in plain)
    if len(plain) > MOST_SCORES or not are_names or not all(map(math.isfinite, plain.values())):
        raise ValueError(
            f"a scorer returns up to {MOST_SCORES} finite numbers with names of up to {LONGEST_NAME} printable "
            f"characters; this one returned {plain!r:.200}"
        )
    return plain


def find_scorer(directory: str | Path) -> Path:
    """The program in a directory, absolute.

    Raises:
        UserError: if there is none.
    """
    return find_program(directory, FILE, option="--scorer_dir", defines="score")
