"""Sources = used + left out + not used, whatever lies in a folder; and no caption is another file's."""

import io
import json
import os
import tarfile
import tempfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.sources.webdataset import list_webdataset
from megadit.train.data.ingest.stages import SHARED_STAGES, STAGES
from megadit.train.data.on_the_fly import FrozenEncoders
from megadit.train.data.packs.samples import OCCURRENCE, decode
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.description import read_description

OPTIONS = ["--sizes", "16x16", "--num_frames", "1", "--num_workers", "0", "--tokenizer", "pixels", "--val_share", "0"]


@cache
def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


PICTURE = picture(0)
CONTENTS = {
    "picture": lambda name: picture(zlib.crc32(name.encode()) % 4),
    "text": lambda name: f"caption of {name.partition('.')[0]}".encode(),
    "marked": lambda name: f"\ufeffcaption of {name.partition('.')[0]}".encode(),
    "wide": lambda name: f"caption of {name.partition('.')[0]}".encode("utf-16"),
    "json": lambda name: json.dumps({"caption": [f"caption of {name.partition('.')[0]}"], "name": "wrong"}).encode(),
    "other json": lambda name: b'{"width": 8}',
    "damaged": lambda name: b"\xff\xfd{",
    "empty": lambda name: b"",
}
STEMS = ("a", "b", "A", "a b", "é", "x.y", "-c", ".hidden", "metadata", "v1.0")
SUFFIXES = (".png", ".jpg", ".txt", ".json", ".caption", ".TXT", ".mp4", ".mts", ".csv", ".npy", "", ".md")
FOLDERS = ("", "train/", "test/", "videos/", "labels/", "@eaDir/", "deep/er/")
FILES = st.dictionaries(
    st.tuples(st.sampled_from(FOLDERS), st.sampled_from(STEMS), st.sampled_from(SUFFIXES)).map("".join),
    st.sampled_from(sorted(CONTENTS)),
    max_size=12,
)
LINKS = st.dictionaries(st.sampled_from(("l.png", "a.txt", "dir", "m.png")), st.sampled_from(("in", "out", "gone")))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES, links=LINKS, kind=st.sampled_from(("image", "video")), listed=st.lists(st.sampled_from(STEMS)))
def test_every_file_of_a_folder_is_accounted_for(files, links, kind, listed):
    with tempfile.TemporaryDirectory() as outer:
        root = _filled(Path(outer), {"train/zz.png": "picture", "zz.mp4": "picture"} | files, links, listed)
        try:
            listing = list_folder(root, kind)
        except UserError:
            return
        _check_account(root, listing)


def _filled(outer: Path, files: dict[str, str], links: dict[str, str], listed: list[str]) -> Path:
    """A folder of these files and links, some of which a table names."""
    root = outer / "clips"
    root.mkdir()
    (outer / "secret.txt").write_text("secret")
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(CONTENTS[content](name.rpartition("/")[2]))
    for name, target in links.items():
        if not (root / name).exists():
            (root / name).symlink_to({"in": root, "out": outer / "secret.txt", "gone": "nowhere"}[target])
    if listed:
        rows = "".join(f"{stem}.png,caption of {stem.partition('.')[0]}\n" for stem in listed)
        (root / "metadata.csv").write_text("file_name,text\n" + rows)
    return root


def _check_account(root: Path, listing) -> None:
    on_disk = {
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root)
        for name in [*names, *(each for each in folders if os.path.islink(os.path.join(folder, each)))]
    }
    used = [source.name for source in listing.sources]
    left_out = {skip.source for skip in listing.skips} & on_disk
    not_used = [skip.source for skip in listing.not_used]
    assert len({*used}) == len(used) and len({*not_used}) == len(not_used)
    assert not {*used} & left_out and not {*used} & {*not_used} and not left_out & {*not_used}
    rest = on_disk - {*used} - left_out - {*not_used}
    assert all(Path(name).suffix.lower() in (".txt", ".json", ".caption", ".csv") for name in rest)  # that were read
    for source in listing.sources:
        stem = source.name.rpartition("/")[2].partition(".")[0]
        assert all(text == f"caption of {stem}" for text in source.captions), (source.name, source.captions)


