"""What strangers put beside, into and around pictures does not end a preparation, nor fill memory."""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile

import pytest
import torch
from PIL import Image

from megadit.infer.decoding.pictures import _readable_formats, read_picture
from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.models.machine import peak_memory, reset_peak_memory
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_archive import read_archive
from megadit.train.data.ingest.clips.decode import read_image
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.ingest.sources.importers import UnreadableTensorError, as_tensor, read_pickle, read_pth
from megadit.train.data.ingest.sources.parquet import count_rows
from megadit.train.data.ingest.sources.rows import read_table
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.sources.webdataset import list_webdataset
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo, iter_descriptions

from .sources.test_sources import add

CPU = torch.device("cpu")
OPTIONS = ["--sizes", "64x64", "--num_frames", "1", "--num_workers", "0", "--tokenizer", "pixels", "--debug"]

CAPTIONS = {
    "half": rb'{"caption": "\ud800 a"}',
    "infinite": b'{"caption": "a", "aesthetic_score": Infinity}',
    "nan": b'{"caption": "a", "aesthetic_score": NaN}',
    "beyond": b'{"caption": "a", "aesthetic_score": 1e999}',
    "digits": b'{"caption": "a", "aesthetic_score": ' + b"9" * 400 + b"}",
    "as text": b'{"caption": "a", "aesthetic_score": "inf"}',
    "digits as text": b'{"caption": "a", "aesthetic_score": "' + b"9" * 400 + b'"}',
    "deep": b"[" * 100_000,
    "listed": b"[1]",
    "nothing": b"",
    "bytes": b"\xff\xfe",
    "long": b'{"caption": "' + b"a" * (1 << 20) + b'"}',
}
"""Captions and scores that no file of ours can hold."""


@pytest.fixture(scope="module")
def picture(make_pan) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(make_pan("china.jpg", 1, 96, 128, start=(40, 10))[0]).save(buffer, format="jpeg", quality=95)
    return buffer.getvalue()


def test_no_caption_and_no_score_ends_a_preparation(histograms, tmp_path, make_pan, picture):
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "a.tar", "w") as tar:
        for number, (name, content) in enumerate(CAPTIONS.items()):
            buffer = io.BytesIO()
            Image.fromarray(make_pan("flower.jpg", 1, 96, 128, start=(30 + 11 * number, 12 * number))[0]).save(
                buffer, "png"
            )
            add(tar, f"{name}.png", buffer.getvalue())
            add(tar, f"{name}.json", content)
        add(tar, "bad\udcff.jpg", picture)
    assert prepare.main(["webdataset", str(tmp_path / "shards"), str(tmp_path / "out"), *OPTIONS]) == 0
    info = DatasetInfo.read(tmp_path / "out")
    described = [each for split in info.num_samples for each in iter_descriptions(tmp_path / "out", split)]
    assert len(described) == sum(info.num_samples.values()) >= len(CAPTIONS) // 2
    assert all(each.aesthetic_score is None and each.caption in ("", "a") for each in described)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["skips"]["unreadable caption"] == 3 and report["skips"]["unreadable name"] == 1
    assert report["sources"] == report["used"] + report["left_out"] == len(CAPTIONS) + 1


def test_the_same_captions_beside_files(tmp_path, picture):
    for name, content in CAPTIONS.items():
        (tmp_path / f"{name}.jpg").write_bytes(picture)
        (tmp_path / f"{name}.json").write_bytes(content)
    listing = list_folder(tmp_path, "image")
    assert len(listing.sources) + len(listing.skips) == len(CAPTIONS)
    assert {skip.source for skip in listing.skips} == {"half.jpg", "deep.jpg", "long.jpg"}
    assert all(source.aesthetic_score is None for source in listing.sources)


@pytest.mark.parametrize("line", ["[" * 5000, "[1]", "{"])
def test_a_hostile_line_of_a_table_is_named(tmp_path, line):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.jpg"}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2 of .*metadata.jsonl|a line is"):
        list(read_table(str(tmp_path / "metadata.jsonl")))


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.tsv", "metadata.jsonl", "videos.txt"])
def test_a_line_without_end_is_not_read_to_it(tmp_path, picture, name):
    """A file with holes, which an archive may hold in a few bytes."""
    for each, content in {"a.jpg": picture, "prompt.txt": b"a", name: b""}.items():
        (tmp_path / each).write_bytes(content)
    os.truncate(tmp_path / name, 1 << 25)
    with pytest.raises(UserError, match=f"a line of .*{name} is longer than"):
        list_folder(tmp_path, "image")


