"""How far a long task has come."""

import sys
import time
from typing import Any, TextIO


def duration(seconds: float) -> str:
    """A length of time in its two largest units: "48 s", "3 min 12 s", "2 h 5 min"."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def _figures_text(figures: dict[str, Any]) -> str:
    """`loss 0.1234  lr 0.008`."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


class Progress:
    """How far a long task has come: a bar on a terminal, else a plain line every few seconds, on standard error.

        with Progress(total, "training") as bar:
            bar.advance(1, loss=0.1, lr=1e-3)

    `completed` is where a resumed task starts; it does not count towards the speed. With `enabled=False` (ranks other
    than the first) nothing is shown. A stream that is not a terminal always gets a last line.
    """

    def __init__(
        self,
        total: int,
        description: str,
        *,
        completed: int = 0,
        enabled: bool = True,
        plain_interval: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        self.description = description
        self.completed = self._first = completed
        self._figures: dict[str, Any] = {}
        self._enabled = enabled
        self._plain_interval = plain_interval
        self._stream = stream or sys.stderr
        self._bar = _terminal_bar(self._stream) if enabled and self._stream.isatty() else None

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.completed, figures="")
        return self

    def advance(self, steps: int = 1, **figures: Any) -> None:
        """Counts `steps` more and shows `figures`; figures of earlier calls stay until they are given again."""
        self.completed += steps
        self._figures.update(figures)
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.completed, figures=_figures_text(self._figures))
        elif time.monotonic() - self._last_line >= self._plain_interval:
            self._print_line()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._start
        done, left = self.completed - self._first, self.total - self.completed
        times = f"{duration(elapsed)} elapsed"
        if done > 0 and left > 0:
            times += f", {duration(elapsed / done * left)} left"
        parts = [f"{self.description}: {self.completed}/{self.total}", _figures_text(self._figures), times]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)


def _terminal_bar(stream: TextIO):
    from rich import progress  # only needed where somebody looks
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[figures]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("<"),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
        # Printed lines appear above the bar, but output that goes to a file must keep going there.
        redirect_stdout=sys.stdout.isatty(),
    )