MEMBERS = st.lists(
    st.tuples(
        st.tuples(
            st.sampled_from(("a", "b", "d/a", "v1.0", "v1.1", ".h")),
            st.sampled_from((".png", ".txt", ".json", ".npy", ".picture")),
        ).map("".join),
        st.sampled_from(("text", "json", "damaged", "other json")),
    ),
    max_size=10,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(members=MEMBERS)
def test_every_member_of_a_tar_file_is_accounted_for(members):
    with tempfile.TemporaryDirectory() as root:
        with tarfile.open(Path(root) / "s.tar", "w") as tar:
            for name, content in members:
                is_picture = name.endswith((".png", ".picture"))
                body = PICTURE if is_picture else CONTENTS["text" if name.endswith(".txt") else content](name)
                body = body.replace(b"caption of d/", b"caption of ")
                info = tarfile.TarInfo(name)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
        try:
            listing = list_webdataset(root)
        except UserError:
            return
        pictures = [name for name, _ in members if name.endswith((".png", ".picture"))]
        accounted = [skip.source.removeprefix("s.tar/") for skip in (*listing.skips, *listing.not_used)]
        left = [name for name in accounted if name in pictures]
        assert len(listing.sources) + len(left) == len(pictures)
        assert sum(name.endswith(".npy") for name, _ in members) == sum(name.endswith(".npy") for name in accounted)
        for source in listing.sources:
            stem = source.name.rpartition("/")[2].partition("#")[0].partition(".")[0]
            assert all(text == f"caption of {stem}" for text in source.captions)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=FILES,
    links=LINKS,
    listed=st.lists(st.sampled_from(STEMS)),
    kept=st.sampled_from((["--duplicates", "any_caption"], [])),
    ends=st.lists(st.integers(1, 12), max_size=4),
    parts=st.integers(1, 4),
    ranks=st.integers(2, 4),
)
def test_whoever_prepares_a_folder_and_however_often_it_ends_the_bytes_are_the_same(
    start_ranks, files, links, listed, kept, ends, parts, ranks
):
    """Two runs; one that ends at some of the files that it writes, and goes on; jobs, and ranks of torchrun, that share
    the stages."""
    with tempfile.TemporaryDirectory() as outer:
        root = _filled(Path(outer), {"zz.png": "picture", "yy.jpg": "picture"} | files, links, listed)
        command = ["images", str(root), "OUT", *OPTIONS, *kept]
        whole, again, ended, by_ranks, shared = ([*command[:2], f"{outer}/{n}", *command[3:]] for n in range(5))
        code = prepare.main(whole)
        assert prepare.main(again) == code
        for count in ends:
            _prepare_until(ended, count)
        assert prepare.main(ended) == code
        processes = start_ranks(ranks, "-m", "megadit.models.shared.cli.verbs", "prepare", *by_ranks)
        said = [process.communicate()[0] for process in processes]
        assert {process.returncode for process in processes} == {code}, said
        for stage in STAGES if code == 0 else ():
            for part in range(parts if stage in SHARED_STAGES else 1):
                words = ["--shard", f"{part}/{parts}"] if stage in SHARED_STAGES else []
                assert prepare.main([*shared, "--stages", stage, *words]) == 0
        found = [bytes_under(Path(outer, str(number))) for number in range(5 if code == 0 else 4)]
        assert all(each == found[0] for each in found)
        left = {name.partition("/")[0] for name in found[0]}
        assert not code or left <= {"prepare", "report.json"}, "the account alone"


