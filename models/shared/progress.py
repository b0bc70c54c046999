"""Progress of long tasks."""

import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")

BAR, ASCII_BAR = "━─", "#-"
SHORTEST_BAR, LONGEST_BAR = 8, 40
USUAL_COLUMNS = 80


HOUR, DAY, YEAR = 3600, 86_400, 31_557_600


def duration(seconds: float) -> str:
    """A duration in its two largest units: "48 s", "3 min 12 s", "2 h 5 min", "12 days 3 h", "40 years"."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < HOUR:
        return f"{total // 60} min {total % 60} s"
    if total < 2 * DAY:
        return f"{total // HOUR} h {total % HOUR // 60} min"
    if total < 2 * YEAR:
        return f"{total // DAY} days {total % DAY // HOUR} h"
    return f"{float(f'{total / YEAR:.2g}'):,.0f} years"


def _value_text(name: str, value: Any) -> str:
    """Format a value: `loss 0.1234`."""
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


class Progress:
    """Progress of a long task on standard error: a line with a bar on a terminal, else a plain line every few seconds.

        with Progress(total, "training") as bar:
            bar.advance(1, loss=0.1, lr=1e-3)

    `completed` is where a resumed task starts; it does not count towards the speed. With `enabled=False` (ranks other
    than the first) nothing is shown. A terminal's line shows count and remaining time at any width, and as many values
    as fit, in their order. A stream that is not a terminal always gets a last line.
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
        self.completed = completed
        self._values: dict[str, Any] = {}
        self._enabled = enabled
        self._plain_interval = plain_interval
        self._stream = stream or sys.stderr
        self._live = None

    def __enter__(self) -> "Progress":
        self._start = self._last_line = self._last_advance = time.monotonic()
        self._marks = [(self._start, self.completed)]
        if self._enabled and self._stream.isatty():
            self._live = self._terminal_line()
            self._live.start()
        return self

    def advance(self, steps: int = 1, **values: Any) -> None:
        """Counts `steps` more and shows `values`; values of earlier calls stay until they are replaced."""
        self.completed += steps
        self._values.update(values)
        self._last_advance = time.monotonic()
        if len(self._marks) == 1:
            self._marks.append((self._last_advance, self.completed))
        if self._enabled and self._live is None and self._last_advance - self._last_line >= self._plain_interval:
            self._print_line()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._enabled:
            self._print_line()

    @property
    def seconds_left(self) -> float | None:
        """Estimate at the mean speed so far, without the first step, which is slower; None before its end."""
        since, at = self._marks[-1] if self.completed > self._marks[-1][1] else self._marks[0]
        if self.completed <= at:
            return None
        seconds_per_item = (self._last_advance - since) / (self.completed - at)
        return max(0.0, seconds_per_item * (self.total - self.completed) - (time.monotonic() - self._last_advance))

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        times, left = f"{duration(self._last_line - self._start)} elapsed", self.seconds_left
        if left is not None and self.completed < self.total:
            times += f", {duration(left)} left"
        values = "  ".join(_value_text(*value) for value in self._values.items())
        parts = [f"{self.description}: {self.completed}/{self.total}", values, times]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)

    def _terminal_line(self):
        from rich.console import Console  # only needed on a terminal
        from rich.live import Live
        from rich.text import Text

        console = Console(file=self._stream)

        def line() -> Text:
            # rich asks standard input, maybe another terminal
            with suppress(OSError, ValueError):
                if "COLUMNS" not in os.environ:
                    console.width = os.get_terminal_size(self._stream.fileno()).columns or USUAL_COLUMNS
            return Text(self._fitted(console.width, console.encoding), no_wrap=True, overflow="crop")

        return Live(
            console=console,
            get_renderable=line,
            # Printed lines appear above, but output that goes to a file must keep going there.
            redirect_stdout=sys.stdout.isatty(),
        )

    def _fitted(self, width: int, encoding: str) -> str:
        """Format the line for a terminal of `width` columns."""
        left = self.seconds_left
        if self.completed >= self.total:
            time_text = f"in {duration(self._last_advance - self._start)}"
        else:
            time_text = f"ETA {'?' if left is None else duration(left)}"
        line = f"{self.description} {self.completed}/{self.total}  {time_text}"
        for value in self._values.items():
            text = f"  {_value_text(*value)}"
            if len(line) + len(text) > width:
                break
            line += text
        width_left = min(width - len(line) - 2, LONGEST_BAR)
        if width_left < SHORTEST_BAR:
            return line
        done, rest = BAR if encoding.startswith("utf") else ASCII_BAR
        filled = width_left * min(max(self.completed, 0), self.total) // max(self.total, 1)
        return f"{line}  {done * filled}{rest * (width_left - filled)}"


def tracked(items: Collection[Item], description: str) -> Iterator[Item]:
    """The items in turn, each of which counts in a `Progress` once its work is done: when the next is asked for."""
    with Progress(len(items), description) as bar:
        for item in items:
            yield item
            bar.advance()
