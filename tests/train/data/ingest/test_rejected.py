"""`megadit info DATA --html PAGE`: what was kept and what was left out, on one page that needs no source any more."""

import base64
import io
import re
import shutil
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from megadit.infer.decoding.containers import CONTAINERS
from megadit.infer.inspect import info
from megadit.infer.inspect.dataset_sheet import draw_strip
from megadit.train.data.ingest.plan import Skip
from megadit.train.data.ingest.rejected import choose
from megadit.train.data.prepare import command as prepare

FIGURE = re.compile(
    r'<figure>(?:<img alt="[^"]*" src="data:image/jpeg;base64,([^"]+)">)?<figcaption>(.*?)</figcaption>'
)
OPTIONS = ("--height", "64", "--width", "64", "--num_frames", "9", "--channels", "8", "--cut", "length")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, make_clip, make_pan):
    """Of four videos one is kept, but for the rest of it, which is red."""
    root = tmp_path_factory.mktemp("left_out")
    source = root / "videos"
    source.mkdir()
    red = np.zeros((5, 96, 128, 3), np.uint8)
    red[..., 0] = 220
    make_clip(source / "good.mp4", np.concatenate([make_pan("china.jpg", 9, 96, 128, start=(100, 60)), red]))
    make_clip(source / "still.mp4", np.repeat(make_pan("flower.jpg", 1, 96, 128), 9, axis=0))
    make_clip(source / "dark.mp4", make_pan("flower.jpg", 9, 96, 128) // 40)
    (source / "words.mp4").write_text("this is not a video\n" * 100)
    (source / "good.txt").write_text("a <b>roof</b>")
    (source / "still.txt").write_text("<script>alert(1)</script>")
    for more in (("--num_workers", "0", "--stages", "fetch,scan,select,encode"), ("--num_workers", "1")):
        assert prepare.main(["videos", str(source), str(root / "out"), *OPTIONS, *more]) == 0
    shutil.rmtree(source)
    return root / "out"


def pictures(page: str) -> dict[str, tuple[np.ndarray | None, str]]:
    """(picture, words) below each heading."""
    found = {}
    for part in page.split("<h2>")[1:]:
        heading, _, rest = part.partition("</h2>")
        for content, words in FIGURE.findall(rest):
            picture = Image.open(io.BytesIO(base64.b64decode(content)), formats=("JPEG",)) if content else None
            found[heading] = (None if picture is None else np.asarray(picture), words)
    return found


def test_the_page_shows_what_was_kept_and_what_was_not_and_why(dataset, tmp_path):
    assert info.main([str(dataset), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    shown = pictures(text)
    headings = {f"Left out: {reason}, 1 of 1" for reason in ("static", "black", "broken", "rest of a scene")}
    assert shown.keys() == {"Kept", *headings}
    strip, words = shown["Kept"]
    assert words.startswith("a &lt;b&gt;roof&lt;/b&gt;") and "9 frames of 64x64" in words and strip.std() > 20
    picture, words = shown["Left out: static, 1 of 1"]
    assert picture.shape[0] == 128 and picture.std() > 20
    assert words.startswith("&lt;script&gt;") and "still.mp4 at 0.00 s" in words
    red, words = shown["Left out: rest of a scene, 1 of 1"]
    assert np.allclose(red.mean(axis=(0, 1)), [220, 0, 0], atol=12) and "good.mp4 at 0.38 s" in words
    assert shown["Left out: black, 1 of 1"][0].mean() < 12
    picture, words = shown["Left out: broken, 1 of 1"]
    assert picture is None and words.startswith("(no caption)") and "words.mp4" in words
    assert "<script>" not in text and "http" not in text and "<td>static<td>1<td>0 s" in text


def test_a_data_set_of_which_nothing_was_written_down_has_a_page(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    shutil.rmtree(copy / "prepare" / "left_out")  # by a version that drew none
    assert info.main([str(copy), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert pictures(text).keys() == {"Kept"} and "<td>static<td>1" in text
    shutil.rmtree(copy / "prepare")
    assert info.main([str(copy), "--html", str(tmp_path / "page.html")]) == 0
    assert "Not recorded" in (tmp_path / "page.html").read_text()


def test_notes_of_strangers_are_refused(dataset, tmp_path, capsys):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    for line in ("{", "[]", '{"reason": 1}', '{"seconds": "1"}', '{"caption": {}}'):
        (copy / "prepare" / "skips.jsonl").write_text(line)
        assert info.main([str(copy), "--html", str(tmp_path / "page.html")]) == 2
        assert "line 1" in capsys.readouterr().err and not (tmp_path / "page.html").exists()
    for place in ("prepare/left_out", "prepare"):  # a link to somebody's own, of which the page would show pictures
        shutil.rmtree(copy / place)
        (copy / place).symlink_to(dataset / place)
        assert info.main([str(copy), "--html", str(tmp_path / "page.html")]) == 2
        assert "leads elsewhere" in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_a_sample_is_drawn_within_limits_and_names_no_other_file(monkeypatch):
    """A playlist by the name of a video, a picture of one line, what is no latents."""
    opened, real = [], av.open
    monkeypatch.setattr(av, "open", lambda *args, **more: opened.append(more["options"]) or real(*args, **more))
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    for suffix in ("mp4", "png"):
        assert "decoded: cannot read it: broken" in draw_strip("a", {"json": b"{}", suffix: playlist}, None)[1]
    assert [each["format_whitelist"] for each in opened] == [CONTAINERS] * 2
    Image.new("RGB", (50_000, 1)).save(line := io.BytesIO(), "PNG")
    strip_1HWC, words = draw_strip("a", {"json": b"{}", "png": line.getvalue()}, None)
    assert "an image of 1x50000" in words and strip_1HWC.shape[2] <= 1600
    latents = save({"latent": torch.zeros(3)})  # more of them: `megadit evaluate` reads the same
    tokenizer = SimpleNamespace(latent_channels=8)
    assert "has latents torch.float32 [3]" in draw_strip("a", {"json": b"{}", "safetensors": latents}, tokenizer)[1]


def test_a_dozen_of_each_reason_are_shown_from_all_of_it():
    skips = [Skip(source=f"{number:03d}", reason=("many", "few")[number % 10 == 0]) for number in range(100)]
    chosen = choose(skips)
    assert [skip.source for skip in chosen if skip.reason == "few"] == [f"{10 * number:03d}" for number in range(10)]
    many = [skip.source for skip in chosen if skip.reason == "many"]
    assert len(many) == len(set(many)) == 12 and many[0] == "001" and many[-1] > "090"
