"""`megadit info RUN --html PAGE`: a run on one page, its curves, samples over time, events and configuration."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from megadit.infer.pages import embedded, table_of, write_html
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path

STEPS_SHOWN = 8
"""Steps whose samples are shown: spread evenly, the first and the last among them."""
SAMPLES_SHOWN = 6
"""Samples shown of a step."""
EVENTS_SHOWN = 100
MOST_BYTES = 8 << 20
"""Most bytes of a picture or video that is put into the page."""
KINDS = {".mp4": "video/mp4", ".png": "image/png"}
STEP = re.compile(r"step_(\d+)")


def write_run_page(run: Path, page: Path, facts: dict[str, Any]) -> None:
    """Writes the page of a run's folder, from its files alone."""
    rows = [(name, str(value)) for name, value in facts.items() if value is not None]
    head = [f"<h1>{escape(str(run))}</h1>", table_of(rows)]
    write_html(page, str(run), [*head, *_curves(run), *_samples(run), *_events(run), *_config(run)])


def _curves(run: Path) -> list[str]:
    picture = _medium(run / "curves.png", "curves")
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
        cells = "".join(f"<td>{_medium(path, path.stem)}<br><small>{escape(path.stem)}</small>" for path in paths)
        rows.append(f"<tr><th>step {step:,}{cells}")
    return ["<h2>Samples over time</h2>", f"<table>{''.join(rows)}</table>"]


def _medium(path: Path, words: str) -> str:
    """The file as a part of the page; "" where it is not there, or large."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return ""
    return embedded(path.read_bytes(), KINDS[path.suffix], words)


def _events(run: Path) -> list[str]:
    path = inner_path(run, "events.jsonl")
    if not path.is_file():
        return ["<h2>Events</h2>", "Nothing went wrong."]
    events = [_event(line, path) for line in path.read_text(encoding="utf-8").splitlines()[-EVENTS_SHOWN:]]
    names = list(dict.fromkeys(name for event in events for name in event))
    return ["<h2>Events</h2>", table_of([[str(event.get(name, "")) for name in names] for event in events], names)]


def _event(line: str, path: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(line, str(path), is_finite=False))
    except (UserError, ValueError, TypeError):  # the last line of a run that was killed
        return {"unreadable": line}


def _config(run: Path) -> Sequence[str]:
    text = inner_path(run, "config.yaml").read_text(encoding="utf-8")
    return ["<h2>Configuration</h2>", f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>"]
