"""Captions of every kind, encoding and layout: each is its own file's, or the file is left out for a true reason."""

import csv
import gzip
import io
import json
import tarfile
from pathlib import Path
from unicodedata import normalize
from urllib.parse import quote

import av
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from megadit.infer.decoding.pictures import _exif_of_boxes
from megadit.infer.decoding.rules import UnusableSourceError
from megadit.models.shared.captions import caption_columns, captions_in, file_columns, is_blank, shortened
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.decode import read_image, read_timeline
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.ingest.sources import layouts, rows
from megadit.train.data.ingest.sources.listing import Listing, Reading, shorten_captions
from megadit.train.data.ingest.sources.rows import read_table
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.sources.webdataset import list_webdataset

from .test_sources import add

PICTURE = io.BytesIO()
Image.new("RGB", (8, 8), "red").save(PICTURE, "png")
PICTURE = PICTURE.getvalue()


def write(root: Path, files: dict[str, str | bytes | dict | list]) -> None:
    """Names -> contents; pictures where these are empty."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case bytes():
                path.write_bytes(content)
            case str():
                path.write_text(content, encoding="utf-8")
            case _:
                path.write_text(json.dumps(content), encoding="utf-8")


def captions(root: Path, kind: str = "image", table: str | None = None, **reading) -> dict[str, tuple[str, ...]]:
    listing = list_folder(root, kind, table, reading=Reading(**reading))
    return {source.name: source.captions for source in listing.sources}


A, B = {"a.png": PICTURE}, {"b.png": PICTURE}
CSV = "file_name,text\na.png,a cat\nb.png,a dog\n"
BESIDE = {
    "text": ({"a.txt": " a cat \r\n"}, ("a cat",)),
    "caption": ({"a.caption": "a cat"}, ("a cat",)),
    "whole name": ({"a.png.txt": "a cat"}, ("a cat",)),
    "capitals": ({"a.TXT": "a cat"}, ("a cat",)),
    "mark": ({"a.txt": b"\xef\xbb\xbfa cat"}, ("a cat",)),
    "utf-16": ({"a.txt": "a cat".encode("utf-16")}, ("a cat",)),
    "utf-16 without a mark": ({"a.txt": "a cat".encode("utf-16-le")}, ("a cat",)),
    "utf-16 of Cyrillic without a mark": ({"a.txt": "рыжий кот".encode("utf-16-le")}, ("рыжий кот",)),
    "json with a mark": ({"a.json": b'\xef\xbb\xbf{"caption": "a cat"}'}, ("a cat",)),
    "json without a caption": ({"a.json": {"width": 8}, "a.txt": "a cat"}, ("a cat",)),
    "json of a list": ({"a.json": [{"box": 1}], "a.txt": "a cat"}, ("a cat",)),
    "broken json": ({"a.json": "{", "a.txt": "a cat"}, ("a cat",)),
    "several": ({"a.json": {"caption": ["a cat", "a red cat", "a cat"]}}, ("a cat", "a red cat")),
    "texts in json": ({"a.json": ["a cat", "a red cat"]}, ("a cat", "a red cat")),
    "by language": ({"a.json": {"caption": {"fr": "un chat", "en": "a cat"}}}, ("a cat",)),
    "by length": ({"a.json": {"caption": {"short": "a cat", "long": "a red cat"}}}, ("a cat", "a red cat")),
    "messages": (
        {"a.json": {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]}},
        ("a cat",),
    ),
    "no name": ({"a.json": {"name": "IMG_0042.png", "description": "a cat"}}, ("a cat",)),
    "other column": ({"a.json": {"caption_score": 0.5, "negative_prompt": "dog", "caption_long": "a cat"}}, ("a cat",)),
    "boxes": ({"a.json": [{"label": "dog"}]}, ()),
    "nothing": ({"a.txt": ""}, ()),
    "nothing that is seen": ({"a.txt": "\0 \x1b\u200b"}, ()),
    "nothing that is seen, in json": ({"a.json": {"caption": ["\0\x7f", "a cat"]}}, ("a cat",)),
    "not a number": ({"a.json": '{"caption": NaN}'}, ()),
    "yaml": ({"a.yaml": "# by hand\ncaption: a cat\nscore: 010\n"}, ("a cat",)),
    "yaml between lines": ({"a.yaml": "---\ncaption: a cat\n---\n"}, ("a cat",)),
    "yaml of a text": ({"a.yml": "a cat\n"}, ("a cat",)),
    "toml": ({"a.toml": '# by hand\ncaption = "a cat"\n'}, ("a cat",)),
    "neither yes nor no": ({"a.json": {"caption": True}}, ()),
    "yaml of what is no text": ({"a.png.yaml": "captions: [no, 2024-01-01, 0x10, ~]"}, ("no", "2024-01-01", "0x10")),
    "conversation": (
        {"a.json": {"conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a cat"}]}},
        ("a cat",),
    ),
}


@pytest.mark.parametrize(("files", "wanted"), BESIDE.values(), ids=BESIDE)
def test_captions_beside_a_file(tmp_path, files, wanted):
    write(tmp_path, A | files)
    assert captions(tmp_path) == {"a.png": wanted}


WINDOW = {"start_frame": 0, "end_frame": 86, "temporal_interval": 1}
STRUCTURED = {"subjects": [{"description": "a cat"}], "audio_description": "mewing", "fps": 5}
COSMOS = {
    "dense": ([WINDOW | {"caption": "a cat sits"}], ("a cat sits",)),
    "both": (
        [WINDOW | {"caption_json": STRUCTURED | {"temporal_caption": "no"}, "caption": "a cat sits"}],
        ("a cat sits",),
    ),
    "structured": ([WINDOW | {"caption_json": STRUCTURED | {"temporal_caption": "a cat sits"}}], ("a cat sits",)),
    "of parts": ([WINDOW | {"caption": "a cat sits"}, WINDOW | {"start_frame": 87, "caption": "a cat walks"}], ()),
}


@pytest.mark.parametrize(("windows", "wanted"), COSMOS.values(), ids=COSMOS)
def test_the_jsonl_of_cosmos_framework(tmp_path, windows, wanted):
    """The narrative of a clip; of one with several windows none, for each is of another part."""
    row = {"uuid": "a", "duration": 17.4, "width": 8, "height": 8, "vision_path": "videos/a.mp4"}
    row["t2w_windows"] = windows
    write(tmp_path, {"videos/a.mp4": b"", "video_dataset_file.jsonl": json.dumps(row) + "\n"})
    assert captions(tmp_path, "video") == {"videos/a.mp4": wanted}


def test_sharegpt4video(tmp_path):
    """The caption of the whole clip, not those of its frames."""
    texts = {"1": "a cat sits", "2": "then it walks", "-1": "a cat gets up"}
    row = {"video_id": "a", "video_path": "panda/a.mp4", "timestamp": ["00:00:01"], "keyframe": [0, 48]}
    row["captions"] = [{"idx": number, "content": text} for number, text in texts.items()]
    rows = [row, row | {"video_path": "panda/b.mp4", "captions": row["captions"][:2]}]
    files = {f"panda/{name}.mp4": b"" for name in "ab"}
    write(tmp_path, files | {"sharegpt4video_40k.jsonl": "\n".join(map(json.dumps, rows))})
    assert captions(tmp_path, "video") == {"panda/a.mp4": ("a cat gets up",), "panda/b.mp4": ()}


SPANS = [[0, 4], [4, 8]]
ROW = {"video": "a.mp4", "caption": "a cat sits"}
PARTS = {
    "panda-70m": ([ROW | {"timestamp": f"{SPANS}", "caption": "['a cat sits', 'a dog runs']"}], ()),
    "activitynet": ({"a": {"timestamps": SPANS, "sentences": ["a cat sits", "a dog runs"]}}, ()),
    "a list": ([ROW | {"caption": [{"start": 0, "text": "a cat sits"}, {"start": 4, "text": "a dog runs"}]}], ()),
    "koala-36m": ([ROW | {"timestamp": f"['0:00', '0:0{end}']"} for end in (4, 8, 4)], ()),
    "internvid": ([ROW | {"Start_timestamp": start, "End_timestamp": "0:08"} for start in ("0:00", "0:04")], ()),
    "of the same part": ([ROW | {"start time": 4.0, "caption": text} for text in ("one", "two")], ("one", "two")),
    "of one part": ([ROW | {"times": [[0, 0], [0, 1]]}], ("a cat sits",)),
    "times of other things": ([ROW | {"caption": ["one", "two"], "segments": [[0, 1, 2]]}], ("one", "two")),
}


@pytest.mark.parametrize(("rows", "wanted"), PARTS.values(), ids=PARTS)
def test_captions_of_parts_are_no_captions_of_the_whole(rows, wanted, tmp_path):
    write(tmp_path, {"a.mp4": b"", "captions.json": rows})
    assert captions(tmp_path, "video") == {"a.mp4": wanted}


def test_openvid(tmp_path):
    """A table in a folder of tables alone; its scores have other names elsewhere."""
    names = ("aesthetic score", "Aesthetic_Score", "aes", "aesthetics_score", "video_aesthetic", "aesthetic_score")
    for number, name in enumerate(names):
        root = tmp_path / str(number)
        write(root, {"video/a.mp4": b"", "data/train/OpenVid-1M.csv": f"video,caption,{name}\na.mp4,a cat,5.5\n"})
        (source,) = list_folder(root, "video").sources
        assert (source.captions, source.aesthetic_score) == (("a cat",), None if name == "video_aesthetic" else 5.5)
    write(tmp_path / "6", {"b/a.mp4": b"", "c/b.mp4": b"", "c/metadata.csv": "file_name,text\na.mp4,a cat\n"})
    assert not any(captions(tmp_path / "6", "video").values()), "a folder with files of its own"


@pytest.mark.parametrize("key", ["control_directory", "mask_path"])
@pytest.mark.parametrize("place", ["control", "./control/", "{root}/control"])
def test_folders_of_conditions_hold_nothing_to_train_on(key, place, tmp_path):
    toml = f"[[datasets]]\nimage_directory = 'image'\n{key} = '{place.format(root=tmp_path)}'\n"
    write(tmp_path, {"image/a.png": PICTURE, "image/a.txt": "a cat", "control/a.png": PICTURE, "set.toml": toml})
    listing = list_folder(tmp_path, "image")
    assert [source.name for source in listing.sources] == ["image/a.png"]
    assert [(skip.source, skip.reason) for skip in listing.not_used] == [
        ("control/a.png", "mask or condition of another picture")
    ]


@pytest.mark.parametrize(
    ("folders", "wanted"),
    [
        (("10_ohwx man", "1_man"), {"ohwx man", "man"}),
        (("001.Laysan_Albatross", "002.Crow"), {"Laysan Albatross", "Crow"}),
        (("100_meters", "long_jump"), {"100 meters", "long jump"}),
    ],
)
def test_numbers_before_all_labels_are_none_of_their_words(folders, wanted, tmp_path):
    write(tmp_path, {f"img/{folder}/{number}.png": PICTURE for number, folder in enumerate(folders)})
    assert {text for (text,) in captions(tmp_path, table="folders").values()} == wanted


def test_msr_vtt(tmp_path):
    """Several sentences for each clip, which are named without a suffix; the clips of a split alone."""
    document = {
        "info": {"contributor": "Microsoft"},
        "videos": [{"video_id": f"video{n}", "id": n, "split": ("train", "validate")[n == 2]} for n in range(3)],
        "sentences": [{"caption": f"{word} {n}", "video_id": f"video{n}", "sen_id": 3 * place + n}
                      for place, word in enumerate(("a clip", "a film")) for n in range(3)],
    }  # fmt: skip
    files = {f"TrainValVideo/video{n}.mp4": b"" for n in range(3)}
    write(tmp_path, files | {"train_val_videodatainfo.json": document})
    assert captions(tmp_path, "video") == {
        f"TrainValVideo/video{n}.mp4": (f"a clip {n}", f"a film {n}") for n in range(2)
    }
    assert [(skip.source, skip.reason) for skip in list_folder(tmp_path, "video").not_used] == [
        ("TrainValVideo/video2.mp4", "of the split val (--split)")
    ]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"{\\rtf1 a cat}", "save it as plain text"),
        (bytes(range(256)), "it is no text"),
    ],
)
def test_what_lies_in_a_caption_s_place_is_named(tmp_path, content, what):
    write(tmp_path, A | B | {"a.txt": content, "b.txt": "<subject> runs"})
    listing = list_folder(tmp_path, "image")
    assert [source.captions for source in listing.sources] == [("<subject> runs",)]
    assert [what in skip.detail for skip in listing.skips] == [True]


@pytest.mark.parametrize("content", ["a café".encode("cp1252"), b'{"caption": "\\ud800"}'], ids=["cp1252", "half"])
def test_what_cannot_be_read_is_left_out_and_not_kept_without_a_caption(tmp_path, content):
    write(tmp_path, A | B | {"b.txt": "a dog", "a.json" if content[:1] == b"{" else "a.txt": content})
    listing = list_folder(tmp_path, "image")
    assert [source.name for source in listing.sources] == ["b.png"]
    assert [(skip.source, skip.reason) for skip in listing.skips] == [("a.png", "unreadable caption")]
    if content[:1] != b"{":
        assert captions(tmp_path, caption_encoding="cp1252")["a.png"] == ("a café",)


TABLES = {
    "blank lines": {"metadata.csv": "\r\n\nfile_name,text\na.png,a cat\n\nb.png,a dog\n"},
    "imagefolder": {"metadata.csv": "file_name,text\na.png,a cat\nb.png,a dog\n"},
    "excel": {"metadata.csv": "\ufefffile_name;text\r\na.png;a cat\r\nb.png;a dog\r\n"},
    "capitals": {"metadata.csv": "File_Name, Text\na.png,a cat\nb.png,a dog\n"},
    "filename": {"metadata.csv": "filename,caption_long,caption_score\na.png,a cat,1\nb.png,a dog,2\n"},
    "name": {"metadata.csv": "image,name,caption_long\na.png,0001,a cat\nb.png,0002,a dog\n"},
    "tabs": {"metadata.tsv": "file_name\ttext\na.png\ta cat\nb.png\ta dog\n"},
    "utf-16": {"metadata.csv": "file_name,text\na.png,a cat\nb.png,a dog\n".encode("utf-16")},
    "marked lines": {"metadata.jsonl": '\ufeff{"file_name": "a.png", "text": "a cat", "score": NaN}\n'
                     '{"file_name": "b.png", "text": "a dog"}\n'},
    "backslashes": {"metadata.csv": "file_name,text\n.\\a.png,a cat\n.\\b.png,a dog\n"},
    "without suffixes": {"metadata.csv": "file_name,text\na,a cat\nb,a dog\n"},
    "ltx": {"captions.json": [{"media_path": f"{text[0]}.png", "caption": text[1:]} for text in ("aa cat", "ba dog")]},
    "by file": {"captions.json": {"a.png": "a cat", "b.png": "a dog"}},
    "yaml by file": {"captions.yaml": "a.png: a cat\nb.png:\n  caption: a dog\n"},
    "yaml of documents": {"any.yaml": "---\nfile: a.png\ncaption: a cat\n---\nfile: b.png\ncaption: a dog\n"},
    "yaml of rows": {"any.yml": "- file: a.png\n  caption: a cat\n- {file: b.png, caption: a dog}\n"},
    "yaml of texts": {"captions.yaml": "a: [a cat]\nb: [a dog]\n"},
    "within an object": {"captions.json": {"version": 1, "captions": {"a.png": "a cat", "b.png": "a dog"}}},
    "within two": {"any.json": {"data": {"items": [
        {"file": "a.png", "caption": "a cat"}, {"file": "b.png", "caption": "a dog"}]}}},
    "pairs": {"captions.json": [["a.png", "a cat"], ["b.png", "a dog"]]},
    "comments": {"metadata.csv": "# of ours, in 2024\n# 2 rows\nfile_name,text\na.png,a cat\nb.png,a dog\n"},
    "comment in the header": {"metadata.tsv": "#file_name\ttext\na.png\ta cat\nb.png\ta dog\n"},
    "lines with blanks": {"captions.txt": "a.png a cat\nb.png a dog\n"},
    "lines with colons": {"captions.txt": "a.png: a cat\nb.png: a dog\n"},
    "kohya": {"metadata.json": {"a": {"caption": "a cat"}, "b": {"caption": "a dog"}}},
    "musubi": {"any.jsonl": '{"image_path": "a.png", "caption": "a cat"}\n'
               '{"image_path": "b.png", "caption": "a dog"}\n'},
    "finetrainers": {"prompts.txt": "a cat\na dog\n", "images.txt": "a.png\nb.png\n"},
    "llava": {"llava.json": [
        {"image": f"{n}.png", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": text}]}
        for n, text in (("a", "a cat"), ("b", "a dog"))]},
    "coco": {"annotations/train.json": {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
        "annotations": [{"image_id": 2, "caption": "a dog"}, {"image_id": 1, "caption": "a cat"}]}},
    "toml by file": {"captions.toml": '"a.png" = "a cat"\n"b.png" = { caption = "a dog" }\n'},
    "toml of rows": {"any.toml": "".join(
        f'[[clips]]\nfile = "{text[0]}.png"\ncaption = "{text[1:]}"\n' for text in ("aa cat", "ba dog"))},
    "toml of tables": {"metadata.toml": '[a]\ncaption = "a cat"\n[b]\ncaption = "a dog"\n'},
    "captions as keys": {"captions.json": {"a cat": "a.png", "a dog": "b.png"}},
    "turned pairs": {"captions.json": [["a cat", "a.png"], ["a dog", "b.png"]]},
    "pairs in lines": {"metadata.jsonl": '["a.png", "a cat"]\n["a dog", "b.png"]\n'},
    "vidgen": {"VidGen.json": [{"vid": "a", "caption": "a cat"}, {"vid": "b", "caption": "a dog"}]},
    "toml": {"set.toml": "[general]\ncaption_extension = '.cap'\n", "a.cap": "a cat", "b.cap": "a dog"},
}  # fmt: skip


@pytest.mark.parametrize("files", TABLES.values(), ids=TABLES)
def test_tables_and_layouts_of_others(tmp_path, files):
    write(tmp_path, A | B | files)
    assert captions(tmp_path) == {"a.png": ("a cat",), "b.png": ("a dog",)}
    assert not list_folder(tmp_path, "image").not_used


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_with_accents_are_found_as_macos_writes_them_and_as_others_do(tmp_path, form):
    other = "NFD" if form == "NFC" else "NFC"
    write(
        tmp_path / "table",
        {normalize(form, "dé/é.png"): PICTURE, "metadata.csv": normalize(other, "file_name,text\ndé/é.png,a cat\n")},
    )
    write(tmp_path / "beside", {normalize(form, "é.png"): PICTURE, normalize(other, "é.txt"): "a cat"})
    for folder in ("table", "beside"):
        assert list(captions(tmp_path / folder).values()) == [("a cat",)]


def test_names_are_found_as_urls_write_them(tmp_path):
    """But first as they are written."""
    root = tmp_path / "my clips"
    rows = {
        "my%20clip.png": "one", "%E4%B8%AD.png": "two", f"file://{quote(str(root))}/d/50%25.png": "three",
        "a%20b.png": "four", "%2e%2e/a%20b.png": "five", "%ff%zz.png": "six",
    }  # fmt: skip
    write(root, dict.fromkeys(("my clip.png", "中.png", "d/50%.png", "a%20b.png", "a b.png", "%ff%zz.png"), PICTURE))
    write(root, {"captions.json": rows})
    assert captions(root) == {
        "my clip.png": ("one",), "中.png": ("two",), "d/50%.png": ("three",), "a%20b.png": ("four",),
        "%ff%zz.png": ("six",),
    }  # fmt: skip


def test_a_table_that_is_not_read_says_which_are(tmp_path):
    write(tmp_path, A | {"metadata.xlsx": b"PK"})
    (skip,) = list_folder(tmp_path, "image").not_used
    assert skip.reason.startswith(".xlsx (a table is read as .csv, .tsv, ")


@given(st.permutations(["file", "caption"]), st.lists(st.sampled_from(["7", "0.5", "-1e-3"]), max_size=2),
       st.lists(st.sampled_from(["3", "12.25"]), max_size=2), st.sampled_from(",;\t|"), st.booleans(),
       st.lists(st.sampled_from(["cat", "red, dog", "7", "a.b", "x; y", "0.5", "\u732b"]), min_size=2, max_size=4),
       st.sampled_from(["metadata.csv", "list.tsv", "captions.txt"]))  # fmt: skip
@example(["caption", "file"], [], [], ",", False, ["a cat", "sits"], "metadata.csv")
def test_rows_without_a_header_have_their_columns_in_any_order(
    tmp_path_factory, order, before, after, separator, is_quoted, words, table
):
    """A caption without quotes keeps its separators."""
    root, text = tmp_path_factory.mktemp("rows"), " ".join(["a cat", *words, "runs"])
    quoted = f'"{text}"' if is_quoted else text
    rows = [
        separator.join([*before, *({"file": f"{name}.png", "caption": quoted}[each] for each in order), *after])
        for name in "ab"
    ]
    write(root, A | B | {table: "\n".join(rows) + "\n"})
    assert captions(root) == {"a.png": (text,), "b.png": (text,)}


def test_a_setting_with_the_name_of_a_picture_is_no_caption(tmp_path):
    write(tmp_path, A | {"a.txt": "a cat", "set.json": {"thumbnail": "a.png", "best": ["a.png", "b.png"]}})
    assert captions(tmp_path) == {"a.png": ("a cat",)}


PREFIXES = ["/home/me/set/", "C:\\Users\\me\\set\\", "\\\\nas\\set\\", "~/set/", "../set/", "images/", "file:///mnt/x/"]


@given(st.sampled_from(PREFIXES), st.sampled_from(["metadata.csv", "any.jsonl", "d/any.csv", "captions.json"]),
       st.sets(st.sampled_from(["a.png", "d/a.png", "d/e/b.png", "e/b.png"]), min_size=1),
       st.sets(st.sampled_from(["gone.png", "d/gone.png"])))  # fmt: skip
def test_paths_of_another_machine_are_found_by_what_follows_its_folder(tmp_path_factory, prefix, table, names, gone):
    root, mark = tmp_path_factory.mktemp("moved"), "\\" if "\\" in prefix else "/"
    rows = [(prefix + name.replace("/", mark), f"a cat of {name}") for name in sorted({*names, *gone})]
    content = [{"file": file, "caption": text} for file, text in rows]
    if table.endswith("csv"):
        content = "file,caption\n" + "".join(f"{file},{text}\n" for file, text in rows)
    elif table.endswith("jsonl"):
        content = "\n".join(map(json.dumps, content))
    write(root, dict.fromkeys(names, PICTURE) | {table: content})
    listing = list_folder(root, "image")
    assert {source.name: source.caption for source in listing.sources} == {name: f"a cat of {name}" for name in names}
    assert {skip.reason for skip in listing.skips} == {"missing file"} if gone else not listing.skips
    assert [skip.source for skip in listing.remarks] == [table]


def test_a_prefix_of_many_folders_is_not_looked_for(tmp_path, monkeypatch):
    """Each of them would be tried for each name."""
    tried, resolve = [], layouts.Resolver.resolve
    monkeypatch.setattr(layouts.Resolver, "resolve", lambda *about: tried.append(about) or resolve(*about))
    rows = [{"file": f"{'x/' * 1000}{number}.png", "text": "a cat"} for number in range(20)]
    write(tmp_path, A | {"any.json": rows})
    assert captions(tmp_path) == {"a.png": ()} and len(tried) < 2000


def test_words_with_quotes_stay_in_lines_without_a_header(tmp_path):
    write(tmp_path, A | B | {"captions.txt": 'a.png "one" big cat: red\nb.png a dog "here\n'})
    assert captions(tmp_path) == {"a.png": ('"one" big cat: red',), "b.png": ('a dog "here',)}


@pytest.mark.parametrize("name", ["metadata.json", "metadata.yaml"])
def test_metadata_of_the_folder_as_a_whole_is_no_table(tmp_path, name):
    write(tmp_path, A | B | {name: {"title": "ours", "license": "CC0"}, "a.txt": "a cat", "b.txt": "a dog"})
    assert captions(tmp_path) == {"a.png": ("a cat",), "b.png": ("a dog",)}
    write(tmp_path, {name: {"c.png": "ours"}})
    with pytest.raises(UserError, match="missing file"):
        captions(tmp_path)


def test_labels_lie_beside_the_videos(tmp_path):
    write(tmp_path, {"videos/a.mp4": b"", "labels/a.txt": "a cat", "videos/b.mp4": b"", "labels/c.txt": "a dog"})
    assert captions(tmp_path, "video") == {"videos/a.mp4": ("a cat",), "videos/b.mp4": ()}
    listing = list_folder(tmp_path, "video")
    assert [(skip.source, skip.reason) for skip in listing.not_used] == [
        ("labels/c.txt", ".txt of no video, or beside another caption of it")
    ]


def test_whole_paths_lead_into_the_folder_or_nowhere(tmp_path):
    write(tmp_path, {"clips/a.png": PICTURE, "clips/b.png": PICTURE, "c.png": PICTURE})
    rows = [f"{tmp_path}/clips/a.png,a cat", f"{tmp_path}/c.png,a dog", "/etc/b.png,no"]
    write(tmp_path, {"clips/metadata.csv": "path,text\n" + "\n".join(rows)})
    (tmp_path / "linked").symlink_to(tmp_path / "clips")
    listing = list_folder(tmp_path / "linked", "image")
    assert [(source.name, source.caption) for source in listing.sources] == [("a.png", "a cat")]
    assert {skip.source: skip.reason for skip in listing.skips} == {
        f"{tmp_path}/c.png": "outside the source folder", "/etc/b.png": "outside the source folder",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"holds no images to use: 1 x outside the source folder; /etc/b.png first"):
        write(tmp_path, {"other/a.png": PICTURE, "other/metadata.csv": "path,text\n/etc/b.png,no\n"})
        (tmp_path / "other" / "a.png").unlink()
        list_folder(tmp_path / "other", "image")


def test_several_captions_of_a_clip(tmp_path):
    write(tmp_path, A | {"metadata.csv": "file_name,text,short\na.png,a cat,cat\na.png,a red cat,cat\n"})
    assert captions(tmp_path) == {"a.png": ("a cat", "a red cat")}
    assert captions(tmp_path, caption_columns="text,short") == {"a.png": ("a cat", "cat", "a red cat")}
    with pytest.raises(UserError, match="metadata.csv has no column 'shrt'; did you mean 'short'"):
        captions(tmp_path, caption_columns="text,shrt")


def test_a_source_is_written_again_once_however_many_its_captions(tmp_path):
    """The captions of a row are not copied with each row after it."""
    texts = [f"a cat of {number:04d}" for number in range(400)]
    write(tmp_path, A | B | {"captions.json": [{"file": "a.png", "text": text} for text in texts]})
    listing = list_folder(tmp_path, "image")
    assert listing.sources[0].captions == tuple(texts)
    assert listing.sources._end < 4 * len("".join(texts))


def test_commas_of_a_caption_need_no_quotes_where_it_is_last(tmp_path):
    write(tmp_path, A | {"metadata.csv": "file_name,text\na.png,a cat, red, sitting\n"})
    assert captions(tmp_path) == {"a.png": ("a cat, red, sitting",)}
    write(tmp_path, A | B | {"metadata.csv": "text,file_name\na cat,a.png\na dog, red,b.png\n"})
    listing = list_folder(tmp_path, "image")
    assert [source.name for source in listing.sources] == ["a.png"]
    assert {skip.reason for skip in listing.skips} == {"missing file"}


BROKEN_TABLES = {
    "not closed": ('file_name,text\na.png,a cat\nb.png,"a dog\nc.png,a cow\n', "row of line 3: .*close each quote"),
    "not doubled": ('file_name,text\na.png,"a "big, red" cat"\nb.png,a dog\n', "row of line 2: .*double those inside"),
    "backslashes": ('file_name;text\na.png;"a \\"red\\" cat"\n', "row of line 2: .*double those inside"),
    "tabs": ('file_name\ttext\na.png\tcat\nb.png\t"Hi" says a dog\n', "row of line 3: .*close each quote"),
    "column twice": ("file_name,text,text\na.png,a cat,a dog\n", "has 2 columns 'text'; rename"),
    "file twice": ("image,image,text\na.png,b.png,a dog\n", "has 2 columns 'image'; rename"),
    "no rows": ("file_name,text\n", "has no rows"),
    "empty": ("", "has no rows"),
    "no header": ("a.png,cat\nb.png,dog\n", "no column of files; .* it has a.png, cat$"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN_TABLES.values(), ids=BROKEN_TABLES)
def test_a_broken_table_gives_no_file_another_caption(tmp_path, content, message):
    write(tmp_path, A | B | {"metadata.csv": content})
    with pytest.raises(UserError, match=message):
        list_folder(tmp_path, "image")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(CSV.encode())[:-9], "cannot be read: .*ended before"),
        (b"\x1f\x8b\x08" + bytes(30), "cannot be read"),
        (CSV.encode(), "cannot be read: .*gzip"),
        (gzip.compress(b"file_name,text\na.png," + bytes(1 << 26)), "a line of .* is longer"),
    ],
    ids=["cut off", "broken", "not compressed", "a line without end"],
)
def test_a_compressed_table_that_cannot_be_read_is_named(tmp_path, content, message):
    write(tmp_path, A | {"metadata.csv.gz": content})
    with pytest.raises(UserError, match=message):
        list_folder(tmp_path, "image")


def test_a_compressed_table_does_not_unfold_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_FREE_BYTES", 1 << 20)
    path, long = tmp_path / "a.csv.gz", "".join(f"a.png,number {n}\n" for n in range(100_000))
    path.write_bytes(gzip.compress(f"file_name,text\n{long}".encode()))
    assert sum(1 for _ in read_table(str(path))) == 100_000, "two megabytes, as tables are"
    path.write_bytes(gzip.compress(CSV.encode() + b"\n" * (1 << 24)))
    with pytest.raises(UserError, match="decompresses to over 100 times its size"):
        list(read_table(str(path)))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1)
TEXTS = st.lists(TEXT.filter(lambda text: not is_blank(text)), min_size=1)


@given(TEXTS, st.sampled_from([str, json.dumps, lambda texts: str(np.array(texts, object))]))
@example(["a cat", "it's a 'dog'", 'a "red" [cow], '], str)
def test_a_list_that_a_table_stores_as_text_is_its_texts(texts, stored):
    assert captions_in({"caption": stored(texts)}) == tuple(dict.fromkeys(text.strip() for text in texts))


@given(st.dictionaries(st.sampled_from("abcdefgh"), TEXTS.map(" ".join), min_size=1), st.sampled_from(",;\t|"),
       st.sampled_from(["\n", "\r\n"]), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))  # fmt: skip
def test_every_csv_that_is_whole_comes_back(tmp_path_factory, texts, separator, end, quoting):
    path = tmp_path_factory.mktemp("csv") / "metadata.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=separator, lineterminator=end, quoting=quoting)
        rows.writerows([("file_name", "text"), *texts.items()])
    assert {row["file_name"]: row["text"] for row in read_table(str(path))} == texts


def test_splits_are_kept_apart(tmp_path):
    write(tmp_path, {f"{split}/{n}.png": PICTURE for split in ("train", "test") for n in "ab"})
    for split in ("train", "test"):
        write(tmp_path, {f"{split}/metadata.jsonl": f'{{"file_name": "a.png", "text": "a {split} cat"}}\n'})
    assert captions(tmp_path) == {"train/a.png": ("a train cat",)}
    listing = list_folder(tmp_path, "image", split="test")
    assert [source.caption for source in listing.sources] == ["a test cat"]
    assert {skip.source: skip.reason for skip in listing.not_used if "png" in skip.source} == {
        "train/a.png": "of the split train (--split)",
        "train/b.png": "of the split train (--split)",
        "test/b.png": "not named by metadata.jsonl",
    }


def test_words_that_make_a_column(tmp_path):
    assert caption_columns(("video", "caption_score", "long_caption")) == ("long_caption",)
    assert caption_columns(("name", "negative_prompt", "num_captions")) == ()
    assert caption_columns(("title", "content_type", "short_text")) == ("short_text",)
    assert file_columns(("relative_path", "name", "pathology", "id")) == ("relative_path",)
    assert file_columns(("clip_score", "id", "clip_name")) == ("clip_name",)
    assert captions_in({"caption": float("nan")}) == () and captions_in({"caption": "['a', \"b's\"]"}) == ("a", "b's")
    assert captions_in({"caption": 7}) == ("7",) and captions_in({"words": "a"}) is None


@pytest.mark.parametrize("form", ["rows", "a list", "beside"])
def test_few_captions_of_a_clip_are_kept(tmp_path, form):
    """Its samples would store features of each."""
    texts = [f"a cat of {number}" for number in range(1000)]
    rows = {
        "rows": {"any.json": [{"file": "a.png", "text": text} for text in texts]},
        "a list": {"any.json": [{"file": "a.png", "text": texts}]},
        "beside": {"a.json": {"caption": texts}},
    }
    write(tmp_path, A | rows[form])
    listing = list_folder(tmp_path, "image")
    shorten_captions(listing, 512)
    assert listing.sources[0].captions == tuple(texts[:64])
    assert [(skip.source, skip.detail) for skip in listing.remarks] == [("a.png", "1,000 captions")]


def test_subtitles_are_named_as_such(tmp_path):
    write(tmp_path, {"a.mp4": b"", "a.en.srt": "1\n00:00:00,000 --> 00:00:02,000\na cat\n", "a.vtt": "WEBVTT\n"})
    listing = list_folder(tmp_path, "video")
    assert [source.captions for source in listing.sources] == [()]
    assert all("of parts of a clip" in skip.reason for skip in listing.not_used) and len(listing.not_used) == 2


DEEP = ["caption" + ".caption" * 30_000 + " = 1", "caption = " + "[" * 5000, "caption = " + "[" * 200 + "]" * 200,
        "[" + ".".join(["caption"] * 60) + "]\n" + "x." * 60 + "x = 1"]  # fmt: skip


@pytest.mark.parametrize("content", DEEP, ids=["a key", "open", "lists", "tables"])
def test_a_deep_toml_takes_no_time(tmp_path, content):
    write(tmp_path, A | {"b.png": PICTURE, "a.toml": content, "set.toml": content})
    listing = list_folder(tmp_path, "image")
    assert [source.name for source in listing.sources] == ["b.png"]
    assert ["more than 100 lists and tables" in skip.detail for skip in listing.skips] == [True]


def test_a_book_is_cut_with_a_count(tmp_path):
    book = "word " * 180_000
    listing = Listing(
        sources=[Source(name=n, kind="image", path="", caption=t) for n, t in (("a", book), ("b", "cat"))]
    )
    shorten_captions(listing, 512)
    assert [len(source.caption.split()) for source in listing.sources] == [512, 1]
    assert [(skip.source, skip.detail) for skip in listing.remarks] == [("a", "180,000 words")]
    assert len(shortened("字" * 100_000, 512)) == 8 * 512 and shortened("a b  c d", 3) == "a b  c"


@pytest.mark.parametrize("suffix", "avif jp2 tga qoi dib pgm jfif gif picture".split())
def test_pictures_of_other_suffixes_are_read(tmp_path, suffix):
    formats = {"jp2": "JPEG2000", "jfif": "JPEG", "pgm": "PPM", "picture": "PNG"}
    Image.linear_gradient("L").convert("RGB").save(tmp_path / f"a.{suffix}", formats.get(suffix, suffix.upper()))
    (source,) = list_folder(tmp_path, "image").sources
    assert read_image(source, Settings()).size == (256, 256)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\0\0\0\x18ftypheic", "HEIC (pip install pillow-heif)"),
        (b"\xff\x0a", "JPEG XL (pip install pillow-jxl-plugin)"),
        (b"<html>", "broken: it is no picture"),
        (b"\0\0\0\x18ftypisom", "broken: it is a video (MP4)"),
    ],
)
def test_what_is_no_picture_of_pillow_s_says_what_it_is(tmp_path, head, reason):
    (tmp_path / "a.jpg").write_bytes(head + bytes(100))
    (source,) = list_folder(tmp_path, "image").sources
    with pytest.raises(UnusableSourceError) as raised:
        read_image(source, Settings())
    assert str(raised.value).startswith(reason)


VIDEOS = {
    "mts": ("mpegts", "mpeg2video"),
    "3gp": ("3gp", "mpeg4"),
    "vob": ("vob", "mpeg2video"),
    "mxf": ("mxf", "mpeg2video"),
    "y4m": ("yuv4mpegpipe", "rawvideo"),
    "m1v": ("mpeg1video", "mpeg1video"),
    "mjpeg": ("mjpeg", "mjpeg"),
    "clip": ("matroska", "mpeg4"),
    "nut": ("nut", "mpeg4"),
    "film": ("nut", "mpeg4"),
}


@pytest.mark.parametrize(("suffix", "made"), VIDEOS.items(), ids=VIDEOS)
def test_videos_of_other_suffixes_are_read(tmp_path, suffix, made):
    with av.open(tmp_path / f"a.{suffix}", "w", format=made[0]) as container:
        stream = container.add_stream(made[1], rate=25)
        stream.height, stream.width = 96, 128
        stream.pix_fmt = "yuvj420p" if suffix == "mjpeg" else "yuv420p"
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((96, 128, 3), 40 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (source,) = list_folder(tmp_path, "video").sources
    timeline = read_timeline(source, Settings(fps=25.0))
    assert (timeline.height, timeline.width) == (96, 128) and len(timeline.pts) >= 5


# --- tar files ------------------------------------------------------------------------------------------------------

MEMBERS = {
    "usual": (["a.png", "a.txt=a cat"], {"a": "a cat"}, {}),
    "unsorted": (["a.png", "b.png", "b.txt=a dog", "a.txt=a cat"], {"a": "a cat", "b": "a dog"}, {}),
    "twice": (["a.png", "a.txt=a cat", "a.png", "a.txt=a dog"], {"a": "a cat", "a#2": "a dog"}, {}),
    "twice, of one caption": (["a.png", "a.txt=a cat", "a.png"], {}, {"a.png": "repeated key"}),
    "dots": (
        ["v1.0.png", "v1.0.txt=a cat", "v1.1.png", "v1.2.txt=a dog"],
        {"v1.0": "a cat", "v1.1": ""},
        {"v1.2.txt": ".txt of no sample"},
    ),
    "fields": (["0.input.png", "0.output.txt=a cat"], {"0": "a cat"}, {}),
    "two fields": (
        ["0.source.png", "0.target.png", "0.json={\"caption\": \"a cat\"}"],
        {"0": "a cat"},
        {"0.target.png": "second picture of a sample"},
    ),
    "both suffixes": (["a.png.txt=a cat", "a.png"], {"a": "a cat"}, {}),
    "json without a caption": (["a.png", "a.txt=a cat", "a.json={}"], {"a": "a cat"}, {}),
    "a mark": (["a.png", "a.txt=\ufeffa cat"], {"a": "a cat"}, {}),
    "others": (["a.png", "a.txt=a cat", "a.npy=x", "._a.png"], {"a": "a cat"}, {"a.npy": ".npy", "._a.png": "hidden"}),
    "a table": (["a.png", "a.txt=a cat", "m.csv=x"], {"a": "a cat"}, {"m.csv": ".csv: unpack tar files with tables"}),
    "by content": (["a.picture", "a.txt=a cat"], {"a": "a cat"}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("members", "wanted", "others"), MEMBERS.values(), ids=MEMBERS)
def test_members_of_a_tar_file(tmp_path, members, wanted, others):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for member in members:
            name, has_text, text = member.partition("=")
            content = text.encode() if has_text else PICTURE
            add(tar, name, content)
    if not wanted:
        with pytest.raises(UserError, match=next(iter(others.values()))):
            list_webdataset(tmp_path)
        return
    listing = list_webdataset(tmp_path)
    assert {source.name.removeprefix("s.tar/"): source.caption for source in listing.sources} == wanted
    found = {skip.source.removeprefix("s.tar/"): skip.reason for skip in (*listing.skips, *listing.not_used)}
    assert found == others


def archive(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in names:
            for suffix, data in ((".png", PICTURE), (".txt", f"a {name}".encode())):
                add(tar, name + suffix, data)
    return content.getvalue()


@pytest.mark.parametrize("padding", [0, 1, 18, 2000])
def test_joined_tar_files_are_read_to_the_last(padding, tmp_path):
    (tmp_path / "S.TAR").write_bytes(archive("cat") + bytes(512 * padding) + archive("dog") + archive("cow", "hen"))
    listing = list_webdataset(tmp_path)
    assert sorted(source.caption for source in listing.sources) == ["a cat", "a cow", "a dog", "a hen"]
    assert not listing.skips


@given(st.integers(0, 3), st.integers(0, 511), st.integers(1, 255))
@example(2, 0, 1)
def test_a_damaged_header_of_a_tar_file_is_told(tmp_path_factory, number, byte, change):
    """One that is changed where the sum of its bytes does not see it, in its padding, is none."""
    content = bytearray(archive("cat", "dog"))
    content[1024 * number + byte] ^= change
    path = tmp_path_factory.mktemp("tar") / "s.tar"
    path.write_bytes(content)
    try:
        listing = list_webdataset(path)
    except UserError as error:
        assert "broken tar file" in str(error)
    else:
        assert len(listing.sources) + len(listing.skips) >= 2


COMPRESSED = {"gz": "gunzip", "bz2": "bunzip2", "xz": "unxz"}


def test_a_compressed_tar_file_says_so(tmp_path):
    for name, kind, program in (("a.tar.gz", "gz", "gunzip"), *(("b.tar", *each) for each in COMPRESSED.items())):
        with tarfile.open(tmp_path / name, f"w:{kind}"):
            pass
        with pytest.raises(UserError, match=rf"compressed tar file \(unpack it: {program}\)"):
            list_webdataset(tmp_path)
        (tmp_path / name).unlink()


# --- links and litter -----------------------------------------------------------------------------------------------


def test_links_that_lead_out_are_counted_and_not_read(tmp_path):
    write(tmp_path, {"home/id_rsa": "secret", "home/private.png": PICTURE, "clips/sub/b.png": PICTURE})
    clips = tmp_path / "clips"
    write(clips, A)
    (clips / "a.txt").symlink_to(tmp_path / "home/id_rsa")
    (clips / "c.png").symlink_to(tmp_path / "home/private.png")
    (clips / "inner.png").symlink_to("sub/b.png")
    (clips / "home").symlink_to(tmp_path / "home")
    (clips / "again").symlink_to("sub")
    (clips / "lost.png").symlink_to("nowhere")
    (clips / ".ipynb_checkpoints").mkdir()
    write(clips, {".ipynb_checkpoints/a.png": PICTURE, "@eaDir/a.png": PICTURE, "._a.png": b"x"})
    assert captions(clips) == {"a.png": (), "inner.png": (), "sub/b.png": ()}
    leads_out = "link that leads out of the folder (--follow_links)"
    assert {skip.source: skip.reason for skip in list_folder(clips, "image").not_used} == {
        "a.txt": leads_out, "c.png": leads_out, "home": leads_out, "lost.png": "link to nothing",
        "again": "linked folder that is read elsewhere",
        ".ipynb_checkpoints/a.png": "hidden", "@eaDir/a.png": "hidden", "._a.png": "hidden",
    }  # fmt: skip
    followed = captions(clips, follow_links=True)
    assert followed["a.png"] == ("secret",) and {"c.png", "home/private.png"} <= followed.keys()
    (clips / "metadata.csv").write_text("file_name,text\nc.png,a cat\n")
    with pytest.raises(UserError, match=r"4 x hidden|x link that leads out of the folder \(--follow_links\)"):
        list_folder(clips, "image")
    assert captions(clips, follow_links=True) == {"c.png": ("a cat",)}


# --- tables as other tools write them -------------------------------------------------------------------------------

PAIRS = (("a", "a cat"), ("b", "a dog"))


def turns(text: str, role: str = "role", content: str = "content", answer: str = "assistant") -> list[dict]:
    return [{role: "system", content: "be brief"}, {role: "user", content: "what?"}, {role: answer, content: text}]


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


OF_TOOLS = {
    "ms-swift": {"train.jsonl": lines(*({"messages": turns(text), "images": [f"{n}.png"]} for n, text in PAIRS))},
    "ms-swift, responses": {
        "train.jsonl": lines(*({"query": "?", "response": text, "images": [f"{n}.png"]} for n, text in PAIRS))},
    "ms-swift, objects": {
        "a.jsonl": lines(*({"messages": turns(text), "images": [{"bytes": None, "path": f"{n}.png"}]}
                           for n, text in PAIRS))},
    "LLaMA-Factory": {
        "dataset_info.json": {"set": {"file_name": "set.json", "columns": {"images": "images"}}},
        "set.json": [{"conversations": turns(text, "from", "value", "GPT"), "images": [f"{n}.png"]}
                     for n, text in PAIRS]},
    "FastVideo": {"videos2caption.json": [{"path": f"{n}.png", "cap": [text], "fps": 24} for n, text in PAIRS]},
    "Karpathy": {"dataset.json": {"images": [
        {"filename": f"{n}.png", "split": "train", "sentences": [{"raw": text, "tokens": text.split()}]}
        for n, text in PAIRS]}},
    "lines named a document": {"metadata.json": lines(*({"file_name": f"{n}.png", "text": t} for n, t in PAIRS))},
    "a document named lines": {
        "metadata.jsonl": json.dumps([{"file_name": f"{n}.png", "text": t} for n, t in PAIRS], indent=1)},
    "columns": {"set.json": {"file_name": ["a.png", "b.png"], "text": ["a cat", "a dog"]}},
    "pandas": {"set.json": {"file_name": {"0": "a.png", "1": "b.png"}, "text": {"0": "a cat", "1": "a dog"}}},
    "after another list": {"set.json": {"info": [{}], "data": [{"image": f"{n}.png", "text": t} for n, t in PAIRS]}},
    "after numbered licenses": {"set.json": {
        "licenses": [{"id": 1, "name": "CC BY"}],
        "data": [{"image": f"{n}.png", "text": text} for n, text in PAIRS]}},
    "Flickr8k": {"captions.txt": CSV},
    "Flickr8k's tokens": {"captions.txt": "a.png#0\ta cat\nb.png#0\ta dog\n"},
    "no header": {"list.csv": "a.png,a cat\nb.png,a dog\n"},
    "alpaca": {"set.json": [{"instruction": "?", "output": text, "images": [f"{n}.png"]} for n, text in PAIRS]},
    "Flickr30k": {"results.csv": "image_name| comment_number| comment\na.png| 0| a cat\nb.png| 0| a dog\n"},
    "camels": {"metadata.csv": CSV.replace("file_name,text", "imagePath,longCaption")},
    "numbered": {"metadata.csv": CSV.replace("text", "caption_1")},
    "Excel's first line": {"metadata.csv": "sep=,\n" + CSV},
    "blanks before quotes": {"metadata.csv": 'file_name, text\na.png, "a cat"\nb.png, "a dog"\n'},
    "commas in a tsv": {"metadata.tsv": CSV},
    "suffix in capitals": {"metadata.csv": CSV.replace("png", "PNG")},
    "Vript": {"vript.jsonl": lines(*({"clip_id": n, "caption": {"shot_type": "Close-up", "content": text}}
                                     for n, text in PAIRS))},
    "VATEX": {"vatex.json": [{"videoID": n, "enCap": [text], "chCap": ["x"]} for n, text in PAIRS]},
    "ActivityNet": {"train.json": {n: {"timestamps": [[0, 8]], "sentences": [text]} for n, text in PAIRS}},
    "Charades": {"train.csv": CSV.replace("file_name,text", "id,descriptions").replace(".png", "")},
    "OpenHumanVid": {"a.csv": CSV.replace("file_name,text", "path,summary_caption")},
    "titles": {"a.csv": CSV.replace("text", "title")},
    "WebVid": {"2M_train.csv": "videoid,contentUrl,page_dir,name\na,http://x/a,1,a cat\nb,http://x/b,2,a dog\n"},
    "compressed": {"metadata.csv.gz": gzip.compress(CSV.encode())},
    "compressed lines": {
        "all.jsonl.gz": gzip.compress(lines(*({"image": n, "text": text} for n, text in PAIRS)).encode())},
    "split by pandas": {"table.json": {"columns": ["file_name", "text"], "index": [0, 1], "data": PAIRS}},
    "separators at the ends": {"metadata.csv": CSV.replace("\n", ",\n").replace("text,", "text")},
    "an empty column": {"metadata.csv": CSV.replace("text", "caption,long_caption").replace(",a ", ",,a ")},
    "marks before the header": {"metadata.csv": "\ufeff\ufeff\u200b" + CSV},
    "comments and commas": {"metadata.json": "// pets\n[" + "".join(
        f'{json.dumps({"image": f"{n}.png", "text": text})}, /* {n} */\n' for n, text in PAIRS) + "]"},
    "lines that end in commas": {"metadata.jsonl": "// pets\n" + "".join(
        f'{{"image": "{n}.png", "text": "{text}"}},\n' for n, text in PAIRS)},
    "jq": {"metadata.jsonl": "\n".join(
        json.dumps({"image": f"{n}.png", "text": text}, indent=2) for n, text in PAIRS)},
    "Qwen": {"train.jsonl": lines(*(
        {"messages": turns([{"type": "text", "text": text}, {"type": "image", "image": f"file://{n}.png"}])}
        for n, text in PAIRS))},
    "OpenAI": {"train.jsonl": lines(*(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{n}.png"}}]},
                      {"role": "assistant", "content": text}]} for n, text in PAIRS))},
    "lists in a CSV": {"a.csv": 'images,text\n"[""a.png""]",a cat\n"[""b.png""]",a dog\n'},
}  # fmt: skip


@pytest.mark.parametrize("files", OF_TOOLS.values(), ids=OF_TOOLS)
def test_tables_of_other_tools(tmp_path, files):
    write(tmp_path, A | B | files)
    assert captions(tmp_path) == {"a.png": ("a cat",), "b.png": ("a dog",)}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_internvid(form, tmp_path):
    name = "-x_Y_00:00:30.797_00:00:36.002"
    row = dict(zip(("YoutubeID", "Start_timestamp", "End_timestamp"), name.rsplit("_", 2), strict=True))
    row |= {"Caption": "a cat", "Aesthetic_Score": 4.5}
    table = lines(row) if form == "jsonl" else "".join(",".join(map(str, each)) + "\n" for each in (row, row.values()))
    write(tmp_path, {f"clips/{name}.png": PICTURE, f"all.{form}": table})
    assert captions(tmp_path) == {f"clips/{name}.png": ("a cat",)}


@pytest.mark.parametrize("name", ["url", "file_name"])
def test_a_table_of_urls_says_what_fetches_them(name, tmp_path):
    write(tmp_path, A | {"metadata.csv": f"{name},text\nhttps://example.org/a.png,a cat\n"})
    with pytest.raises(UserError, match=r"URL.*as Parquet.*megadit prepare hf"):
        list_folder(tmp_path, "image")


@pytest.mark.parametrize("missing", ["nan", "NULL", "N/A", "None"])
def test_what_pandas_reads_as_missing_is_no_caption(missing, tmp_path):
    write(tmp_path, A | B | {"metadata.csv": CSV.replace("a cat", missing)})
    assert captions(tmp_path) == {"a.png": (), "b.png": ("a dog",)}


@pytest.mark.parametrize("content", ['{"caption": "a cat",} // mine', "\ufeff\ufeffa cat"])
def test_captions_beside_files_as_editors_leave_them(content, tmp_path):
    write(tmp_path, A | {"a.json" if content[0] == "{" else "a.txt": content})
    assert captions(tmp_path) == {"a.png": ("a cat",)}


def test_a_row_of_several_files_is_left_out(tmp_path):
    row = {"messages": turns("two pets"), "images": ["a.png", "b.png"]}
    write(tmp_path, A | B | {"a.jsonl": lines(row, {"images": ["b.png"], "messages": turns("a dog")})})
    listing = list_folder(tmp_path, "image")
    assert [(source.name, source.caption) for source in listing.sources] == [("b.png", "a dog")]
    assert [(skip.source, skip.reason) for skip in listing.skips] == [("row 0 of a.jsonl", "row of several files")]


WITHOUT_CAPTIONS = {
    "scores": {"scores.csv": "file_name,score\na.png,1\nb.png,2\n"},
    "scores without a header": {"scores.csv": "a.png,1\nb.png,2\n"},
    "splits without a header": {"splits.csv": "a.png,train\nb.png,train\n"},
    "sizes": {"sizes.json": {"a.png": [8, 8], "b.png": [8, 8]}},
    "kohya's buckets": {"meta_lat.json": {n: {"train_resolution": [8, 8]} for n in "ab"}},
    "boxes": {"boxes.json": {
        "images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1]}]}},
    "files of captions": {"dataset_info.json": {"set": {"file_name": "a.txt", "prompt": "x"}}},
}  # fmt: skip


@pytest.mark.parametrize("table", WITHOUT_CAPTIONS.values(), ids=WITHOUT_CAPTIONS)
def test_a_table_without_captions_hides_none_beside_the_files(tmp_path, table):
    write(tmp_path, A | B | {"a.txt": "a cat", "b.txt": "a dog"} | table)
    assert captions(tmp_path) == {"a.png": ("a cat",), "b.png": ("a dog",)}
    (skip,) = list_folder(tmp_path, "image").not_used
    assert skip.source in table and skip.reason.endswith("of no image, or without captions")


# --- members of tar files under other names -------------------------------------------------------------------------

PAIRED = {
    "accents apart": [normalize("NFC", "dé/é.png"), normalize("NFD", "dé/é.txt=a cat")],
    "added from elsewhere": ["./d/a.png", "d//a.txt=a cat"],
    "whole paths": ["/d/a.png", "d/a.txt=a cat"],
    "backslashes": ["d\\a.png", "d/a.txt=a cat"],
    "other pictures of it": ["a.canny.png", "a.depth.png", "a.jpg", "a.mask.png", "a.txt=a cat"],
    "metadata": ["a.png", 'a.metadata.json={"caption": "a cat"}'],
}


def tar_of(path: Path, members: list[str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            name, has_text, text = member.partition("=")
            info, content = tarfile.TarInfo(name), text.encode() if has_text else PICTURE
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("members", PAIRED.values(), ids=PAIRED)
def test_captions_of_tar_files_are_found_under_other_forms_of_a_name(tmp_path, members):
    (source,) = list_webdataset(tar_of(tmp_path / "s.tar", members)).sources
    first = next(name for name in ("a.jpg", *members) if name in members)
    assert source.caption == "a cat" and source.name == f"s.tar/{first[:-4]}"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
IN_PLACE = {
    "pointer": (POINTER, "a pointer of Git LFS.*git lfs pull"),
    "page": (b"<html>404", "a web page.*download"),
    "nothing": (b"", "an empty file"),
}


@pytest.mark.parametrize(("content", "message"), IN_PLACE.values(), ids=IN_PLACE)
def test_what_lies_in_a_file_s_place_is_named(tmp_path, content, message):
    write(tmp_path, {"s.tar": content, "a.png": content, "a.mp4": content})
    with pytest.raises(UserError, match=message):
        list_webdataset(tmp_path / "s.tar")
    for kind, read in (("image", read_image), ("video", read_timeline)):
        (source,) = list_folder(tmp_path, kind).sources
        with pytest.raises(UnusableSourceError, match=message):
            read(source, Settings())


ARCHIVES = {"a.tar.zst": "unzstd", "a.tar.lz4": "unlz4", "a.zip": "unzip"}


@pytest.mark.parametrize(("name", "program"), ARCHIVES.items())
def test_each_archive_has_its_program(tmp_path, name, program):
    write(tmp_path, {name: b"?"})
    with pytest.raises(UserError, match=rf"unpack it: {program}\)"):
        list_webdataset(tmp_path)


def jpeg(grey: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (64, 48), grey).save(content, "jpeg")
    return content.getvalue()


FRAMES = [jpeg(8 * number) for number in range(6)]
CAMERAS = {
    "joined": b"".join(FRAMES),
    "of a server": b"".join(b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + frame + b"\r\n" for frame in FRAMES),
}


@pytest.mark.parametrize("content", CAMERAS.values(), ids=CAMERAS)
@pytest.mark.parametrize("name", ["a.mp4", "a.cgi", "a"])
def test_jpegs_in_a_row_are_a_video(tmp_path, name, content):
    write(tmp_path, {name: content, "b": FRAMES[0]})
    sources = {source.name: source for source in list_folder(tmp_path, "video").sources}
    assert [*sources] == [name] and len(read_timeline(sources[name], Settings(fps=25.0)).pts) == 6


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("length", ["its own", "to the end"])
def test_a_jpeg_2000_is_turned_as_its_exif_says(tmp_path, orientation, length):
    picture, exif, content = Image.linear_gradient("L").resize((32, 16)), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    picture.save(content, "JPEG2000", num_resolutions=1)
    content, box = content.getvalue(), b"uuidJpgTiffExif->JP2" + exif.tobytes()[6:]
    stream = content.index(b"jp2c") - 4
    box = (len(box) + 4).to_bytes(4, "big") + box
    last = bytes(4) + content[stream + 4 :] if length == "to the end" else content[stream:]
    write(tmp_path, {"a.jp2": content[:stream] + box + last, "b.jp2": content[:stream] + last})
    turned, plain = (read_image(source, Settings()) for source in list_folder(tmp_path, "image").sources)
    turn = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}[orientation]
    assert np.array_equal(turned, plain if turn is None else plain.transpose(turn))


@pytest.mark.parametrize(("count", "found"), [(10, b"Exif\0\0MM"), (2000, b"")])
def test_few_boxes_of_a_jpeg_2000_are_looked_at(count, found):
    """A file of nothing but boxes holds nobody up."""
    box = b"uuidJpgTiffExif->JP2MM"
    content = count * b"\0\0\0\x08free" + (len(box) + 4).to_bytes(4, "big") + box
    exif = _exif_of_boxes(io.BytesIO(content))
    assert exif[: len(found)] == found and bool(exif) == bool(found)


LITTER = [
    "b.png.part",
    "c.jpg.crdownload",
    "d.tmp",
    "e.png~",
    "f.png.bak",
    "a-masklabel.png",
    "@tmp/a.png",
    "#snapshot/a.png",
]


def test_unfinished_downloads_copies_and_masks_are_no_pictures(tmp_path):
    write(tmp_path, A | dict.fromkeys(LITTER, PICTURE))
    assert captions(tmp_path) == {"a.png": ()}
    assert sorted(skip.source for skip in list_folder(tmp_path, "image").not_used) == sorted(LITTER)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"Exif\0\0II", b"Exif\0\0nothing", b"http://ns.adobe.com/xap/1.0/\0<x/>"])
def test_a_picture_with_damaged_exif_is_read(tmp_path, format, exif):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png", format, exif=exif, quality=90)
    (source,) = list_folder(tmp_path, "image").sources
    assert read_image(source, Settings()).getpixel((4, 4))[0] > 240
