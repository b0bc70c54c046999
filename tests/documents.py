"""The blocks of README.md and of the pages in docs/, and what is done to run them on small data.

A block of shell or Python runs as it stands, page by page, in a folder that holds what `shelf` of test_documents.py
puts there; but for one under `<!-- needs: NAME -->`, NAME of `NEEDS`. `<!-- file: NAME -->` above a block of another
language says that it is a file, which the blocks below find. Blocks of `text` are what a command prints. A table
under `<!-- run -->` is a block of the commands in its cells, row after row. `<!-- after: PAGE -->` says that the folder
is the one that all blocks of another page have left. docs/commands.md lists commands of all pages: what another page
runs, word for word, is not run again there.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from .train.conftest import FEW_STEPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = ROOT / "docs" / "commands.md"
NEEDS = {
    "gpu": "a CUDA device",
    "cluster": "several nodes, or Slurm",
    "network": "something to download, or a store to reach",
    "service": "a server that stays up, or a browser; tests/serve has both",
    "minutes": "more time than a test has",
    "own files": "files that only their owner has",
}
"""What a block may need -> what that is."""
SHELL, PYTHON, SHOWN = ("", "sh", "bash"), ("python",), ("text",)
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>needs|file): (?P<about>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w*)(?: (?P<name>\w+))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.MULTILINE)
_TABLE = re.compile(r"^<!-- run -->\n(?P<text>(?:\|.*\n)+)", re.MULTILINE)
_COMMAND = re.compile(r"`(megadit [^`]+)`")

FEW = " ".join((*FEW_STEPS, "train.num_threads=1"))
SMALLER = (
    (r"--nproc \d+", "", "one rank"),
    (r"--count \d+", "--count 8", "few videos"),
    (r"--total_frames \d+", "--total_frames 17", "short ones"),
    (r"--num_images \d+", "--num_images 200", "a small data set"),
    (r"(megadit prepare digit_\w+ )(?!.*--num_images)", r"\1--num_images 200 ", "a small data set"),
    (r"--num_clips \d+", "--num_clips 60 --num_images 30 --num_val 12", "a small data set"),
    (
        r"(megadit prepare digits )(?!.*--num_clips)",
        r"\1--num_clips 60 --num_images 30 --num_val 12 ",
        "a small data set",
    ),
    (
        r"^(megadit train (?!.*--(?:dry-run|plan|print-config)).*)$",
        rf"\1 model.num_layers=1 train.train_iters=2 checkpoint.save_interval=2 validation.interval=0 {FEW}",
        "two steps of a single block, and no videos between, on a core",
    ),
    (r"--sizes 224x224", "--sizes 32x32", "pictures of the size that the shelf has"),
    (r"--num_steps 35", "--num_steps 4", "few steps"),
    (r"^(megadit tune-sampler .*)$", r"\1 --count 8 --function_evaluations 4", "few videos, of few candidates"),
    (
        r"^(megadit reward .*)$",
        r"\1 --rounds 1 --prompts_per_round 2 --group_size 2 --train_steps 2 --count 8 --spread 0.001 1000 "
        f"--moved 1000 {FEW}",
        "one round of four videos, whatever they look like",
    ),
    (r"^(megadit prepare rollouts .*)$", r"\1 --group_size 2", "few videos"),
    (
        r"^(megadit distill .*)$",
        r"\1 --count 8 --spread 0.001 1000 train.train_iters=2 checkpoint.save_interval=2 validation.interval=0 "
        f"{FEW}",
        "two steps, after which a student may be of any kind, and a small check",
    ),
    (r"^megadit benchmark train --recipe digits\b", "megadit benchmark train --recipe digits_tiny --steps 1", "a step"),
    (r"^(megadit benchmark growth .*)$", r"\1 --along tokens --points 2", "two points of one curve"),
    (r"^(megadit benchmark generate .*)$", r"\1 --rounds 1", "a video"),
    (r"(megadit prepare (?:videos|images|webdataset) )", r"\1--num_workers 0 ", "no processes of its own"),
)
"""(what a page says, what runs here instead, why): the only changes."""


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    """Relative to the repository."""
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    file: str = ""
    """The file that it is."""
    name: str = ""
    """Of an example that another test runs (docs/extend.md)."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of shell: its lines, those that go on in the next joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language in SHELL else []
        return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def run_elsewhere(page: Path) -> set[str]:
    """The commands of a page that others run: of docs/commands.md alone."""
    others = [block for other in PAGES if other != COMMANDS for block in blocks(other) if not block.needs]
    return {command for block in others for command in block.commands} if page == COMMANDS else set()


def blocks(page: Path) -> list[Block]:
    """Those of a page, in order.

    Raises:
        ValueError: for a mark that means nothing, and for a block that is neither run nor marked.
    """
    name = page.relative_to(ROOT).as_posix()
    return read_blocks(page.read_text(encoding="utf-8"), name)


def page_before(page: Path) -> Path | None:
    """The page that this one goes on from."""
    found = _AFTER.search(page.read_text(encoding="utf-8"))
    return found and ROOT / found[1]


def read_blocks(text: str, page: str) -> list[Block]:
    """As `blocks`, of the text of a page."""
    found = []
    for match in _BLOCK.finditer(text):
        mark, about = match["mark"], match["about"] or ""
        needs = tuple(part.strip() for part in about.split(",")) if mark == "needs" else ()
        line = text.count("\n", 0, match.start("text"))
        file = about if mark == "file" else ""
        block = Block(page, line, match["language"], match["text"], needs, file, match["name"] or "")
        _check(block)
        found.append(block)
    if text.count("\n```") + text.startswith("```") != 2 * len(found):
        raise ValueError(f"{page}: a block does not end, or its first line is of another form")
    found += [_of_table(match, text, page) for match in _TABLE.finditer(text)]
    return sorted(found, key=lambda block: block.line)


def _of_table(match: re.Match, text: str, page: str) -> Block:
    commands = _COMMAND.findall(match["text"])
    if not commands:
        raise ValueError(f"{page}: a table that is run has no command")
    return Block(page, text.count("\n", 0, match.start("text")), "", "\n".join(commands) + "\n")


def _check(block: Block) -> None:
    unknown = [need for need in block.needs if need not in NEEDS]
    if unknown:
        raise ValueError(f"{block.place}: nobody knows what {unknown} needs; NEEDS has {', '.join(NEEDS)}")
    if block.file or block.needs or block.name:
        return
    if block.language not in (*SHELL, *PYTHON, *SHOWN):
        raise ValueError(
            f"{block.place}: a block of {block.language} is not run: say which file it is, or what it needs"
        )
    others = [command for command in block.commands if not command.startswith("megadit ")]
    if others:
        raise ValueError(f"{block.place}: {others[0]!r} is not run here: say above the block what it needs")
    if block.language in SHOWN and "megadit " in block.text.partition("\n")[0]:
        raise ValueError(f"{block.place}: a command in a block of what is printed")


def smaller(command: str) -> str:
    """The command that is run in place of one in a page."""
    for said, run, _ in SMALLER:
        command = re.sub(said, run, command, count=1)
    return command
