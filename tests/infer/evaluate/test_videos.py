"""Sets of videos: folders, data sets, what is in memory; what is looked at; what is refused."""

import io
import json
import os
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from megadit.infer.evaluate import videos as videos_module
from megadit.infer.evaluate.extractors.base import resized
from megadit.infer.evaluate.report.pictures import clips_at
from megadit.infer.evaluate.videos import Clip, open_videos, prompts_of, videos_in_memory
from megadit.infer.evaluate.window import thinned, window_of, windowed
from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pictures import picture_files
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.writer import DatasetWriter

from .conftest import write_folder

FILM = torch.zeros(24, 50, 30, 30, dtype=torch.float8_e4m3fn)
"""Latents that a tokenizer makes more bytes of than are read."""


def pixels(count=5, frames=5, height=8, width=12, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, frames, height, width, 3), dtype=np.uint8)


def test_a_folder_in_order_with_captions_and_a_key_of_its_content(tmp_path):
    folder = write_folder(tmp_path / "a", 18)
    found = open_videos(folder)
    assert (found.count, len(found.parts)) == (18, 2)
    assert found.prompts[3] == "a square of the colour 3"
    assert [clip.prompt for clip in found.parts[1].read()] == found.prompts[16:]
    assert open_videos(folder).key == found.key == open_videos(folder.rename(tmp_path / "b")).key
    (tmp_path / "b" / "003.txt").write_text("another caption")
    assert open_videos(tmp_path / "b").key != found.key
    assert open_videos(tmp_path / "b", 4).count == 4


@pytest.mark.parametrize("suffix", [".mov", ".webm", ".bmp", ".tif"])
def test_a_folder_of_other_formats_than_ours(tmp_path, suffix):
    """What `megadit prepare` reads of it."""
    folder = write_folder(tmp_path / "a", 2)
    first = sorted(folder.glob("*.mp4"))[0]
    if suffix in (".mov", ".webm"):
        first.rename(first.with_suffix(suffix))
    else:
        first.unlink()
        Image.new("RGB", (30, 30)).save(first.with_suffix(suffix))
    assert open_videos(folder).count == 2
    assert first.with_suffix(suffix) in [*picture_files([folder])]


def test_a_caption_that_cannot_be_read_is_named(tmp_path):
    folder = write_folder(tmp_path / "a", 2)
    (folder / "001.txt").write_bytes("un café très noir".encode("cp1252"))
    with pytest.raises(UserError, match=r"001.txt cannot be read: .* likely CP1252; iconv -f CP1252"):
        open_videos(folder)


def write_dataset(root, *, longest=5):
    tokenizer, text_encoder = HaarTokenizer(temporal_compression=2, spatial_compression=2), HashedWordEncoder(dim=16)
    with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder, shard_size=7) as writer:
        for number in range(24):
            frames = longest if number % 3 else 1
            video = torch.rand(3, frames, 8, 8, generator=torch.Generator().manual_seed(number)) * 2 - 1
            writer.add(
                "val" if number < 18 else "train",
                f"sample-{number:02d}",
                latent_CTHW=tokenizer.encode(video[None])[0],
                text_LE=torch.zeros(0, 16),
                caption=f"caption {number}",
                num_frames=frames,
                height=8,
                width=8,
                fps=8 if frames > 1 else 0,
            )


def test_videos_of_a_data_set_without_its_images(tmp_path):
    write_dataset(tmp_path / "data")
    found = open_videos(tmp_path / "data")
    assert found.prompts == [f"caption {number}" for number in range(18) if number % 3]
    clip = found.parts[0].read()[0]
    expected = torch.rand(3, 5, 8, 8, generator=torch.Generator().manual_seed(1)).permute(1, 2, 3, 0)
    assert np.abs(clip.video_THWC / 255 - expected.numpy()).max() < 0.01 and clip.fps == 8
    assert open_videos(tmp_path / "data", split="train").prompts == [f"caption {number}" for number in (19, 20, 22, 23)]
    assert open_videos(tmp_path / "data", 3).prompts == found.prompts[:3]


