"""Reports of a run: metrics.jsonl, trackers, a progress bar or plain lines. Only the first rank reports."""

import json
import math
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from megadit.models.shared.progress import Progress, duration
from megadit.train.config.schema import RunConfig
from megadit.train.monitoring.trackers import open_trackers

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
_IN_BAR = {"loss": "loss", "seconds": "s/step", "lr": "lr", "grad_norm": "grad_norm"} | {
    name: name for name in ("samples_per_s", "tokens_per_s", "tflops", "mfu")
}
"""Key in metrics.jsonl -> name on the terminal, by priority on narrow ones."""
STEPS_BEFORE_ESTIMATE = 3
"""Steps of this process before the first estimate of the time left; the first step is slower than the others."""
SLOW = 1.5
"""Ratio of measured to expected time of a step above which slowness is reported."""
SHORT = 60.0
"""Seconds of remaining time below which slowness is not reported."""
FEW_STEPS = 10
"""Number of remaining steps up to which no estimate is printed."""


class Metrics:
    """Writes one JSON object per step to metrics.jsonl, and the same numbers to trackers and terminal.

    A resumed run truncates the file after the step of its checkpoint, so that no step is recorded twice.
    """

    def __init__(
        self, config: RunConfig, *, start: int, length: int, expected: float = math.inf, enabled: bool
    ) -> None:
        """`start`: steps done before, recorded in the first `length` bytes of the file; `expected`: expected seconds of
        a step."""
        self._config = config
        self._enabled = enabled
        self._step = start
        self._start = start
        self._expected = expected
        self._quickest = math.inf
        has_bar = enabled and sys.stderr.isatty() and not _is_pipe(sys.stdout)  # `| tee` would write into the bar
        self._bar = Progress(config.train.train_iters, "training", completed=start, enabled=has_bar)
        self._prints = enabled and not (has_bar and sys.stdout.isatty())
        self._file = _open_at(Path(config.train.output_dir) / METRICS_FILE, length) if enabled else None
        self._trackers = open_trackers(config, start=start) if enabled else []

    def __enter__(self) -> "Metrics":
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
        if self._file is not None:
            self._file.close()
        for board in self._trackers:
            board.close()

    @property
    def num_bytes(self) -> int:
        """Length of metrics.jsonl, which checkpoints save."""
        return self._file.tell() if self._file is not None else 0

    def log(self, values: dict[str, Any]) -> None:
        """Report one step; `values` has `step` and JSON values, numbers at the top level."""
        self._step = values["step"]
        if not self._enabled:
            return
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()
        for board in self._trackers:
            board.scalars(self._step, _scalars(values))
        self._bar.advance(1, **{shown: values[name] for name, shown in _IN_BAR.items() if values.get(name) is not None})
        left = self._config.train.train_iters - self._step
        self._quickest = min(self._quickest, values.get("seconds", math.inf))
        if self._prints and (self._step % self._config.train.log_interval == 0 or not left):
            print(plain_line(values, self._config, self._bar.seconds_left), flush=True)
        if self._step == self._start + STEPS_BEFORE_ESTIMATE and left > FEW_STEPS:
            print(f"estimated time: {time_left(left, self._quickest, self._expected)}", flush=True)

    def rewind(self, step: int, length: int) -> None:
        """Drop what was reported after `step`, whose line ends after `length` bytes."""
        if self._enabled:
            num_steps = self._step - step
            self._bar.advance(-num_steps)
            self._file.seek(length)
            self._file.truncate()
            for board in self._trackers:
                board.close()
            self._trackers = open_trackers(self._config, start=step, taken_back=num_steps)
        self._step = step

    def event(self, values: dict[str, Any]) -> None:
        """Append a line to events.jsonl, which is never truncated."""
        if self._enabled:
            with (Path(self._config.train.output_dir) / EVENTS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), **values}) + "\n")

    def show(self, step: int, videos: Sequence[tuple[str, Path]]) -> None:
        """Send the (caption, path) videos of a validation to the trackers."""
        for board in self._trackers:
            board.videos(step, videos)


def time_left(steps: int, seconds: float, expected: float) -> str:
    """Describe the time that `steps` steps of `seconds` each take, and say if that is far more than was expected."""
    words = f"{duration(steps * seconds)} for {steps:,} steps more"
    if seconds < SLOW * expected or steps * seconds < SHORT:
        return words
    return f"{words}: a step takes {seconds:.2g} s, not {expected:.2g}; other processes may take this machine's time"


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # no file at all
        return False


def plain_line(values: dict[str, Any], config: RunConfig, seconds_left: float | None) -> str:
    """Log line of a step as NeMo writes it, with the remaining time."""
    return " | ".join(
        [
            f"Training iteration {values['step']}/{config.train.train_iters}",
            f"lr: {values['lr']:.4g}",
            f"global_batch_size: {config.data.global_batch_size}",
            f"global_step: {values['step']}",
            f"reduced_train_loss: {math.nan if values['loss'] is None else values['loss']:.5g}",
            f"train_step_timing in s: {values['seconds']:.4g}",
            f"consumed_samples: {values['consumed_samples']}",
            f"ETA: {'?' if seconds_left is None else duration(seconds_left)}",
        ]
    )


def _scalars(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of nested dictionaries under names such as `validation/none/mean`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found


def _open_at(path: Path, length: int) -> BinaryIO:
    """Open a file for appending, truncated to its first `length` bytes."""
    path.touch()
    file = path.open("r+b")
    file.truncate(min(length, path.stat().st_size))
    file.seek(0, os.SEEK_END)
    return file
