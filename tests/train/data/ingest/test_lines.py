"""Lists of millions in a temporary file, and what listing a table of many rows keeps in memory."""

import subprocess
import sys

import pytest

from megadit.train.data.ingest import lines
from megadit.train.data.ingest.lines import LongList, line_starts, read_lines
from megadit.train.data.ingest.plan import Source, source_from_json


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


@pytest.mark.slow
def test_rows_of_a_table_take_little_memory(tmp_path):
    """Two million rows fit a gigabyte, files that are there and that are not, whatever the length of their captions."""
    (tmp_path / "clips").mkdir()
    with open(tmp_path / "clips/metadata.csv", "w") as file:
        file.write("file_name,text\n")
        for number in range(100_000):
            file.write(f"clip_{number:08d}.jpg,{number} {'word ' * 200}\n")
            if number % 2:
                (tmp_path / f"clips/clip_{number:08d}.jpg").touch()
    program = (
        "import sys, torch\n"
        "from megadit.models.machine import peak_memory\n"
        "from megadit.train.data.ingest.sources import list_folder\n"
        "before = peak_memory(torch.device('cpu'))\n"
        "listing = list_folder(sys.argv[1], 'image')\n"
        "print(len(listing.sources), len(listing.skips), peak_memory(torch.device('cpu')) - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "clips")]
    sources, skips, grown = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert (sources, skips) == (50_000, 50_000) and grown < 350 * 100_000
