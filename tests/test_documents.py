"""README.md and docs/: every block runs as it stands there, on small data (`documents.py` says how), or says what it
needs; every command of either has the options that it is given; and the site builds."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from megadit.models.commands.convert import main as convert
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.train.config.load import resolve_config

from . import test_extend
from .bundles import write_able_bundle, write_classifier_bundle, write_clip_bundle
from .documents import (
    COMMANDS,
    PAGES,
    PYTHON,
    ROOT,
    SHOWN,
    Block,
    blocks,
    page_before,
    read_blocks,
    run_elsewhere,
    smaller,
)
from .stable_diffusion import ONE_LEVEL, make_pipeline
from .test_flags import parsers

README = ROOT / "README.md"
MODULES = {module: verb for verb, (place, _) in verbs.VERBS.items() for module in [place.partition(":")[0]]}
"""Module of a command, which torchrun starts -> its verb."""


# ------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_what_it_needs(page):
    for block in blocks(page):
        assert not block.name or test_extend.EXAMPLES.get(block.name) == block.text, (
            f"{block.place}: which test runs it?"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_and_has_its_options(page):
    for block in blocks(page):
        for command in block.commands:
            try:
                check(command)
            except UserError as error:
                pytest.fail(f"{block.place}: {command}\n{error}")


def in_sentences(text: str) -> list[str]:
    """The commands with options outside of a text's blocks."""
    prose = " ".join(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    found = re.findall(r"`(megadit [a-z][^`]*? --[^`]+)`", prose)
    of_any = [re.sub(r"^megadit prepare (?=\.\.\.|--)", "megadit prepare videos ", command) for command in found]
    return [re.sub(r"--recipe NAME\b", "--recipe digits", command) for command in of_any]


def test_every_command_in_a_sentence_has_its_options():
    folders = ("docs", "models", "infer", "train", "export", "serve")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    for page in pages:
        for command in in_sentences(page.read_text(encoding="utf-8")):
            try:
                check(f"{command} ...")
            except UserError as error:
                pytest.fail(f"{page.relative_to(ROOT)}: {command}\n{error}")
    assert in_sentences("`megadit train\n--mocks`\n```\nmegadit info --all\n```\n") == ["megadit train --mocks"]


def test_every_verb_is_listed():
    commands = [shlex.split(command) for block in blocks(COMMANDS) for command in block.commands]
    listed = {listed_verb(words) for words in commands}
    assert not set(verbs.VERBS) - listed, "docs/commands.md says that it has every verb"


def verb_of(words: list[str]) -> str:
    """Of a command, the longest that it begins with; "" for none."""
    return max((verb for verb in parsers() if words[1 : 1 + len(verb.split())] == verb.split()), key=len, default="")


def listed_verb(words: list[str]) -> str:
    """As `verbs.VERBS` has it: `prepare` without its source."""
    return "prepare" if words[1] == "prepare" else verb_of(words)


def check(command: str) -> None:
    """Raises UserError for a command of ours that does not exist, has not such options, or trains with unknown keys."""
    words = shlex.split(command)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "torchrun" and "-m" in words:
        place = words.index("-m") + 1
        module = words[place].removesuffix(".__main__")
        found = [verb for known, verb in MODULES.items() if known.removesuffix(".__main__") == module]
        if not found:
            raise UserError(f"{module} is no module of a command")
        words = ["megadit", *found[0].split(), *words[place + 1 :]]
    if words[0] != "megadit" or words[1:2] == ["--version"]:
        return
    verb = verb_of(words)
    if not verb:
        raise UserError(f"there is no {command!r}")
    arguments, parser = words[1 + len(verb.split()) :], parsers()[verb]
    if "..." in arguments:
        known = {name.replace("-", "_") for name in parser._option_string_actions}
        unknown = [word for word in arguments if word.startswith("--") and word.replace("-", "_") not in known]
        if unknown:
            raise UserError(f"{verb} has no {unknown}")
    elif "--help" not in arguments:
        parser.parse_args(arguments)
    if verb == "train" and {"--recipe", "--factory"} & {*arguments} and "--config-file" not in arguments:
        given = vars(parser.parse_args([word for word in arguments if word != "..."]))
        resolve_config(given["recipe"], overrides=list(given.get("overrides", ())))


STEPS_OF_IMAGES = {
    "convert": {"convert"},
    "train": {"prepare", "train", "bundle"},
    "infer": {"generate", "similarity", "classify"},
    "evaluate": {"evaluate", "similarity", "classify"},
    "export": {"export"},
    "deploy": {"serve build-repository"},
}
"""Column of README's table of images -> the verbs that its commands may have."""
WITHOUT_A_COMMAND = {("Stable Diffusion", "train"), ("DiT of images", "convert")}
"""Cells that say why there is none."""


def test_every_step_of_each_row_of_images_is_run():
    """And what was converted goes back, on the page that goes on from the table."""
    said = README.read_text(encoding="utf-8").partition("\n## Images\n")[2].partition("\n## ")[0]
    head, _, *rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows] == ["Stable Diffusion", "DiT of images", "CLIP", "ViT"]
    assert [name.strip() for name in head[1:]] == list(STEPS_OF_IMAGES)
    is_run = {command for block in to_run(README) for command in block.commands}
    for name, *cells in rows:
        for (step, verbs_of_step), cell in zip(STEPS_OF_IMAGES.items(), cells, strict=True):
            words = [shlex.split(command) for command in re.findall(r"`(megadit [^`]+)`", cell)]
            assert bool(words) != ((name.strip(), step) in WITHOUT_A_COMMAND), f"{name}, {step}: {cell}"
            assert {listed_verb(each) for each in words} <= verbs_of_step
            assert {shlex.join(each) for each in words} <= is_run
    images = ROOT / "docs" / "images.md"
    assert page_before(images) == README
    back = [command for block in to_run(images) for command in block.commands if " --to " in command]
    assert sorted(command.rpartition(" ")[2] for command in back) == ["diffusers", "transformers", "transformers"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nmake demo\n```\n", "'make demo' is not run here"),
        ("```yaml\na: 1\n```\n", "a block of yaml is not run"),
        ("<!-- needs: luck -->\n```\nmegadit info a\n```\n", r"nobody knows what \['luck'\] needs"),
        ("```text\nmegadit info a\n```\n", "a command in a block of what is printed"),
        ("```\nmegadit info a\n", "does not end"),
        ("<!-- run -->\n| a | b |\n", "has no command"),
    ],
)
def test_a_block_that_nobody_runs_is_noticed(text, message):
    with pytest.raises(ValueError, match=message):
        read_blocks(text, "a page")
    assert read_blocks("<!-- needs: gpu -->\n```\nmake gpu-check\n```\n", "a page")[0].needs == ("gpu",)
    table = (
        "text\n<!-- run -->\n| a | `megadit info a`, then `x` |\n| b | `megadit info b` |\n\n```\nmegadit info c\n```\n"
    )
    assert [block.commands for block in read_blocks(table, "a page")] == [
        ["megadit info a", "megadit info b"],
        ["megadit info c"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "megadit genarate --prompt a",
        "megadit generate --checkpoint_path a --promt b",
        "megadit generate ... --promt b",
        "megadit train --recipe digits train.iterations=3",
        "torchrun --nproc-per-node 8 -m megadit.train --recipe digits_large",
        "torchrun -m megadit.trains --recipe digits",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command):
    with pytest.raises(UserError):
        check(command)


# ------------------------------------------------------------------------------------------------- what is run


HERE = ("classify", "convert", "distill", "evaluate", "export", "generate", "reward", "similarity")
"""Verbs that run in this process, as what they import is of no use to ranks; trainings that they start are forked."""


@pytest.fixture(scope="module")
def run(run_ranks, forked):
    """run(block): in this folder, all that it says; but for commands that `run_elsewhere` names."""

    def run_command(command: str) -> None:
        _, *words = shlex.split(command)
        if words[0] not in HERE or "openvino" in words:  # after which no process may fork (test_openvino.py)
            run_ranks(1, "-m", "megadit.models.shared.cli.verbs", *words)
            return
        told = io.StringIO()
        with forked(), redirect_stdout(told), redirect_stderr(told):
            code = verbs.main(words)
        assert code == 0, told.getvalue()

    def run_block(block: Block, elsewhere: Collection[str] = ()) -> None:
        for command in (smaller(command) for command in block.commands if command not in elsewhere):
            try:
                run_command(command)
            except AssertionError as error:
                pytest.fail(f"{block.place}: {command}\n{error}")
        if block.language in PYTHON:
            Path("block.py").write_text(block.text)
            try:
                run_ranks(1, "block.py")
            except AssertionError as error:
                pytest.fail(f"{block.place}\n{error}")

    return run_block


@pytest.fixture(scope="module")
def workspace(run, tmp_path_factory, write_clip) -> Path:
    """What pages begin with: clips of one's own, and what the demos leave in runs/, after two steps each."""
    from megadit.infer.evaluate.extractors.digits import DigitReader
    from megadit.infer.evaluate.extractors.files import KIND
    from megadit.train.demos.digits.score import SCORER_DIR, write_scorer

    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_media(folder)
        for text in (
            "megadit prepare digits runs/demo/dataset --num_clips 60",
            "megadit train --recipe digits data.path=runs/demo/dataset train.output_dir=runs/demo/train",
            "megadit bundle runs/demo/train runs/demo/bundle",
        ):
            run(Block("the shelf", 0, "", text))
        import torch
        from safetensors.torch import save_file

        torch.manual_seed(0)
        save_file(DigitReader().state_dict(), "runs/demo/classifier.safetensors", metadata={KIND: "digits"})
        write_scorer(Path("runs/demo", SCORER_DIR), Path("runs/demo/classifier.safetensors"))
        write_able_bundle("runs/demo/bundle", "runs/demo-conditioning/bundle")
        make_pipeline(folder / "stable-diffusion-v1-5", "1.x", write_clip, **ONE_LEVEL)
        for name, write in (
            ("clip-vit-base-patch32", write_clip_bundle),
            ("vit-base-patch16-224", write_classifier_bundle),
        ):
            write(folder / "judges" / name)
            convert([str(folder / "judges" / name), name, "--to", "transformers"])
    return folder


def write_media(folder: Path) -> None:
    """Twelve clips of a window that moves over a photograph, three of another, captioned; pictures, a mask, a clip."""
    import numpy as np
    from sklearn.datasets import load_sample_image

    from megadit.infer.media.video_io import write_video

    def clip(name: str, number: int, num_frames: int = 24, size: int = 72) -> np.ndarray:
        picture = load_sample_image(name)
        return np.stack(
            [picture[20 * number + 2 * t :, 40 * number + 3 * t :][:size, :size] for t in range(num_frames)]
        )

    for number in range(12):
        path = folder / "clips" / f"{number}.mp4"
        path.parent.mkdir(exist_ok=True)
        write_video(path, clip("china.jpg", number), 8)
        path.with_suffix(".txt").write_text(f"a roof seen from {number} steps away")
    for number in range(3):
        path = folder / "my_clips" / f"{number}.mp4"
        path.parent.mkdir(exist_ok=True)
        write_video(path, clip("flower.jpg", number), 8)
        path.with_suffix(".txt").write_text("a red zog moving left")
    for digit, number in (("three", 1), ("seven", 2)):
        path = folder / "pictures" / digit / "0.png"
        path.parent.mkdir(parents=True)
        write_video(path, clip("flower.jpg", number, 1, 32))
        path.with_suffix(".txt").write_text(f"a red {digit}")
    write_video(folder / "first.png", clip("flower.jpg", 1, 1, 32))
    write_video(folder / "last.png", clip("flower.jpg", 2, 1, 32))
    write_video(folder / "clip.mp4", clip("flower.jpg", 3, 9, 32), 8)
    write_video(
        folder / "mask.png",
        np.repeat(np.eye(2, dtype=np.uint8), 16, 0).repeat(16, 1)[None, ..., None].repeat(3, -1) * 255,
    )
    (folder / "prompts.txt").write_text(
        "".join(f"a red {digit} moving left\n" for digit in ("one", "two", "three") * 6)
    )


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if not block.needs and not block.name and block.language not in SHOWN]


