"""Lists of millions in a temporary file, and what listing a table of many rows keeps in memory."""

import gc
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import many_rows
import pytest

from megadit.train.data.ingest import lines, report
from megadit.train.data.ingest.clips.select import select
from megadit.train.data.ingest.lines import LongList, line_starts, read_lines
from megadit.train.data.ingest.plan import Notes, Settings, Source, source_from_json
from megadit.train.data.ingest.sources import files
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.update import EarlierFindings, keep_findings


def source(number: int, caption: str = "") -> Source:
    caption = caption or f"a {number}\n"
    name = f"{number * 7919 % 1000:03d} é\u2028.jpg"
    return Source(name=name, kind="image", path=f"/data/{name}", caption=caption, more_captions=("b",))


@pytest.mark.parametrize("in_memory", [1 << 10, 1 << 22])
def test_a_long_list_is_a_list(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(lines, "BYTES_IN_MEMORY", in_memory)
    found, plain = LongList(source_from_json, lambda each: each.name), [source(number) for number in range(1000)]
    for each in plain:
        found.append(each)
    found[3] = plain[3] = source(3, "another caption")
    assert len(found) == 1000 and list(found) == plain and found[-1] == plain[-1]
    found.sort()
    plain.sort(key=lambda each: each.name)
    assert list(found) == plain
    found.write(tmp_path / "sources.jsonl")
    starts, count = line_starts(tmp_path / "sources.jsonl", 64)
    assert count == 1000 and len(starts) == 16
    for unit, start in enumerate(starts):
        assert source_from_json(next(read_lines(tmp_path / "sources.jsonl", start))) == plain[64 * unit]


def peak_of(function) -> int:
    """Python keeps up to 2,000 freed tuples of a size for reuse, until a full collection: here there is one every
    few rows, whatever else this process holds, as else most of the peak would depend on when the last one was."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.collect()
    gc.set_threshold(50, 1, 1)
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def peaks_of(folder: Path) -> list[int]:
    """Of listing, selecting, reporting, keeping and finding again what was scanned of a folder."""
    notes = Notes(root=folder / "out")
    stages = (
        lambda: list_folder(folder / "source", "image"),
        lambda: select(notes, Settings(duplicates="any_caption"), []),
        lambda: report.write_report(notes),
        lambda: keep_findings(notes),
        lambda: all(map(EarlierFindings(notes).of, map(source_from_json, read_lines(notes.sources)))),
    )
    [stage() for stage in stages]  # imports
    return list(map(peak_of, stages))


LARGEST = {"list": 350, "select": 250, "report": 50, "keep": 50, "find again": 50}
"""Bytes of a row: two million fit a gigabyte, of which libraries take a quarter."""


@pytest.mark.parametrize("captions", ["table", "files"])
def test_a_row_takes_few_bytes_in_each_stage(captions, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "BYTES_IN_MEMORY", 1)
    monkeypatch.setattr(files, "CHUNK_BYTES", 50)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    folders = {rows: tmp_path / str(rows) for rows in (200, 800)}
    for rows, folder in folders.items():
        (folder / "source").mkdir(parents=True)
        for stage in ("fetch", "scan"):
            options = many_rows.Options(rows=rows, captions=captions, stage=stage, folder=folder)
            many_rows.run_stage(options, monkeypatch.setattr)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as alone:  # threads of other tests are not in a fork
        peaks = list(alone.map(peaks_of, folders.values()))
    slopes = {what: (most - least) / 600 for what, least, most in zip(LARGEST, *peaks, strict=True)}
    assert all(slopes[what] < LARGEST[what] for what in LARGEST), slopes
