"""Animated WebP, PNG and GIF files are videos with their own frame rate; still ones are none."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadit.infer.decoding import animations
from megadit.infer.decoding.rules import TRANSPARENT, UnusableSourceError
from megadit.train.data.ingest.clips.decode import read_frames, read_image, read_timeline
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.ingest.sources.sniff import kinds_of
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.prepare import command as prepare

SETTINGS = Settings(sizes=((64, 64),), num_frames=(9,), fps=60.0)
MILLISECONDS = 40
OPTIONS = ("--sizes", "64x64", "--num_frames", "9", "--num_workers", "0", "--channels", "8")


def write(path: Path, frames: np.ndarray, **options) -> Path:
    pictures = [Image.fromarray(frame) for frame in frames]
    lossless = {"lossless": True} if path.suffix == ".webp" else {}
    options = {"duration": MILLISECONDS, "loop": 0} | lossless | options
    pictures[0].save(path, save_all=True, append_images=pictures[1:], **options)
    return path


def source(path: Path) -> Source:
    return Source(name=path.name, kind="video", path=str(path))


@pytest.mark.parametrize("suffix", [".webp", ".png", ".apng", ".gif"])
def test_an_animation_is_a_video_with_its_rate_and_frames(tmp_path, make_pan, suffix):
    frames = make_pan("china.jpg", 12, 64, 64)
    path = write(tmp_path / f"a{suffix}", frames)
    timeline = read_timeline(source(path), SETTINGS)
    assert timeline.fps == pytest.approx(1000 / MILLISECONDS) and len(timeline.pts) == 12
    decoded = read_frames(source(path), SETTINGS, tuple(timeline.pts), 64, 64)
    off = np.abs(decoded.astype(int) - frames).mean()
    assert off < (12 if suffix == ".gif" else 0.5), off  # a GIF has 256 colours


@pytest.mark.parametrize("suffix", [".webp", ".png", ".gif", ".avif"])
def test_a_still_picture_does_not_move(tmp_path, make_pan, suffix):
    path = tmp_path / f"still{suffix}"
    Image.fromarray(make_pan("china.jpg", 1, 64, 64)[0]).save(path)
    assert not animations.is_animated(path.read_bytes()[: animations.HEAD_BYTES])
    moving = write(tmp_path / f"moving{suffix}", make_pan("china.jpg", 3, 64, 64))
    assert animations.is_animated(moving.read_bytes()[: animations.HEAD_BYTES])
    for name in (moving.name, "moving.of_no_suffix"):
        assert kinds_of(name, lambda: moving.read_bytes()[: animations.HEAD_BYTES])[0] == "video"


def test_frames_of_different_length_are_shown_as_long_as_they_last(tmp_path, make_pan):
    frames = make_pan("china.jpg", 4, 64, 64, step=(20, 30))
    path = write(tmp_path / "a.webp", frames, duration=[100, 300, 100, 100])
    timeline = read_timeline(source(path), Settings(sizes=((64, 64),), fps=10.0))
    assert timeline.fps == pytest.approx(10) and timeline.pts.count(100) == 3


@pytest.mark.parametrize("size", [4, 30, 200, 2000])
def test_a_damaged_webp_is_unusable_or_shorter(tmp_path, make_pan, size):
    whole = write(tmp_path / "a.webp", make_pan("china.jpg", 12, 64, 64))
    cut = tmp_path / "cut.webp"
    cut.write_bytes(whole.read_bytes()[:size])
    with pytest.raises(UnusableSourceError):
        read_timeline(source(cut), SETTINGS)


def test_a_webp_too_large_to_try_is_not_decoded(tmp_path, make_pan, monkeypatch):
    path = write(tmp_path / "a.webp", make_pan("china.jpg", 3, 64, 64))
    with pytest.raises(UnusableSourceError, match="0.0041 megapixels|at most"):
        read_timeline(source(path), Settings(sizes=((8, 8),), max_megapixels=0.001))
    monkeypatch.setattr(animations, "MAX_BYTES", 100)
    with pytest.raises(UnusableSourceError, match="more than 0 MiB"):
        read_timeline(source(path), SETTINGS)


def test_a_folder_of_animations_becomes_clips(tmp_path, make_pan, capsys):
    """Of nine that differ, each of them under many names; the still picture among them is no video."""
    folder = tmp_path / "stickers"
    folder.mkdir()
    for number in range(9):
        frames = make_pan("flower.jpg", 9, 64, 64, start=(150, 40 * number))
        made = write(tmp_path / "a.webp", frames, lossless=False, quality=60, method=0, duration=50).read_bytes()
        for name in range(number, 90, 9):
            (folder / f"{name}.webp").write_bytes(made)
    Image.fromarray(frames[0]).save(folder / "still.webp")
    options = ("--stages", "fetch,scan", "--min_motion", "0", "--cut", "length")
    assert prepare.main(["videos", str(folder), str(tmp_path / "out"), *OPTIONS, *options]) == 0
    lines = [line for path in (tmp_path / "out/prepare/scan").iterdir() for line in path.read_text().splitlines()]
    clips = [clip for line in lines for clip in json.loads(line)["clips"]]
    assert len(lines) == len(clips) == 90
    assert {clip["fps"] for clip in clips} == {20.0} and {len(clip["pts"]) for clip in clips} == {9}
    (tmp_path / "stills").mkdir()
    Image.fromarray(frames[0]).save(tmp_path / "stills/a.webp")
    assert prepare.main(["videos", str(tmp_path / "stills"), str(tmp_path / "none"), *OPTIONS, *options]) == 2
    assert "holds no videos to use: 1 x image" in capsys.readouterr().err
    for name in ("0.webp", "1.webp", "still.webp"):
        (tmp_path / "stills" / name).write_bytes((folder / name).read_bytes())
    Image.fromarray(frames[0]).save(tmp_path / "stills/one.gif")
    assert [skip.source for skip in list_folder(tmp_path / "stills", "image").remarks] == ["0.webp", "1.webp"]


def test_folders_are_labels(tmp_path, make_pan):
    """As in ImageNet, with the file of words that comes with it, and without."""
    root = tmp_path / "images"
    for number, folder in enumerate(("n01440764", "n01443537", "golden_retriever")):
        (root / folder).mkdir(parents=True)
        Image.fromarray(make_pan("china.jpg", 1, 80, 80, start=(200, 90 * number))[0]).save(root / folder / "1.jpg")
    (root / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\n")
    options = ("--captions", "folders", "--num_frames", "1", "--stages", "fetch")
    assert prepare.main(["images", str(root), str(tmp_path / "out"), *OPTIONS, *options]) == 0
    lines = (tmp_path / "out/prepare/sources.jsonl").read_text().splitlines()
    captions = {row["name"]: row["caption"] for row in map(json.loads, lines)}
    assert captions == {
        "n01440764/1.jpg": "tench, Tinca tinca",
        "n01443537/1.jpg": "goldfish",
        "golden_retriever/1.jpg": "golden retriever",
    }


@pytest.mark.parametrize("name", ["still.png", "still.webp", "moving.webp", "moving.png", "moving.gif"])
def test_what_is_transparent_shows_the_background(tmp_path, name):
    """Stills and clips alike; what hides behind transparency is never seen."""
    pixels = np.full((64, 64, 4), (0, 200, 0, 255), np.uint8)
    pixels[:, 32:] = (90, 0, 90, 0)
    frames = np.stack([np.roll(pixels, 4 * number, axis=0) for number in range(3)])
    frames[:, :4, :4] = np.array([[255, 0, 0, 255], [0, 0, 255, 255], [250, 250, 0, 255]])[:, None, None]
    path = tmp_path / name
    if "moving" in name:
        write(path, frames, **({"disposal": 2} if name.endswith("gif") else {}))
    else:
        Image.fromarray(frames[0]).save(path, **({"lossless": True} if name.endswith("webp") else {}))
    for background, colour in (("black", (0, 0, 0)), ("white", (255, 255, 255)), ("#8040ff", (128, 64, 255))):
        settings = Settings(sizes=((64, 64),), fps=60.0, background=background)
        if "moving" in name:
            timeline = read_timeline(source(path), settings)
            assert timeline.is_transparent and len(timeline.pts) == 3
            shown = read_frames(source(path), settings, tuple(timeline.pts), 64, 64)[:, 20:44]
        else:
            image = read_image(source(path), settings)
            assert TRANSPARENT in image.info
            shown = np.array(image)[None, 20:44]
        assert np.abs(shown[:, :, 36:].astype(int) - colour).max() <= 2
        assert np.abs(shown[:, :, :28].astype(int) - (0, 200, 0)).max() <= 6


def test_what_hides_nothing_is_left_as_it_is(tmp_path, make_pan):
    pixels = make_pan("china.jpg", 3, 64, 64)
    opaque = np.concatenate([pixels, np.full((3, 64, 64, 1), 255, np.uint8)], axis=3)
    for frames, name in ((pixels, "a.png"), (opaque, "b.png")):
        write(tmp_path / name, frames)
    decoded = []
    for name in ("a.png", "b.png"):
        timeline = read_timeline(source(tmp_path / name), Settings(background="white"))
        assert not timeline.is_transparent
        decoded.append(read_frames(source(tmp_path / name), Settings(background="white"), tuple(timeline.pts), 64, 64))
    assert np.array_equal(*decoded)
