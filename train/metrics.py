"""What a run reports: metrics.jsonl, TensorBoard, a progress bar or plain lines. Only the first rank reports."""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from megadit.models.support import Progress
from megadit.train.config import RunConfig

METRICS_FILE = "metrics.jsonl"
_IN_BAR = ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "tflops", "mfu")


class Metrics:
    """One JSON object for every step in metrics.jsonl, and the same numbers elsewhere.

    A resumed run continues the file after the step it starts from: what a killed run wrote beyond its last checkpoint
    is cut off, so that no step is told twice.
    """

    def __init__(self, config: RunConfig, *, start: int, length: int, enabled: bool) -> None:
        """`start` steps are done already, and told by the first `length` bytes of the file."""
        self._config = config
        self._enabled = enabled
        self._step = start
        self._bar = Progress(
            config.train.train_iters, "training", completed=start, enabled=enabled and sys.stderr.isatty()
        )
        self._prints = enabled and not sys.stderr.isatty()
        self._file = self._board = None
        if enabled:
            folder = Path(config.train.output_dir)
            self._file = _open_at(folder / METRICS_FILE, length)
            if config.logger.tensorboard:
                self._board = _tensorboard(folder / "tensorboard", start)

    def __enter__(self) -> "Metrics":
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    @property
    def num_bytes(self) -> int:
        """Length of metrics.jsonl, which a checkpoint remembers."""
        return self._file.tell() if self._file is not None else 0

    def log(self, values: dict[str, Any]) -> None:
        """Reports one step; `values` has `step` and JSON values, numbers at the top level."""
        self._step = values["step"]
        if not self._enabled:
            return
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(name, value, self._step)
        self._bar.advance(1, **{name: values[name] for name in _IN_BAR if values.get(name) is not None})
        is_last = self._step == self._config.train.train_iters
        if self._prints and (self._step % self._config.train.log_interval == 0 or is_last):
            print(plain_line(values, self._config), flush=True)


def plain_line(values: dict[str, Any], config: RunConfig) -> str:
    """A step in the words that logs of NeMo use."""
    return " | ".join(
        [
            f"Training iteration {values['step']}/{config.train.train_iters}",
            f"lr: {values['lr']:.4g}",
            f"global_batch_size: {config.data.global_batch_size}",
            f"global_step: {values['step']}",
            f"reduced_train_loss: {values['loss']:.5g}",
            f"train_step_timing in s: {values['seconds']:.4g}",
            f"consumed_samples: {values['consumed_samples']}",
        ]
    )


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dictionaries under names such as `validation/none/mean`."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{name}", value))
    return found


def _open_at(path: Path, length: int) -> BinaryIO:
    """The file, cut to its first `length` bytes, ready to append."""
    path.touch()
    file = path.open("r+b")
    file.truncate(min(length, path.stat().st_size))
    file.seek(0, os.SEEK_END)
    return file


def _tensorboard(folder: Path, start: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    # steps after the one that a resumed run starts from were told by a process that is gone
    return SummaryWriter(str(folder), purge_step=start + 1)