def test_values_that_are_no_python_s_are_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet, broken = pytest.importorskip("pyarrow.parquet"), pyarrow.py_buffer(b"\xff\xfe")
    lengths = pyarrow.py_buffer(struct.pack("<ii", 0, 2))
    for column in (
        pyarrow.array([2**62], pyarrow.timestamp("us")),
        pyarrow.array([0], pyarrow.timestamp("us", tz="Zog/Zog")),
        pyarrow.array([2**62], pyarrow.duration("s")),
        pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, lengths, broken]),
    ):
        parquet.write_table(pyarrow.table({"file_name": ["a.jpg"], "more": column}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match="a.parquet cannot be read"):
            list(read_table(str(tmp_path / "a.parquet")))
    rows = {"images": [{"id": [1], "file_name": "a.jpg"}], "annotations": [{"image_id": [1], "caption": "a"}, {}]}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [row["caption"] for row in read_table(str(tmp_path / "a.json"))] == ["a"]


def test_a_small_parquet_takes_little_memory(tmp_path, monkeypatch):
    """A long value, a value of many rows, a long list: each is of less than 20 kB, and takes more memory than it may,
    in a process of its own."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    value, size = pyarrow.array([bytes(1 << 22)], pyarrow.binary()), 1 << 25
    columns = {
        "value": pyarrow.array([bytes(size)], pyarrow.binary()),
        "rows": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 32), value),
        "list": pyarrow.ListArray.from_arrays([0, size], pyarrow.nulls(size, pyarrow.int8())),
        "control": pyarrow.array([b"a"]),
    }
    paths = [tmp_path / f"{name}.parquet" for name in columns]
    for path, column in zip(paths, columns.values(), strict=True):
        table = pyarrow.table({"file_name": ["a.jpg"] * len(column), "more": column})
        parquet.write_table(table, path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 20_000
    assert count_rows(list(map(str, paths))) == list(map(len, columns.values()))
    for path in paths[:-1]:
        for memory, message in (
            (1 << 26, "a row takes more than 67,108,864 bytes"),
            (1 << 30, "1 rows have [0-9,]* bytes, over 100 times what they have in the file"),  # they would fill a disk
        ):
            monkeypatch.setattr("megadit.train.data.ingest.sources.parquet.MOST_MEMORY", memory)
            with pytest.raises(UserError, match=f"{path.name} cannot be read: {message}") as raised:
                list(read_table(str(path)))
            assert "\n" not in str(raised.value)
    assert list(read_table(str(paths[-1]))) == [{"file_name": "a.jpg", "more": b"a"}]


def test_a_small_parquet_has_no_million_rows_and_a_reader_that_dies_is_one_line(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"url": pyarrow.nulls(10**6, pyarrow.string())}), tmp_path / "a.parquet")
    for read in (lambda path: list(read_table(path)), lambda path: count_rows([path])):
        with pytest.raises(UserError, match=r"a.parquet cannot be read: it says that its .* bytes have 1,000,000 rows"):
            read(str(tmp_path / "a.parquet"))
    monkeypatch.setattr("megadit.train.data.ingest.sources.parquet.python_module", lambda *_: ["sh", "-c", "exit 1"])
    with pytest.raises(UserError, match="a.parquet cannot be read: its reader crashed, or took too long"):
        count_rows([str(tmp_path / "a.parquet")])


def test_an_archive_that_leads_back_ends(tmp_path, picture):
    """A member of negative size would be read again and again."""
    member = tarfile.TarInfo("a.jpg")
    block = bytearray(member.tobuf(format=tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + struct.pack(">h", -512)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    good = io.BytesIO()
    with tarfile.open(fileobj=good, mode="w") as tar:
        add(tar, "good.jpg", picture)
    content = good.getvalue().rstrip(b"\0")
    content += bytes(-len(content) % 512)
    (tmp_path / "a.tar").write_bytes(content + bytes(block) + bytes(1024))
    listing = list_webdataset(tmp_path / "a.tar")
    assert [source.name for source in listing.sources] == ["a.tar/good"]
    assert [skip.reason for skip in listing.skips] == ["broken tar file"]


# --- small files that ask for much memory -----------------------------------------------------------------------------


def webp(kind: bytes, body: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


HUGE = {
    "extended": webp(b"VP8X", bytes([2, 0, 0, 0]) + b"\xff\xff\x00" + b"\xff\xff\x00" + bytes(100)),
    "lossless": webp(b"VP8L", b"\x2f" + struct.pack("<I", 16383 | 16383 << 14) + bytes(100)),
    "lossy": webp(b"VP8 ", b"\x10\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(100)),
}


@pytest.mark.parametrize("content", HUGE.values(), ids=HUGE)
def test_a_small_webp_is_asked_for_its_size_before_it_is_opened(tmp_path, content, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("its decoder was given the file")

    (tmp_path / "a.webp").write_bytes(content)
    monkeypatch.setattr(Image, "open", opened)
    with pytest.raises(UnusableSourceError, match="too large: .* pixels; at most 100 megapixels"):
        read_image(Source(name="a", kind="image", path=str(tmp_path / "a.webp")), Settings())


def test_no_format_of_pictures_announces_more_than_it_may():
    """320 x 208 pixels whose header says 60,000 x 60,000, wherever it has numbers."""
    reset_peak_memory(CPU)
    before, tried = peak_memory(CPU), 0
    for kind in _readable_formats():
        buffer = io.BytesIO()
        try:
            Image.new("RGB", (320, 208)).save(buffer, kind)
        except (OSError, KeyError):  # it can only be read
            continue
        content = buffer.getvalue().replace(b"320 208", b"60000 60000")
        for form in (">I", "<I", ">H", "<H"):
            for size in (320, 208):
                content = content.replace(struct.pack(form, size), struct.pack(form, 60_000))
        with pytest.raises(UnusableSourceError, match="^(too large|broken): "):
            read_picture(io.BytesIO(content), Rules(), (kind,))
        tried += 1
    assert tried >= 8 and peak_memory(CPU) - before < 1 << 29


def leaping_pickle() -> bytes:
    """A value numbered two to the thirtieth: Python makes room for as many."""
    return b"\x80\x02N" + b"r" + (1 << 30).to_bytes(4, "little") + b"."


def large_array() -> bytes:
    """An array of 16 GiB without its data."""
    return b"\x80\x02cnumpy\nndarray\n\x8a\x05\x00\x00\x00\x00\x04\x85\x85R."


def repeated_tensor() -> bytes:
    """A tensor of four bytes as 4 TiB."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(1).expand(1 << 20, 1 << 20), buffer)
    return buffer.getvalue()


def compressed(content: bytes, size: int) -> bytes:
    """A file of torch's with a member of zeros that is compressed."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/data/9", bytes(size))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_pickle, leaping_pickle),
        (read_pickle, large_array),
        (read_pth, repeated_tensor),
        (read_pickle, lambda: pickle.dumps(torch.zeros(1).expand(1 << 20, 1 << 20))),
        (read_pth, lambda: compressed(repeated_tensor(), 1 << 28)),
    ],
    ids=["numbers", "array", "strides", "pickled strides", "compressed"],
)
def test_a_small_file_does_not_become_a_large_tensor(read, content):
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    with pytest.raises(UnreadableTensorError, match="hostile|larger than its data|its shape is"):
        as_tensor(read(content()), 2)
    assert peak_memory(CPU) - before < 1 << 29


def test_a_jit_is_not_unpacked_beyond_its_size(tmp_path):
    torch.jit.script(torch.nn.Linear(3, 2)).save(tmp_path / "a.jit")
    assert read_archive(tmp_path / "a.jit").shapes == {"weight": (2, 3), "bias": (2,)}
    (tmp_path / "b.jit").write_bytes(compressed((tmp_path / "a.jit").read_bytes(), 1 << 28))
    with pytest.raises(UserError, match="b.jit is hostile: unpacked, it is larger than its"):
        read_archive(tmp_path / "b.jit")
