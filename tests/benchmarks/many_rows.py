"""Memory that `megadit prepare images` takes for a table of many rows: the most that each stage's process held.

    python tests/benchmarks/many_rows.py [--rows 2000000] [--captions table] [--json FILE]

Table, listing, notes, selection, tar files and Energon's index are real, and so is every stage's command. Only pixels
are not: files are names alone, a clip is found in nineteen of twenty (one in twenty looks like the one before it), and
a shard holds descriptions and no latents. For the update one caption in ten is another, one file in a hundred new.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megadit.models.machine import peak_memory
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.files import write_json
from megadit.models.shared.outside import Found
from megadit.train.data.ingest import stages
from megadit.train.data.ingest.clips.encode import describe
from megadit.train.data.ingest.command import prepare_command
from megadit.train.data.ingest.plan import Clip, Finding, Settings, Skip, Source, with_key
from megadit.train.data.ingest.sources import files, sources
from megadit.train.data.writer import sample_members, write_members

STAGES = (*stages.STAGES, "update fetch", "update scan", "update select")
TABLE = "metadata.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    rows: int = setting(2_000_000, "rows of the table, each with a file", above=0)
    captions: str = setting("table", "where captions lie: table, or files (as many more, beside the pictures)")
    json: Path | None = setting(None, "file for the figures")
    stage: str | None = setting(None, "run this stage alone, in this process")
    folder: Path | None = setting(None, "folder of the table and the data set (default: a temporary one)")


def names(options: Options) -> Iterator[str]:
    more = options.rows // 100 if (options.stage or "").startswith("update") else 0
    return (f"{number % 1000:03d}/picture_{number:08d}.jpg" for number in range(options.rows + more))


def write_table(options: Options) -> None:
    with open(options.folder / "source" / TABLE, "w", encoding="utf-8") as file:
        file.write("file_name,text\n")
        for number, name in enumerate(names(options)):
            word = "changed" if (options.stage or "").startswith("update") and number % 10 == 0 else "as it was"
            file.write(f"{name},picture {number} of a table of many rows with a caption of some length {word}\n")


def stand_ins(options: Options) -> list[tuple[Any, str, Callable]]:
    """(module, name, function): names in place of files, random numbers of what they show, descriptions of samples."""

    def walk(root: Any, **_: Any) -> Iterator[Found]:
        if options.captions == "table":
            yield Found(TABLE)
        for name in names(options):
            yield Found(name)
            if options.captions == "files":
                yield Found(f"{name[:-4]}.txt")

    def scan(source: Source, settings: Settings) -> Finding:
        number = int(re.search(r"(\d+)\.jpg", source.name)[1])
        if number % 20 == 0:
            return Finding(source=source.name, skips=(Skip(source=source.name, reason="blank", detail="one colour"),))
        shown = hashlib.blake2b(str(number - (number % 20 == 2)).encode(), digest_size=24).hexdigest()
        clip = Clip(key="", source=source, height=64, width=64, fps=0.0, pts=(0,), start=0.0, fingerprint=shown)
        return Finding(source=source.name, clips=(with_key(clip, 0),))

    def encode_shard(path: Path, clips: list[Clip], *_: Any) -> None:
        write_members(path, (member for clip in clips for member in sample_members(clip.key, describe(clip), {})[:1]))

    found = [(files, "walk", walk), (stages, "scan", scan), (stages, "encode_shard", encode_shard)]
    found.append((sources, "stamp_of", lambda path: "1000 1"))
    if options.captions == "files":
        found.append((sources, "_beginning", lambda path, size=0: b"a caption of some length"))
    return found


def run_stage(options: Options, replace: Callable[[Any, str, Callable], Any] = setattr) -> None:
    """Runs a stage's command in this process."""
    word, _, stage = options.stage.rpartition(" ")
    if stage == "fetch" and options.captions == "table":
        write_table(options)
    for module, name, function in stand_ins(options):
        replace(module, name, function)
    flags = ["--stages", stage, "--sizes", "64x64", "--num_frames", "1", "--duplicates", "any_caption"]
    flags += ["--tokenizer", "pixels", "--num_workers", "0", *(["--update"] if word else [])]
    prepare_command("images", [str(options.folder / "source"), str(options.folder / "out"), *flags])


def main(argv: list[str]) -> int:
    """Prints a row of a table for each stage."""
    options = read_options(Options, argv, prog="many_rows.py", description=__doc__)
    if options.stage is not None:
        run_stage(options)
        print(peak_memory(torch.device("cpu")))
        return 0
    folder = options.folder or Path(tempfile.mkdtemp())
    (folder / "source").mkdir(parents=True, exist_ok=True)
    found = {}
    try:
        for stage in STAGES:
            flags = ["--rows", options.rows, "--captions", options.captions, "--stage", stage, "--folder", folder]
            command = [sys.executable, __file__, *map(str, flags)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[stage] = int(done.stdout.split()[-1])
            print(f"| {stage} | {found[stage] / 1e9:.3f} GB |", flush=True)
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        write_json(options.json, {"rows": options.rows, "bytes": found})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
