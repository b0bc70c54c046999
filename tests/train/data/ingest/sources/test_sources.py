"""Other sources: WebDataset shards, Parquet tables, what NeMo and DFM wrote; and what none of them may do."""

import io
import json
import os
import pickle
import struct
import tarfile
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data import on_the_fly
from megadit.train.data.ingest.clips.scan import scan
from megadit.train.data.ingest.command import FolderOptions, PrepareOptions, _fitted, _settings
from megadit.train.data.ingest.plan import Notes, Settings, Source
from megadit.train.data.ingest.sources.importers import UnreadableTensorError, read_pickle, read_pth
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.sources.webdataset import list_webdataset
from megadit.train.data.packs.samples import OCCURRENCE
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo, iter_captions, iter_descriptions
from megadit.train.dataset.description import UnreadableSampleError

OPTIONS = ["--sizes", "32x32", "--num_frames", "1", "--num_workers", "0", "--tokenizer", "pixels", "--debug"]


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(content))


def pictures(make_pan, count: int) -> list[bytes]:
    found = []
    for number in range(count):
        buffer = io.BytesIO()
        start = (40 + 11 * number, 13 * number)
        frame = make_pan(("china.jpg", "flower.jpg")[number % 2], 1, 96, 128, start=start, flip=number % 4)[0]
        Image.fromarray(frame).save(buffer, format="jpeg", quality=95)
        found.append(buffer.getvalue())
    return found