def test_a_data_set_of_images_alone_is_its_images(tmp_path):
    write_dataset(tmp_path / "data", longest=1)
    found = open_videos(tmp_path / "data", 4)
    assert found.prompts == [f"caption {number}" for number in range(4)]
    clip = found.parts[0].read()[2]
    expected = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(2)).permute(1, 2, 3, 0)
    assert np.abs(clip.video_THWC / 255 - expected.numpy()).max() < 0.01


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"json": b'{"num_frames": 5'}, "is not valid JSON"),
        ({"json": b'{"num_frames": "many"}'}, "does not describe a sample"),
        ({"json": b'{"num_frames": 5}'}, "holds neither a video nor latents"),
        ({"json": b'{"num_frames": 5}', "safetensors": b"\xff" * 64}, "is longer than"),
        ({"json": b'{"num_frames": 5}', "mp4": b"no video"}, "cannot read"),
        ({"json": b'{"num_frames": 5}', "png": b"\x89PNG\r\n\x1a\n no picture"}, "cannot read"),
        ({"json": b" " * (1 << 17)}, "is longer than"),
        ({"json": b'{"num_frames": 5, "fps": [8]}'}, "does not describe a sample"),
        ({"json": b'{"num_frames": 5}', "safetensors": bytes(64)}, "holds no latents"),
        ({"json": b'{"num_frames": 5}', "safetensors": save({"other": torch.zeros(1)})}, "holds no latents"),
        (
            {"json": b'{"num_frames": 5}', "safetensors": save({"latent": torch.zeros(3)})},
            r"latents torch.float32 \[3\]",
        ),
        ({"json": b'{"num_frames": 5}', "safetensors": save({"latent": FILM})}, "decoded, is longer than"),
    ],
)
def test_a_hostile_data_set_is_one_line(tmp_path, monkeypatch, members, says):
    monkeypatch.setattr(videos_module, "MAX_VIDEO_BYTES", 1 << 20)
    HaarTokenizer(temporal_compression=2, spatial_compression=2).save(tmp_path / "tokenizer")
    (tmp_path / "megadit.json").write_text("{}")
    with tarfile.open(tmp_path / "val-000000.tar", "w") as tar:
        for suffix, content in members.items():
            add(tar, f"sample.{suffix}", content)
    with pytest.raises(UserError, match=says):
        open_videos(tmp_path).parts[0].read()


def test_pipes_links_and_files_without_end_are_left_out(tmp_path):
    """Of a folder and of a data set: a pipe is never opened, which would wait for ever."""
    folder = write_folder(tmp_path / "folder", 2)
    outside = (folder / "001.mp4").rename(tmp_path / "private.mp4")
    (folder / "link.mp4").symlink_to(outside)
    os.mkfifo(folder / "pipe.mp4")
    os.mkfifo(folder / "000.json")
    shutil.copy(folder / "000.mp4", folder / "endless.mp4")
    os.truncate(folder / "endless.mp4", videos_module.MAX_FILE_BYTES + 1)  # a file with holes
    (folder / "$(touch x)\n'.mp4").symlink_to("000.mp4")
    found = open_videos(folder)
    assert [name for part in found.parts for name in part.names] == ["$(touch x)\n'.mp4", "000.mp4"]
    assert found.unread == ("endless.mp4",)
    write_dataset(tmp_path / "set")
    (shard, *_) = sorted((tmp_path / "set").glob("train-*.tar"))
    before = open_videos(tmp_path / "set", split="train").count
    (tmp_path / "set" / "train-999998.tar").symlink_to(shard.rename(tmp_path / "private.tar"))
    os.mkfifo(tmp_path / "set" / "train-999999.tar")
    shutil.copy(tmp_path / "private.tar", shard)
    assert open_videos(tmp_path / "set", split="train").count == before


