"""A user's scorer in a process of its own, with a time limit: what hangs, crashes or leaks there ends with it."""

import multiprocessing
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megadit.infer.hooks.scorer import Scorer, find_scorer
from megadit.models.shared.errors import UserError

LONGEST_START = 600.0
"""Seconds within which the program must be loaded, with its networks."""


class ScorerProcess:
    """Scorer of a directory, as a context manager; its process starts again after a failure.

    with ScorerProcess(directory, seconds=60) as scorer:
        scorer.scores(video_THWC, "a red seven")
    """

    def __init__(self, directory: str | Path, *, seconds: float) -> None:
        """`seconds`: time limit of one video.

        Raises:
            UserError: if the directory holds no scorer.
        """
        find_scorer(directory)
        self.directory, self.seconds = directory, seconds
        self.better: Mapping[str, str] = {}
        """The program's BETTER: name of a score -> higher or lower."""

    def __enter__(self) -> "ScorerProcess":
        self._start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def scores(self, video_THWC: np.ndarray, prompt: str) -> dict[str, float]:
        """Scores of a video, uint8; {} if the program fails or exceeds its time, which is printed."""
        try:
            self._connection.send((video_THWC, prompt))
            if self._connection.poll(self.seconds):
                return self._connection.recv()
            fault = f"took more than {self.seconds:g} s"
        except (EOFError, OSError):
            fault = "has ended"
        print(
            f"the scorer {self.directory} {fault} on a video of {prompt!r:.100}; it is started again", file=sys.stderr
        )
        self._end()
        self._start()
        return {}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(self.directory)), daemon=True)
        self._process.start()
        theirs.close()
        try:
            found = self._connection.recv() if self._connection.poll(LONGEST_START) else "it takes too long to start"
        except EOFError:
            found = "it has ended while it was loaded"
        if isinstance(found, str):
            self._end()
            raise UserError(f"the scorer {self.directory}: {found}")
        self.better = found

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, directory: str) -> None:
    """Answer with BETTER, or why the program cannot be loaded; then with the scores of each video."""
    try:
        scorer = Scorer.load(directory)
    except UserError as error:
        connection.send(str(error))
        return
    connection.send(scorer.better if isinstance(scorer.better, dict) else {})
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            connection.send(scorer.scores(*connection.recv()))
