"""Scores of a user program (`infer/hooks/scorer.py`) as metrics: `megadit evaluate --scorer_dir DIR`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.infer.evaluate.metrics.table import Better
from megadit.infer.evaluate.videos import hashed
from megadit.infer.hooks.scorer import Scorer, find_scorer
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import sha256_of


class ProgramScorer:
    """Scores of each video and its prompt by a user program: a column for each score in `better`."""

    name, sees, fewest_frames, needs_prompts = "scorer", "scores", 1, False
    protocol = "a video and its prompt"

    def __init__(
        self, scores: Callable[[np.ndarray, str], Mapping[str, float]], better: Mapping[str, Better], fingerprint: str
    ) -> None:
        """Args:
        scores: (video uint8 THWC, prompt) -> {name: score}; scores that are not in `better` are ignored.
        fingerprint: hash of everything that affects the scores.
        """
        self._scores, self.fingerprint = scores, fingerprint
        self.better, self.columns = dict(better), tuple(better)

    @classmethod
    def open(cls, directory: str | Path) -> "ProgramScorer":
        """Open the program in a folder. Raises UserError if there is none, it fails, or does not say which of its
        scores are better."""
        path, scorer = find_scorer(directory), Scorer.load(directory)
        if not _says_what_is_better(scorer.better):
            raise UserError(
                f"{path} must define which scores are metrics, and the better direction of each, such as "
                "BETTER = {'beauty': 'higher'} (or 'lower')"
            )
        return cls(scorer.scores, scorer.better, scorer_fingerprint(path.parent))

    def __call__(self, video_BTHWC: Tensor, prompts: Sequence[str]) -> Tensor:
        rows = []
        for video_THWC, prompt in zip(video_BTHWC.cpu().numpy(), prompts, strict=True):
            scores = self._scores(video_THWC, prompt)
            if missing := [name for name in self.columns if name not in scores]:
                raise UserError(f"the scorer returns no {', '.join(missing)} for a video of {prompt!r:.200}")
            rows.append([scores[name] for name in self.columns])
        return torch.tensor(rows, dtype=torch.float32)


def _says_what_is_better(better: Any) -> bool:
    return (
        isinstance(better, dict)
        and len(better) > 0
        and all(isinstance(name, str) and each in ("higher", "lower") for name, each in better.items())
    )


def scorer_fingerprint(folder: Path) -> str:
    """Hash the names and contents of all files of a scorer's folder: any of them may affect its scores."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return hashed(*(text for path in files for text in (str(path.relative_to(folder)), sha256_of(path))))[:12]
