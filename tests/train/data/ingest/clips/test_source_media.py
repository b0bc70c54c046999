"""`megadit prepare --source_media`: files as they were found, beside the samples, to encode others from later."""

import io
import json
import shutil
import tarfile
from contextlib import redirect_stdout

import numpy as np
import pytest
from PIL import Image

from megadit.infer.inspect import info
from megadit.train.data.ingest.clips import source_media as source_media
from megadit.train.data.ingest.clips.source_media import source_media_bytes
from megadit.train.data.loader import build_train_loader
from megadit.train.data.prepare import command as prepare
from tests.train.data.ingest.clips.test_encodings import run_of

SIZES = ("--num_workers", "0", "--val_share", "0", "--tokenizer", "pixels", "--sizes")
VIDEO = (*SIZES, "32x32", "--num_frames", "9", "--source_media")
IMAGE = (*SIZES, "8x8", "--text_encoder", "labels", "--source_media")


def members(root, folder="source_media") -> dict[str, bytes]:
    found = {}
    for path in sorted((root / folder).glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


def by_source(found: dict[str, bytes]) -> dict[str, tuple[str, bytes]]:
    """Source -> suffix and bytes of its source media; several clips of one count as `name#1`."""
    kept = {}
    for name, content in found.items():
        if name.endswith(".json"):
            source, key = json.loads(content)["source"], name[: -len(".json")]
            file = next(other for other in found if other.startswith(f"{key}.") and other != name)
            kept[f"{source}#{int(key.rpartition('-')[2])}"] = (file.rpartition(".")[2], found[file])
    return kept


@pytest.fixture(scope="module")
def clips(tmp_path_factory, make_clip, make_pan):
    root = tmp_path_factory.mktemp("source_media") / "videos"
    root.mkdir()
    make_clip(root / "short.mp4", make_pan("china.jpg", 12, 96, 128, start=(100, 60)))
    make_clip(root / "long.mp4", make_pan("flower.jpg", 20, 96, 128, start=(60, 200)))
    frames = [Image.fromarray(frame) for frame in make_pan("china.jpg", 10, 80, 80, start=(150, 300), flip=1)]
    frames[0].save(root / "moving.webp", save_all=True, append_images=frames[1:], duration=50)
    for name in ("short", "long", "moving"):
        (root / f"{name}.txt").write_text(name)
    return root


@pytest.fixture(scope="module")
def kept(clips, tmp_path_factory):
    """(a data set of them, what its preparation said)."""
    out = tmp_path_factory.mktemp("source_media") / "out"
    with redirect_stdout(io.StringIO()) as said:
        assert prepare.main(["videos", str(clips), str(out), *VIDEO]) == 0
    return out, said.getvalue()


def test_files_stay_as_they_were_and_cut_clips_are_kept_as_cut(clips, kept, tmp_path, capsys):
    (out, said), plain = kept, tmp_path / "plain"
    whole = sum((clips / name).stat().st_size for name in ("short.mp4", "moving.webp"))
    assert f"source media: 2 files of about {whole / 1e6:,.1f} MB together, and 2 clips that are cut out" in said
    assert f"source media: {source_media_bytes(out):,} bytes" in said
    files = by_source(members(out))
    assert files["short.mp4#0"] == ("mp4", (clips / "short.mp4").read_bytes())
    assert files["moving.webp#0"] == ("webp", (clips / "moving.webp").read_bytes())
    assert {files[f"long.mp4#{number}"][0] for number in (0, 1)} == {"mp4"} and len(files) == 4
    assert info.main([str(out)]) == 0
    told = capsys.readouterr().out
    assert "source_media" in told and "1, " in told
    assert prepare.main(["videos", str(clips), str(plain), *VIDEO[:-1]]) == 0
    assert (out / "train-000000.tar").read_bytes() == (plain / "train-000000.tar").read_bytes()
    assert (out / ".nv-meta" / ".info.json").read_bytes() == (plain / ".nv-meta" / ".info.json").read_bytes()


def test_another_tokenizer_encodes_what_was_kept(kept, tmp_path):
    (out, _), again = kept, tmp_path / "again"
    other = ("--tokenizer", "haar", "--channels", "16")
    assert prepare.main(["webdataset", str(out), str(again), *VIDEO[:-1], *other]) == 0
    first, second = (json.loads((root / "report.json").read_text()) for root in (out, again))
    assert first["samples"] == second["samples"] and second["without_caption"] == 0
    manifest = json.loads((again / "megadit.json").read_text())
    assert manifest["latent_channels"] == 16


def test_what_is_missing_is_made_again_as_it_was(clips, kept, tmp_path):
    """Killed between the two files of a shard, or before them."""
    out = shutil.copytree(kept[0], tmp_path / "out")
    command = ["videos", str(clips), str(out), *VIDEO]
    shard, media = out / "train-000000.tar", out / "source_media" / "train-000000.tar"
    before = shard.read_bytes(), media.read_bytes()
    for lost in ([shard], [media], [shard, media]):
        (out / "megadit.json").unlink()
        for path in lost:
            path.unlink()
        assert prepare.main(command) == 0
        assert (shard.read_bytes(), media.read_bytes()) == before
    parts = tmp_path / "parts"
    command = ["videos", str(clips), str(parts), *VIDEO]
    assert prepare.main([*command, "--stages", "fetch,scan,select"]) == 0
    for part in ("1/2", "0/2"):
        assert prepare.main([*command, "--shard", part, "--stages", "encode"]) == 0
    assert prepare.main(command) == 0
    assert members(parts) == members(out)


def test_pictures_keep_their_bytes_and_training_does_not_open_them(tmp_path, monkeypatch):
    for name, suffix in (("owl", "jpg"), ("bee", "webp"), ("fox", "gif")):
        (tmp_path / "in" / name).mkdir(parents=True)
        grain = np.random.default_rng(len(suffix) + ord(name[0])).integers(0, 255, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(grain).save(tmp_path / "in" / name / f"0.{suffix}")
    gif = tmp_path / "in" / "fox" / "0.gif"
    gif.rename(gif.with_suffix(".png"))  # a name that says something else
    options = [*IMAGE, "--captions", "folders", "--max_duplicate_bits", "-1"]
    assert prepare.main(["images", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    kept = by_source(members(tmp_path / "out"))
    assert kept["owl/0.jpg#0"] == ("jpeg", (tmp_path / "in/owl/0.jpg").read_bytes())
    assert kept["bee/0.webp#0"] == ("webp", (tmp_path / "in/bee/0.webp").read_bytes())
    assert kept["fox/0.png#0"][0] == "png" and Image.open(io.BytesIO(kept["fox/0.png#0"][1])).size == (8, 8)
    monkeypatch.setattr(source_media, "MOST_BYTES", 10)  # all are larger: pixels are kept in their place
    assert prepare.main(["images", str(tmp_path / "in"), str(tmp_path / "large"), *options]) == 0
    assert {suffix for suffix, _ in by_source(members(tmp_path / "large")).values()} == {"png"}
    for path in (tmp_path / "out" / "source_media").iterdir():
        path.write_bytes(b"whoever opens this fails")
    assert next(iter(build_train_loader(run_of(tmp_path / "out", "latents"), rank=0, world_size=1)))