def _prepare_until(command: list[str], count: int) -> None:
    """As one whose process ends where it renames its so-many-th file."""
    replace, left = os.replace, iter(range(count))

    def replace_or_end(*names: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(*names)

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", replace_or_end)
        prepare.main(command)


def bytes_under(root: Path) -> dict[str, bytes]:
    """Names -> contents, but for Energon's id, which is another each time, and what is drawn of the report."""
    paths = (path for path in root.rglob("*") if path.is_file() and path.name not in ("index.uuid", "report.png"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


# --- through a preparation ------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Pictures that are used, left out and not used."""
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(4):
        (root / f"{number}.png").write_bytes(picture(number))
    (root / "0.json").write_text('{"caption": ["a cat", "a red cat", "a pet"]}')
    (root / "1.txt").write_text("word " * 10_000)
    (root / "2.txt").write_bytes("café".encode("cp1252"))
    Image.new("RGB", (32, 32), "red").save(root / "plain.png")
    (root / "copy.png").write_bytes(picture(3))
    (root / "notes.md").write_text("notes")
    (root / "clip.mts").write_bytes(b"")
    (tmp_path / "far.png").write_bytes(picture(9))
    (root / "leads.png").symlink_to(tmp_path / "far.png")
    return root


def test_the_sums_of_a_report_add_up(mixed, histograms, tmp_path, capsys):
    assert prepare.main(["images", str(mixed), str(tmp_path / "out"), *OPTIONS, "--max_caption_words", "300"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["sources"], report["used"], report["left_out"], report["not_used"]) == (9, 3, 3, 3)
    assert report["skips"] == {"blank": 1, "near-duplicate": 1, "unreadable caption": 1}
    assert report["not_used_reasons"] == {
        ".md": 1, "link that leads out of the folder (--follow_links)": 1, "video (megadit prepare videos)": 1,
    }  # fmt: skip
    assert report["remarks"] == {"caption cut to 300 words (--max_caption_words)": 1}
    said = capsys.readouterr().out
    assert "9 sources -> 3 train" in said and "3 used, 3 left out, 3 not used" in said and "not used: 1 x .md" in said
    named = [json.loads(line)["source"] for line in (tmp_path / "out/prepare/not_used.jsonl").read_text().splitlines()]
    assert sorted(named) == ["clip.mts", "leads.png", "notes.md"]
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize("store", ["latents", "raw"])
def test_each_pass_draws_one_of_several_captions(mixed, tmp_path, store):
    out = tmp_path / "out"
    assert prepare.main(["images", str(mixed), str(out), *OPTIONS, "--store", store]) == 0
    with tarfile.open(out / "train-000000.tar") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    keys = [name[:-5] for name, text in contents.items() if name.endswith(".json") and b"a red cat" in text]
    crude = {name.rpartition(".")[2]: content for name, content in contents.items() if name.startswith(keys[0])}
    captions = read_description(crude["json"]).captions
    assert len(keys) == 1 and captions == ("a cat", "a red cat", "a pet")
    read = decode if store == "latents" else FrozenEncoders(out / "tokenizer", out / "text_encoder")
    texts = [read({**crude, "__key__": keys[0], OCCURRENCE: number}).text_LE for number in range(16)]
    lengths = [len(text) for text in texts]
    assert {*lengths} == {2, 3} and lengths.count(2) > lengths.count(3) > 0
    again = [read({**crude, "__key__": keys[0], OCCURRENCE: number}).text_LE for number in range(16)]
    assert all(map(np.array_equal, texts, again))


def test_how_captions_are_read(mixed, tmp_path):
    (mixed / "metadata.csv").write_bytes("file_name,text,short\nleads.png,un café,café\n".encode("cp1252"))
    options = ["--caption_columns", "text,short", "--caption_encoding", "cp1252", "--follow_links"]
    assert prepare.main(["images", str(mixed), str(tmp_path / "out"), *OPTIONS, *options]) == 0
    lines = (tmp_path / "out/prepare/sources.jsonl").read_text().splitlines()
    assert [(each["caption"], each["more_captions"]) for each in map(json.loads, lines)] == [("un café", ["café"])]


def test_splits_stay_apart(tmp_path):
    for number, split in enumerate(("train", "validation")):
        (tmp_path / "pictures" / split).mkdir(parents=True)
        (tmp_path / "pictures" / split / "a.png").write_bytes(picture(number))
    command = ["images", str(tmp_path / "pictures"), str(tmp_path / "out"), *OPTIONS, "--split", "val"]
    assert prepare.main(command) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["used"] == 1 and report["not_used_reasons"] == {"of the split train (--split)": 1}