class Trap:
    """A pickle that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


# --- WebDataset ---------------------------------------------------------------------------------------------------


def test_shards_are_read_where_they_lie(tmp_path, make_pan):
    source = tmp_path / "shards"
    source.mkdir()
    images = pictures(make_pan, 16)
    for shard in range(2):
        with tarfile.open(source / f"{shard}.tar", "w") as tar:
            for number in range(8):
                add(tar, f"{number:03d}.jpg", images[8 * shard + number])
                add(tar, f"{number:03d}.json", json.dumps({"caption": f"picture {shard} {number}"}).encode())
    assert prepare.main(["webdataset", str(source), str(tmp_path / "out"), *OPTIONS]) == 0
    assert sum(DatasetInfo.read(tmp_path / "out").num_samples.values()) == 16
    captions = {*iter_captions(tmp_path / "out", "train"), *iter_captions(tmp_path / "out", "val")}
    assert captions == {f"picture {shard} {number}" for shard in range(2) for number in range(8)}


def test_hostile_archives_are_counted_and_harm_nobody(tmp_path, make_pan):
    image = pictures(make_pan, 1)[0]
    source = tmp_path / "shards"
    source.mkdir()
    with tarfile.open(source / "a.tar", "w") as tar:
        add(tar, "../../escaped.jpg", image)
        add(tar, "/etc/escaped.jpg", image)
        add(tar, "link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "hard.jpg", type=tarfile.LNKTYPE, linkname="/etc/passwd")
        add(tar, "pipe.jpg", type=tarfile.FIFOTYPE)
        add(tar, "good.jpg", image)
    (source / "empty.tar").write_bytes(b"")
    with tarfile.open(source / "none.tar", "w"):
        pass
    whole = (source / "a.tar").read_bytes()
    (source / "short.tar").write_bytes(whole[: 512 + 100])  # a header that promises more than there is
    with open(source / "huge.tar", "wb") as file:
        member = tarfile.TarInfo("huge.jpg")
        member.size = 10 << 30
        file.write(member.tobuf(format=tarfile.GNU_FORMAT))
    (source / "words.tar").write_bytes(b"no tar file" * 1000)
    before = {path for path in tmp_path.rglob("*")}
    listing = list_webdataset(source)
    assert {source.name for source in listing.sources} == {"a.tar/../../escaped", "a.tar//etc/escaped", "a.tar/good"}
    reasons = {skip.source: skip.reason for skip in listing.skips}
    assert reasons == {
        "a.tar/link.jpg": "not a file",
        "a.tar/hard.jpg": "not a file",
        "a.tar/pipe.jpg": "not a file",
        "empty.tar": "broken tar file",
        "words.tar": "broken tar file",
        "short.tar/../../escaped.jpg": "cut short",
        "huge.tar/huge.jpg": "cut short",
    }
    assert all(scan(source, Settings(sizes=((64, 64),))).clips for source in listing.sources)
    assert {path for path in tmp_path.rglob("*")} == before


def picture_bomb() -> bytes:
    """A small file whose header announces 10^10 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(10_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_picture_bomb_is_not_decoded(tmp_path):
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(picture_bomb())
    finding = scan(Source(name="bomb", kind="image", path=str(bomb)), Settings(sizes=((64, 64),)))
    assert not finding.clips and finding.skips[0].reason in ("too large", "broken")
    assert "100000" in finding.skips[0].detail or "bomb" in finding.skips[0].detail


def test_media_that_would_fill_the_memory_are_unreadable_samples(tmp_path, make_clip, make_pan, monkeypatch):
    """Pixels encoded while they are read: a picture bomb, and a clip with more frames than there is room for."""
    clip = make_clip(tmp_path / "clip.mp4", make_pan("china.jpg", 9, 96, 128)).read_bytes()
    assert on_the_fly.read_mp4(clip).shape == (9, 96, 128, 3)
    monkeypatch.setattr(on_the_fly, "MAX_CLIP_PIXELS", 8 * 96 * 128)
    encoders = on_the_fly.FrozenEncoders(tmp_path, tmp_path)
    for member, content, message in (
        ("png", picture_bomb(), "10000000000 pixels"),
        ("mp4", clip, "more than 98304 pixels"),
    ):
        crude = {"__key__": "bomb", OCCURRENCE: 0, "json": b'{"caption": "", "fps": 8}', member: content}
        with pytest.raises(UnreadableSampleError, match=message):
            encoders(crude)


# --- Parquet ------------------------------------------------------------------------------------------------------


class Pictures(BaseHTTPRequestHandler):
    content: dict[str, bytes] = {}

    def do_GET(self) -> None:
        found = self.content.get(self.path)
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(make_pan):
    server = HTTPServer(("127.0.0.1", 0), Pictures)
    Pictures.content = {f"/{number}.jpg": content for number, content in enumerate(pictures(make_pan, 12))}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def test_the_butterflies_are_fetched_by_their_addresses(tmp_path, web):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = tmp_path / "butterflies" / "data"
    source.mkdir(parents=True)
    urls = [*(f"{web}/{number}.jpg" for number in range(12)), f"{web}/lost.jpg", "file:///etc/passwd"]
    table = pyarrow.table({"image_url": urls, "name": [f"Morpho {number}" for number in range(len(urls))]})
    parquet.write_table(table, source / "train-00000-of-00001.parquet")
    out = tmp_path / "out"
    assert prepare.main(["butterfly", "--source", str(source.parent), str(out), *OPTIONS, "--private_addresses"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == {"train": 11, "val": 1} and report["skips"] == {
        "not fetched: http 404": 1,
        "not fetched: not an address": 1,
    }
    assert all(caption.startswith("Morpho") for caption in iter_captions(out, "train"))


def test_images_inside_tables_and_a_chosen_column_of_captions(tmp_path, make_pan):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = tmp_path / "hf"
    source.mkdir()
    images = [{"bytes": content, "path": None} for content in pictures(make_pan, 10)]
    table = pyarrow.table({"image": images, "words": [f"number {n}" for n in range(10)]})
    parquet.write_table(table, source / "train.parquet")
    parquet.write_table(table, source / "test.parquet")
    out = tmp_path / "out"
    assert prepare.main(["hf", str(source), str(out), *OPTIONS, "--caption_column", "words"]) == 0
    assert sum(DatasetInfo.read(out).num_samples.values()) == 10
    with pytest.raises(UserError, match="no column 'wrods'; did you mean 'words'"):
        prepare.main(["hf", str(source), str(tmp_path / "b"), *OPTIONS, "--caption_column", "wrods"])
    with pytest.raises(UserError, match="neither a folder nor the id of a data set"):
        prepare.main(["hf", str(tmp_path / "nowhere"), str(tmp_path / "c"), *OPTIONS])


# --- NeMo and DFM -------------------------------------------------------------------------------------------------


def saved(tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_tensors_and_arrays_are_read_from_pickles(protocol):
    for value in (np.ones((3, 4), np.float32), np.ones((3, 4), np.float16)):
        np.testing.assert_array_equal(read_pickle(pickle.dumps(value, protocol)), value)
    for value in (torch.ones(3, 4).bfloat16(), torch.ones(3, 4)):
        assert torch.equal(read_pickle(pickle.dumps(value, protocol)), value)
    assert len(read_pickle(pickle.dumps([np.ones(2), {"a": 1}], protocol))) == 2


def test_other_pickles_are_refused_and_run_nothing(tmp_path):
    trap = Trap(tmp_path / "trapped")
    for content in (pickle.dumps(trap), pickle.dumps([torch.ones(2), trap]), pickle.dumps(np.array([trap], object))):
        with pytest.raises(UnreadableTensorError, match="it would call"):
            read_pickle(content)
    with pytest.raises(UnreadableTensorError):
        read_pth(saved(trap))
    for content in (b"", b"abcd", b"\x80\x05" + b"(" * 100_000):
        with pytest.raises(UnreadableTensorError):
            read_pickle(content)
    assert not (tmp_path / "trapped").exists()
    pickle.loads(pickle.dumps(trap))  # negative control: the trap does work
    assert (tmp_path / "trapped").exists()


def test_what_nemo_and_dfm_wrote_becomes_a_data_set(tmp_path, caplog):
    generator = torch.Generator().manual_seed(0)
    source = tmp_path / "dfm"
    source.mkdir()
    text = torch.zeros(1, 512, 64)
    text[0, :7] = torch.randn(7, 64, generator=generator)
    trap = Trap(tmp_path / "trapped")
    with tarfile.open(source / "rank0-000000.tar", "w") as tar:
        for number in range(6):
            latent = torch.randn(1, 8, 1 + number % 2, 4, 4, generator=generator).bfloat16()
            add(tar, f"{number:06d}.pth", saved(latent if number else latent.fill_(torch.nan)))
            add(tar, f"{number:06d}.pickle", pickle.dumps(trap if number == 1 else text.bfloat16()))
            add(tar, f"{number:06d}.json", json.dumps({"image_height": 1, "image_width": 512}).encode())
    with tarfile.open(source / "nemo-0.tar", "w") as tar:
        add(tar, "000000..pth", saved(torch.randn(8, 2, 4, 4)))
        add(tar, "000000..pickle", pickle.dumps([np.ones((5, 64), np.float32)]))
        add(tar, "000000..json", json.dumps({"framerate": 30, "caption": "a fox", "aesthetic_score": 5.5}).encode())
    video = torch.rand(4, 3, 9, 32, 32, generator=generator)
    HaarTokenizer.fit([video], channels=8).save(tmp_path / "tokenizer")
    HashedWordEncoder().save(tmp_path / "text_encoder")
    parts = ["--tokenizer", str(tmp_path / "tokenizer"), "--text_encoder", str(tmp_path / "text_encoder")]
    assert prepare.main(["nemo", str(source), str(tmp_path / "out"), *parts, "--debug"]) == 0
    assert not (tmp_path / "trapped").exists()
    assert DatasetInfo.read(tmp_path / "out").num_samples["train"] == 5
    messages = " / ".join(caplog.messages)
    assert "000000: unfit" in messages and "000001: it would call posix.system" in messages
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        described = json.load(tar.extractfile("nemo-0-000000.json"))
        from safetensors.torch import load

        tensors = load(tar.extractfile("rank0-000000-000002.safetensors").read())
    assert described == {
        "caption": "a fox", "num_frames": 5, "height": 32, "width": 32, "fps": 30.0, "aesthetic_score": 5.5,
    }  # fmt: skip
    assert tensors["text"].shape == (7, 64) and tensors["latent"].shape == (8, 1, 4, 4)
    more = ["--fps", "12", "--val_every", "2", "--shard_size", "1"]
    assert prepare.main(["nemo", str(source), str(tmp_path / "other"), *parts, *more, "--debug"]) == 0
    described = [each for split in ("train", "val") for each in iter_descriptions(tmp_path / "other", split)]
    assert {each.fps for each in described} == {0, 12, 30}
    assert DatasetInfo.read(tmp_path / "other").num_samples["val"] >= 2
    assert (tmp_path / "other" / "train-000001.tar").is_file()
    again = ["nemo", str(source), str(tmp_path / "other"), *parts]
    assert prepare.main(again) == 0 and (tmp_path / "other" / "train-000001.tar").is_file()
    assert prepare.main([*again, "--overwrite"]) == 0 and not (tmp_path / "other" / "train-000001.tar").is_file()


def test_a_folder_of_something_else_is_not_replaced(tmp_path, capsys):
    """By shards that lie in folders of their own, and hold keys that are the same, or too long for a tar file."""
    source = tmp_path / "source"
    for folder in ("a", "b"):
        (source / folder).mkdir(parents=True)
        with tarfile.open(source / folder / "000.tar", "w") as tar:
            for key in ("0", "k" * 95):
                add(tar, f"{key}.pth", saved(torch.zeros(192, 1, 2, 2)))
                add(tar, f"{key}.pickle", pickle.dumps(np.ones((5, 64), np.float32)))
                add(tar, f"{key}.json", b"{}")
    HaarTokenizer(temporal_compression=4, spatial_compression=4).save(tmp_path / "tokenizer")
    HashedWordEncoder().save(tmp_path / "text_encoder")
    parts = ["--tokenizer", str(tmp_path / "tokenizer"), "--text_encoder", str(tmp_path / "text_encoder")]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    for out in (tmp_path / "thesis", source):
        assert prepare.main(["nemo", str(source), str(out), *parts]) == 2
        assert "is not a prepared data set" in capsys.readouterr().err
    assert (tmp_path / "thesis/chapter.tex").read_text() == "years of work" and (source / "a/000.tar").is_file()
    assert prepare.main(["nemo", str(source), str(tmp_path / "out"), *parts, "--val_every", "0"]) == 0
    assert DatasetInfo.read(tmp_path / "out").num_samples["train"] == 2
    assert "is too long" in capsys.readouterr().out


# --- stores -------------------------------------------------------------------------------------------------------


def upload(folder: Path, url: str) -> None:
    store, root = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put_file(str(path), f"{root}/{path.relative_to(folder).as_posix()}")


def shard_bytes(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(root.glob("*.tar"))]


@pytest.fixture
def mixed_sources(tmp_path, make_pan) -> Path:
    """Pictures with captions beside them, in a table and in shards."""
    root = tmp_path / "sources"
    for name in ("beside", "listed", "shards"):
        (root / name).mkdir(parents=True)
    images = pictures(make_pan, 8)
    with tarfile.open(root / "shards" / "0.tar", "w") as tar:
        for number, content in enumerate(images):
            (root / "beside" / f"{number}.jpg").write_bytes(content)
            (root / "beside" / f"{number}.txt").write_text(f"picture {number}")
            (root / "listed" / f"{number}.jpg").write_bytes(content)
            add(tar, f"{number}.jpg", content)
            add(tar, f"{number}.txt", f"picture {number}".encode())
    rows = [*(f"{number}.jpg,picture {number}" for number in range(8)), "../beside/0.jpg,x", "lost.jpg,y"]
    (root / "listed" / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))
    return root


@pytest.mark.parametrize(("kind", "name"), [("images", "beside"), ("images", "listed"), ("webdataset", "shards")])
def test_sources_in_s3_give_the_same_data_set_as_a_folder(mixed_sources, s3, tmp_path, kind, name):
    url = s3()
    upload(mixed_sources / name, f"{url}/media")
    for source, out in ((str(mixed_sources / name), "local"), (f"{url}/media", "stored")):
        assert prepare.main([kind, source, str(tmp_path / out), *OPTIONS]) == 0
    assert shard_bytes(tmp_path / "stored") == shard_bytes(tmp_path / "local") != []
    reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in ("local", "stored")]
    assert reports[0] == reports[1] and sum(reports[0]["samples"].values()) == 8
    if name == "listed":
        assert reports[0]["skips"] == {"missing file": 1, "outside the source folder": 1}


def test_a_store_that_cannot_be_read_is_told(tmp_path, s3):
    for out, source, message in (
        ("a", f"{s3()}/nothing", "is not a folder; give a folder of images"),
        ("b", "nonsense://x/y", "cannot be reached"),
    ):
        with pytest.raises(UserError, match=message):
            prepare.main(["images", source, str(tmp_path / out), *OPTIONS])


def test_videos_in_s3_give_the_same_data_set_as_a_folder(s3, tmp_path, make_clip, make_pan):
    """Three codecs, captions beside them, a file that is cut short and one that is none."""
    source = tmp_path / "clips"
    source.mkdir()
    for number in range(3):
        codec, suffix = (("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"))[number % 3]
        name = ("china.jpg", "flower.jpg")[number % 2]
        frames = make_pan(name, 12, 96, 128, start=(40 + 21 * number, 33 * number), flip=number % 4)
        path = make_clip(source / f"{number}.{suffix}", frames, codec=codec)
        path.with_suffix(".txt").write_text(f"clip {number}")
    (source / "short.mp4").write_bytes((source / "0.mp4").read_bytes()[:3000])
    (source / "words.webm").write_text("this is not a video\n" * 100)
    url = s3()
    upload(source, f"{url}/media")
    for place, out in ((str(source), "local"), (f"{url}/media", "stored")):
        assert prepare.main(["videos", place, str(tmp_path / out), *OPTIONS, "--num_frames", "9"]) == 0
    assert shard_bytes(tmp_path / "stored") == shard_bytes(tmp_path / "local") != []
    reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in ("local", "stored")]
    assert reports[0] == reports[1] and sum(reports[0]["samples"].values()) == 3
    assert reports[0]["sources"] == 5 and reports[0]["skips"]["broken"] == 2


def test_captions_lie_beside_videos(tmp_path):
    """The record that `megadit generate` leaves comes first: other suffixes may be another video's."""
    for beside, text in {
        "a.mp4.json": '{"prompt": "a record"}',
        "a.json": '{"caption": "of a.gif"}',
        "b.json": '{"caption": "a description"}',
        "b.txt": "a text",
        "c.txt": "a text",
    }.items():
        (tmp_path / beside).write_text(text)
    for name in "abcd":
        (tmp_path / f"{name}.mp4").touch()
    listing = list_folder(tmp_path, "video")
    assert [source.caption for source in listing.sources] == ["a record", "a description", "a text", ""]


def test_a_table_without_captions_is_named(tmp_path, make_clip, make_pan):
    make_clip(tmp_path / "a.mp4", make_pan("china.jpg", 9, 64, 64))
    (tmp_path / "metadata.csv").write_text("file_name,words\na.mp4,a temple\n")
    with pytest.raises(UserError, match="metadata.csv has no column of captions; name it one of caption, text"):
        list_folder(tmp_path, "video")
    (tmp_path / "metadata.csv").write_text("number,caption\na.mp4,a temple\n")
    with pytest.raises(UserError, match="metadata.csv has no column of files"):
        list_folder(tmp_path, "video")


def test_a_row_without_a_caption_is_a_sample_without_one(tmp_path, make_clip, make_pan):
    for name in ("a", "b"):
        make_clip(tmp_path / f"{name}.mp4", make_pan("china.jpg", 9, 64, 64))
    table = tmp_path / "metadata.jsonl"
    table.write_text('{"file_name": "a.mp4"}\n{"file_name": "b.mp4", "caption": "a temple"}\n')
    listing = list_folder(tmp_path, "video")
    assert [source.caption for source in listing.sources] == ["", "a temple"] and not listing.skips
    table.write_text('{"file_name": "a.mp4"}\n{"file_name": "b.mp4", "words": "a temple"}\n')
    with pytest.raises(UserError, match="metadata.jsonl has no column of captions"):
        list_folder(tmp_path, "video")


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, (96, 96)),
        ({"sizes": "64x32"}, (64, 32)),
        ({"height": 48}, (48, 48)),
        ({"height": 48, "width": 64}, (48, 64)),
    ],
)
def test_samples_are_as_large_as_most_of_a_folder_fills(tmp_path, given, chosen):
    for number in range(10):
        Image.new("RGB", (400, 100 if number else 40)).save(tmp_path / f"{number}.png")
    common = PrepareOptions(**given)
    options = FolderOptions(source=str(tmp_path), out=tmp_path / "out", common=common)
    notes = Notes(root=tmp_path / "out")
    settings, said = _fitted(_settings(options, notes), "images", options, notes)
    assert settings.sizes == (chosen,) and ("size of samples: 96x96" in said) == (not given)
    notes.begin(Settings(sizes=((32, 16),)), {})
    again, _ = _fitted(_settings(options, notes), "images", options, notes)
    assert again.sizes == ((32, 16) if not given else chosen,), "a second run goes on as the first began"
