"""`megadit info DATA --html PAGE`: samples that a data set kept and left out, with pictures and reasons.

`megadit prepare videos|images|...` writes the files that are read here (`train/data/README.md`): `prepare/skips.jsonl`
has a line for everything that was left out, `prepare/left_out/` has pictures of a few for each reason.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megadit.infer.inspect.dataset_sheet import draw_strip, sample_members
from megadit.infer.media.pages import embedded, table_of, write_html
from megadit.models.shared.cli.setting import check_json, setting
from megadit.models.shared.documents import MAX_BYTES, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path
from megadit.models.shared.progress import duration
from megadit.models.tokenizers import load_tokenizer

NOTES = "prepare"
EXAMPLES_SHOWN = 48
MOST_BYTES = 1 << 20
"""Most bytes of a picture in the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Record of a source, or a segment of one, that was left out."""

    source: str = setting("")
    reason: str = setting("")
    detail: str = setting("")
    start: float = setting(0.0)
    seconds: float = setting(0.0)
    caption: str = setting("")


def write_dataset_page(dataset: Path, page: Path, facts: dict[str, Any]) -> None:
    """Writes the page of a data set, from its files alone. Raises UserError for records that are not JSON lines."""
    rows = [(name, str(value)) for name, value in facts.items() if value is not None]
    head = [f"<h1>{escape(str(dataset))}</h1>", table_of(rows)]
    write_html(page, str(dataset), [*head, *_left_out(dataset), *_samples(dataset)])


def _left_out(dataset: Path) -> Iterator[str]:
    yield "<h2>Left out</h2>"
    skips, shown = (inner_path(dataset, f"{NOTES}/{name}") for name in ("skips.jsonl", "left_out/left_out.jsonl"))
    if not skips.is_file():
        yield "Not recorded: only <code>megadit prepare</code> of videos and images writes it."
        return
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for skip in _lines(skips):
        counts[skip.reason] += 1
        seconds[skip.reason] += skip.seconds
    if not counts:
        yield "Nothing."
        return
    rows = [(reason, f"{count:,}", duration(seconds[reason])) for reason, count in counts.most_common()]
    yield table_of(rows, ("reason", "sources, or segments", "of video"))
    pictures: defaultdict[str, list[str]] = defaultdict(list)
    for number, skip in enumerate(_lines(shown)):
        pictures[skip.reason].append(_skip(skip, shown.with_name(f"{number}.jpg")))
    for reason, count in counts.most_common():
        if of_reason := pictures[reason]:
            yield f"<h2>Left out: {escape(reason)}, {len(of_reason)} of {count:,}</h2>{''.join(of_reason)}"


def _lines(path: Path) -> Iterator[Skip]:
    """Yield the records of a file; none if an older version prepared the data set."""
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), ""), 1):
                where = f"{path}, line {number}"
                values = parse_json(line, where)
                if not isinstance(values, dict):
                    raise UserError(f"{where} is not a JSON object")
                yield Skip(**check_json(values, Skip, where=f"{where}: "))


def _skip(skip: Skip, picture: Path) -> str:
    place = f"{skip.source} at {skip.start:.2f} s" if skip.seconds else skip.source
    is_there = picture.is_file() and not picture.is_symlink() and picture.stat().st_size <= MOST_BYTES
    return _picture(picture.read_bytes() if is_there else b"", [skip.caption or "(no caption)", place, skip.detail])


def _samples(dataset: Path) -> Iterator[str]:
    yield "<h2>Kept</h2>"
    tokenizer = load_tokenizer(dataset / "tokenizer")
    for key, members in sample_members(dataset, EXAMPLES_SHOWN):
        strip_1HWC, words = draw_strip(key, members, tokenizer)
        yield _picture(_jpeg(strip_1HWC[0]), words.splitlines())


def _picture(jpeg: bytes, words: list[str]) -> str:
    """A picture, if there is one, above its caption and other facts."""
    picture = embedded(jpeg, "image/jpeg", words[0]) if jpeg else ""
    first, *others = (escape(line) for line in words if line)
    return f"<figure>{picture}<figcaption>{first}<br><small>{'<br>'.join(others)}</small></figcaption></figure>"


def _jpeg(picture_HWC: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture_HWC).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