def test_a_video_longer_than_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "long.mp4").write_bytes(encode_mp4(pixels(1, 20, 16, 16)[0], 8.0))
    monkeypatch.setattr(videos_module, "MAX_VIDEO_BYTES", 10 * 16 * 16 * 3)
    with pytest.raises(UserError, match="long.mp4, decoded, is longer than"):
        open_videos(tmp_path).parts[0].read()


def test_the_middle_of_a_video_is_windowed():
    videos = pixels(2, 9)
    found = videos_in_memory("x", videos, ["a", "b"], 8.0)
    window = window_of(found.parts[0].read()[0], 4, None)
    seen, prompts = windowed(found.parts[0], window)
    assert (seen.numpy() == videos[:, 2:6]).all() and prompts == ["a", "b"]
    assert window.text == "4 frames of 8x12 at 8 fps from the middle"


def test_other_sizes_are_cropped_and_resized_or_refused():
    videos = pixels(1, 2, 20, 40)
    part = videos_in_memory("x", videos, [""], 0.0).parts[0]
    seen, _ = windowed(part, window_of(part.read()[0], None, (10, 10)))
    cropped = resized(torch.from_numpy(videos[:, :, :, 10:30]), 10, 10).round().byte()
    assert (seen.permute(0, 4, 1, 2, 3) == cropped).all()
    expected = np.asarray(Image.fromarray(videos[0, 0, :, 10:30]).resize((10, 10), Image.Resampling.BICUBIC))
    assert np.abs(seen[0, 0].numpy().astype(int) - expected).max() <= 1
    other = videos_in_memory("y", pixels(1, 2, 8, 8), [""], 0.0).parts[0]
    with pytest.raises(UserError, match="video 0 of y is 8x8, others are 20x40: give --size 20 40"):
        windowed(other, window_of(part.read()[0], None, None))


def test_other_lengths_and_speeds_are_refused():
    window = window_of(videos_in_memory("x", pixels(1, 5), [""], 8.0).parts[0].read()[0], None, None)
    with pytest.raises(UserError, match="has 3 frames, fewer than 5: drop it, or give `megadit evaluate` --frames 3"):
        windowed(videos_in_memory("y", pixels(1, 3), [""], 8.0).parts[0], window)
    with pytest.raises(UserError, match="has 4 frames per second, others 8"):
        windowed(videos_in_memory("y", pixels(1, 5), [""], 4.0).parts[0], window)


def test_single_videos_are_found_in_their_parts():
    videos = pixels(20)
    found = videos_in_memory("x", videos, [str(number) for number in range(20)], 8.0)
    chosen = clips_at(found, [17, 0, 16, 15])
    assert [clip.prompt for clip in chosen] == ["17", "0", "16", "15"]
    assert (chosen[0].video_THWC == videos[17]).all()


@pytest.mark.parametrize(
    ("rate", "chosen"), [(8, [0, 2, 3, 4, 6, 8, 9, 10]), (6, [0, 2, 4, 6, 8, 10]), (24, None), (11.95, None)]
)
def test_a_faster_video_is_thinned_out(rate, chosen):
    """Frames nearest to the times of frames at the other rate; a slower one has none to give."""
    clip = Clip(np.arange(12, dtype=np.uint8)[:, None, None, None], 12.0, "")
    assert thinned(clip, rate).video_THWC.ravel().tolist() == (chosen or list(range(12)))
    assert thinned(clip, rate).fps == (rate if chosen else 12.0)


@pytest.mark.parametrize("more", [{"seed": 3}, {"num_steps": 4}, {"guidance": 2.0}])
def test_prompts_with_settings_are_not_taken_for_prompts_alone(more, tmp_path):
    """All videos of an evaluation share their settings."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b"} | more))
    with pytest.raises(UserError, match="prompts.jsonl has settings of single prompts"):
        prompts_of(str(path), None, None, None)
    with pytest.raises(UserError, match="nowhere.txt: the prompts cannot be read: nowhere.txt does not exist"):
        prompts_of("nowhere.txt", None, None, None)