@pytest.fixture(scope="module")
def left_by(workspace, run, tmp_path_factory):
    """left_by(page): the folder in which all that it says has run."""

    @cache
    def folder(page: Path) -> Path:
        before, here = page_before(page), tmp_path_factory.mktemp("page") / "here"
        shutil.copytree(workspace if before is None else folder(before), here)
        elsewhere = run_elsewhere(page)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here)
            for block in to_run(page):
                if block.file:
                    Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                    Path(block.file).write_text(block.text)
                else:
                    run(block, elsewhere)
        return here

    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs(page, left_by):
    if not to_run(page):
        pytest.skip("nothing on it is run here")
    left_by(page)


@pytest.mark.slow
def test_a_block_that_fails_is_noticed(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language, text in (
        ("", "megadit info nowhere"),
        ("", "megadit convert nowhere out"),
        ("python", "from megadit import TextToVido"),
    ):
        with pytest.raises(pytest.fail.Exception, match=r"a page:3(.|\n)*(nowhere|TextToVido)"):
            run(Block("a page", 3, language, text))


# ------------------------------------------------------------------------------------------------- the site


@pytest.mark.slow
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed (megadit[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "site" / "keys" / "index.html").read_text()
    assert "optimizer.lr_warmup_iters" in keys and "Steps of linear increase" in keys
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "from_pretrained" in api and "classifier-free" in api


def missing_tests(text: str) -> list[str]:
    """The tests that `pytest FILE::TEST` names in a text and that are not there, by name and, if it has one, id."""
    named = re.findall(r"pytest (?:-\S+ )*\"?(tests/[\w/]+\.py)(?:::(\w+))?", text)
    codes = {file: (ROOT / file).read_text() if (ROOT / file).is_file() else "" for file, _ in named}
    return [
        f"{file}::{test}" for file, test in named if not codes[file] or (test and f"def {test}(" not in codes[file])
    ]


def test_every_named_test_exists():
    """A row of docs/evidence.md is a claim with the command that shows it."""
    gone = {page.name: missing_tests(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not any(gone.values()), gone
    rows = [line for line in (ROOT / "docs/evidence.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.startswith(("| claim |", "| fault |"))]
    assert len(claims) > 50 and all("`pytest " in row for row in claims)
    assert missing_tests("`pytest tests/test_documents.py::test_nothing`") == ["tests/test_documents.py::test_nothing"]
    assert missing_tests("pytest -q tests/test_nothing.py") == ["tests/test_nothing.py::"]


def test_every_named_file_exists():
    """Of tables and sentences in documents, and of docstrings; those of others only where their replacement is."""
    folders = ("models", "infer", "train", "export", "serve", "docs", "tests")
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    known = {path.as_posix() for path in files} | {"/model.py", "/scorer.py"}
    gone = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        if file.suffix in (".md", ".py")
        and not file.is_relative_to(ROOT / "tests")
        and not file.name.startswith("coming-from")
        for name in re.findall(r"`(?:DIR/|runs/demo/scorer/)?([\w/]+\.py)`", file.read_text(encoding="utf-8"))
        if not any(path.endswith("/" + name) for path in known)
    ]
    assert not gone
