"""`megadit info RUN --html PAGE`: a page with a run's curves, samples over time, events and configuration."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from megadit.infer.media.pages import embedded, table_of, write_html
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path
from megadit.models.shared.outside import leads_out

STEPS_SHOWN = 8
"""Number of steps whose samples are shown, evenly spaced, with the first and the last."""
SAMPLES_SHOWN = 6
"""Number of samples shown for a step."""
EVENTS_SHOWN = 100
COLUMNS_SHOWN = 20
"""Fields of events that are columns."""
MOST_BYTES = 8 << 20
"""Most bytes of a picture, a video or a text in the page."""
KINDS = {".mp4": "video/mp4", ".png": "image/png"}
STEP = re.compile(r"step_(\d+)")


def write_run_page(run: Path, page: Path, facts: dict[str, Any]) -> None:
    """Writes the page of a run, from its files alone."""
    rows = [(name, str(value)) for name, value in facts.items() if value is not None]
    head = [f"<h1>{escape(str(run))}</h1>", table_of(rows)]
    write_html(page, str(run), [*head, *_curves(run), *_samples(run), *_events(run), *_config(run)])


def _curves(run: Path) -> list[str]:
    picture = _medium(run, run / "curves.png", "curves")
    picture = picture and f"<div class=curves>{picture}</div>"
    return ["<h2>Curves</h2>", picture or "There are none yet: <code>logger.curves=true</code> draws them."]


def _samples(run: Path) -> list[str]:
    """A row for each step, a column for each prompt."""
    folders = {int(found[1]): path for path in (run / "samples").glob("step_*") if (found := STEP.fullmatch(path.name))}
    steps = sorted(folders)
    if not steps:
        return ["<h2>Samples</h2>", "There are none yet."]
    count = min(len(steps), STEPS_SHOWN)
    shown = sorted({steps[round(number * (len(steps) - 1) / max(count - 1, 1))] for number in range(count)})
    rows = []
    for step in shown:
        paths = sorted(path for path in folders[step].iterdir() if path.suffix in KINDS)[:SAMPLES_SHOWN]
        cells = "".join(f"<td>{_medium(run, path, path.stem)}<br><small>{escape(path.stem)}</small>" for path in paths)
        rows.append(f"<tr><th>step {step:,}{cells}")
    return ["<h2>Samples over time</h2>", f"<table>{''.join(rows)}</table>"]


def _medium(run: Path, path: Path, words: str) -> str:
    """The file as HTML; "" if it is missing, outside of the run, or too large."""
    if leads_out(path, run) or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return ""
    return embedded(path.read_bytes(), KINDS[path.suffix], words)


def _text(run: Path, name: str) -> str:
    """A text of the run, or the end of a large one; "" if there is none. Raises UserError for a link that leads out of
    the run."""
    path = inner_path(run, name)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_BYTES))
        return file.read(MOST_BYTES).decode("utf-8", errors="replace")


def _events(run: Path) -> list[str]:
    events = [_event(line) for line in _text(run, "events.jsonl").splitlines()[-EVENTS_SHOWN:]]
    if not events:
        return ["<h2>Events</h2>", "Nothing went wrong."]
    names = list(dict.fromkeys(name for event in events for name in event))[:COLUMNS_SHOWN]
    return ["<h2>Events</h2>", table_of([[str(event.get(name, "")) for name in names] for event in events], names)]


def _event(line: str) -> dict[str, Any]:
    try:
        return dict(parse_json(line, "an event", is_finite=False))
    except (UserError, ValueError, TypeError):  # the last line of a run that was killed
        return {"unreadable": line}


def _config(run: Path) -> Sequence[str]:
    text = escape(_text(run, "config.yaml"))
    return ["<h2>Configuration</h2>", f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"]
