"""Self-contained HTML pages, with their pictures and videos embedded."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megadit.models.shared.files import atomic_path

STYLE = """
:root { color-scheme: light dark; --line: #d4d8de; --faint: #6b7380; --good: #1a7f4b; --bad: #b3372f }
@media (prefers-color-scheme: dark) { :root { --line: #343a44; --faint: #98a1ae; --good: #5dd39e; --bad: #ff8a80 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--faint); font-weight: 500; font-size: .85rem }
td.number, th.number { text-align: right; white-space: nowrap }
small, .faint { color: var(--faint) } .good { color: var(--good) } .bad { color: var(--bad) }
img, video { max-width: 100%; background: #fff } video { min-width: 8rem; image-rendering: pixelated }
figure { display: inline-block; vertical-align: top; max-width: 26rem; margin: 0 1rem 1rem 0; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { .curves img { filter: invert(.92) hue-rotate(180deg) } }
code { font-size: .8rem; overflow-wrap: anywhere }
"""


def write_html(path: Path, title: str, body: Sequence[str]) -> None:
    """Writes a page of these HTML fragments."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    page = f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def embedded(content: bytes, kind: str, words: str) -> str:
    """A picture or video (`kind` is its media type) as HTML, with an alternative text."""
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    if kind.startswith("video/"):
        return f'<video autoplay loop muted playsinline controls title="{escape(words)}" src="{source}"></video>'
    return f'<img alt="{escape(words)}" src="{source}">'


def table_of(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of plain text as a table."""
    lines = ["".join(f"<th>{escape(cell)}" for cell in head)] if head else []
    lines += ["".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}' for line in lines)}</table>"
