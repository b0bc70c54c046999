"""`megadit prepare videos`: a folder of videos, good and bad, becomes a data set; killed or not, the same one."""

import json
import random
import shutil
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from megatron.energon.tools.info import command as energon_info
from megatron.energon.tools.lint import command as energon_lint
from PIL import Image

from megadit.infer.inspect import dataset_sheet, info
from megadit.models.configs.config import DiTConfig
from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import load_tokenizer
from megadit.train.data.ingest.clips.decode import fit_image
from megadit.train.data.ingest.clips.encode import to_video
from megadit.train.data.loader import build_train_loader
from megadit.train.data.on_the_fly import read_mp4
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.recipes import load_recipe

DIT = DiTConfig(
    num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=32, patch_spatial=1, crossattn_emb_size=64,
    sigma_data=1.0,
)  # fmt: skip
SMALL_BUFFERS = {"shuffle_buffer_size": 4, "packing_buffer_size": 4}
OPTIONS = [
    "--height", "64", "--width", "64", "--num_frames", "9,17", "--keyframes", "2", "--num_workers", "0",
    "--shard_size", "6",
]  # fmt: skip
REASONS = {"broken": 4, "small": 1, "static": 1, "black": 1, "short": 1, "near-duplicate": 1}


def shard_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.glob("*.tar"))}


def samples(root: Path) -> list[tuple[dict, dict]]:
    found = []
    for path in sorted(root.glob("*.tar")):
        with tarfile.open(path) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for name in [name for name in contents if name.endswith(".json")]:
            tensors = safetensors.torch.load(contents[name.replace(".json", ".safetensors")])
            found.append((json.loads(contents[name]), tensors))
    return found


@pytest.fixture(scope="module")
def prepared(videos, tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared") / "dataset"
    assert prepare.main(["videos", str(videos), str(root), *OPTIONS, "--debug"]) == 0
    return root


def test_what_more_channels_would_give_is_noted(prepared):
    noted = {int(name): psnr for name, psnr in json.loads((prepared / "prepare" / "channels.json").read_text()).items()}
    fitted = load_tokenizer(prepared / "tokenizer")
    assert noted[fitted.latent_channels] == pytest.approx(fitted.reconstruction_psnr, abs=0.02)
    assert sorted(noted, key=noted.get) == [32, 48, 64, 96]


def test_every_source_is_a_sample_or_counted_with_its_reason(prepared, videos):
    report = json.loads((prepared / "report.json").read_text())
    assert report["sources"] == 27 == len([path for path in videos.iterdir() if path.suffix != ".txt"])
    assert {name: count for name, count in report["skips"].items() if name != "rest of a scene"} == REASONS
    described = [description for description, _ in samples(prepared)]
    assert {item["source"] for item in described} == {p.name for p in videos.iterdir() if p.stem.startswith("good-")
                                                      and p.suffix != ".txt"}  # fmt: skip
    assert sum(report["samples"].values()) == len(described)
    assert len({(item["source"], item["start"]) for item in described}) == len(described)


def test_samples_hold_what_their_videos_show(prepared, videos, make_pan):
    tokenizer = load_tokenizer(prepared / "tokenizer")
    by_source = {item["source"]: (item, tensors) for item, tensors in samples(prepared) if item["start"] == 0}
    item, tensors = by_source["good-00.mp4"]
    assert item["caption"] == "a window over china number 0" and item["fps"] == 24.0
    shown = tokenizer.decode(tensors["latent"][None].float())[0]  # CTHW in [-1, 1]
    frames = make_pan("china.jpg", 17, 96, 128, step=(1, 2), start=(100, 0))
    for moment in (0, 8, 16):
        expected = fit_image(Image.fromarray(frames[moment]), 64, 64).mean(axis=2)
        assert np.corrcoef(shown[:, moment].mean(dim=0).flatten(), expected.flatten())[0, 1] > 0.9
    assert tensors["text"].shape == (6, 64)


def test_frames_are_encoded_as_images_too(prepared, make_pan):
    tokenizer = load_tokenizer(prepared / "tokenizer")
    by_source = {item["source"]: (item, tensors) for item, tensors in samples(prepared) if item["start"] == 0}
    item, tensors = by_source["good-00.mp4"]
    assert item["frame_times"] == [8 / tokenizer.temporal_compression, 16 / tokenizer.temporal_compression]
    frames = make_pan("china.jpg", 17, 96, 128, step=(1, 2), start=(100, 0))
    for latent_CHW, place in zip(tensors["frames"].unbind(1), (8, 16), strict=True):
        shown = tokenizer.decode(latent_CHW[None, :, None].float())[0, :, 0].mean(dim=0)
        likeness = [
            np.corrcoef(shown.flatten(), fit_image(Image.fromarray(frame), 64, 64).mean(axis=2).flatten())[0, 1]
            for frame in frames
        ]
        assert np.argmax(likeness) == place
    assert DatasetInfo.read(prepared).has_keyframes


def test_shards_of_a_split_are_equally_large(prepared):
    sizes = [len(tarfile.open(path).getnames()) // 2 for path in sorted(prepared.glob("train-*.tar"))]
    assert max(sizes) <= 6 and max(sizes) - min(sizes) <= 1
    assert DatasetInfo.read(prepared).num_samples["train"] == sum(sizes)


def test_a_sheet_shows_samples(prepared, tmp_path, capsys):
    assert info.main([str(prepared), "--sheet", str(tmp_path / "sheet.png")]) == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 1000 and np.asarray(sheet).std() > 20  # strips of six frames in two columns
    _, label = dataset_sheet.draw_strip("key", {"json": b'{"caption": "a", "fps": 8}', "mp4": b"no video"}, None)
    assert label.startswith("a\nkey: cannot be decoded: ")
    assert info.main([str(prepared), "--sheet", str(tmp_path / "sheet.txt")]) == 2
    assert "use a name that ends in .png" in capsys.readouterr().err


def test_a_sheet_of_images_is_a_grid(tmp_path, make_pan):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(make_pan("china.jpg", 1, 64, 64, start=(20 * number, 30 * number))[0]).save(
            folder / f"{number}.png"
        )
    options = ["--sizes", "64x64", "--tokenizer", "pixels", "--num_workers", "0", "--val_share", "0"]
    assert prepare.main(["images", str(folder), str(tmp_path / "out"), *options, "--shard_size", "4"]) == 0
    dataset_sheet.write_sheet(tmp_path / "out", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        across, down = (side // dataset_sheet.THUMBNAIL_HEIGHT for side in sheet.size)
    assert across == 4 and down in (3, 4, 5), "as square as they go: four across, three down, and their captions"


def test_energon_accepts_the_folder(prepared, capfd):
    energon_info.main([str(prepared)], standalone_mode=False)
    assert "TextSample" in capfd.readouterr().out
    energon_lint.main([str(prepared), "--parallel", "0"], standalone_mode=False)
    assert "Skipping empty split part test" in capfd.readouterr().out


def test_a_second_run_does_nothing_and_a_shard_can_be_made_again(prepared, videos, capsys):
    before = shard_bytes(prepared)
    assert prepare.main(["videos", str(videos), str(prepared), *OPTIONS]) == 0
    assert "already prepared" in capsys.readouterr().out
    (prepared / "train-000001.tar").write_bytes(b"lost")
    assert prepare.main(["videos", str(videos), str(prepared), *OPTIONS, "--redo", "1:3"]) == 0
    assert shard_bytes(prepared) == before


def test_sizes_that_no_tokenizer_takes_are_told_before_any_work(videos, tmp_path):
    with pytest.raises(UserError, match="12 frames cannot be encoded"):
        prepare.main(["videos", str(videos), str(tmp_path / "out"), "--num_frames", "12", "--debug"])
    assert not (tmp_path / "out").exists()


def test_stages_run_alone_and_name_the_one_before(prepared, videos, tmp_path):
    command = ["videos", str(videos), str(tmp_path / "out"), *OPTIONS, "--debug"]
    with pytest.raises(UserError, match="run the stage fetch first"):
        prepare.main([*command, "--stages", "scan"])
    for stage in ("fetch", "scan", "select", "encode", "index"):
        assert prepare.main([*command, "--stages", stage]) == 0
    assert shard_bytes(tmp_path / "out") == shard_bytes(prepared)


def test_pixels_can_be_stored_instead(videos, tmp_path):
    out = tmp_path / "raw"
    assert prepare.main(["videos", str(videos), str(out), *OPTIONS, "--store", "raw", "--debug"]) == 0
    with tarfile.open(next(out.glob("train-*.tar"))) as tar:
        names = tar.getnames()
    assert {Path(name).suffix for name in names} == {".json", ".mp4"}
    config = replace(load_recipe("dit_pretrain"), model=DIT)
    config = replace(
        config, data=replace(config.data, path=str(out), num_workers=0, encode="on_the_fly", **SMALL_BUFFERS)
    )
    latents = replace(config, data=replace(config.data, encode="precached"))
    with pytest.raises(UserError, match="encode=precached does not fit .* which holds pixels; set it to on_the_fly"):
        build_train_loader(latents, rank=0, world_size=1)
    batch = next(iter(build_train_loader(config, rank=0, world_size=1)))
    tokenizer, first = load_tokenizer(out / "tokenizer"), batch.layout.segments[0]
    name, num_tokens = batch.sample_ids[0], batch.layout.lengths[0]
    with tarfile.open(
        next(path for path in out.glob("train-*.tar") if f"{name}.mp4" in tarfile.open(path).getnames())
    ) as tar:
        frames = read_mp4(tar.extractfile(f"{name}.mp4").read())
    latent = tokenizer.encode(to_video(torch.from_numpy(frames)[None]))[0]
    assert first.grid == latent.shape[1:]
    torch.testing.assert_close(batch.tokens_S1P[:num_tokens, 0], latent.flatten(1).T, rtol=0, atol=1e-5)
    given = replace(
        config, data=replace(config.data, conditioning=("last_frame:1",)), model=replace(DIT, conditioning_sigma=0.02)
    )
    batch = next(iter(build_train_loader(given, rank=0, world_size=1)))
    segment, num_frames = batch.layout.segments[0], latent.shape[1]
    assert segment.grid[0] == num_frames + 1 and segment.times[-1] == (len(frames) - 1) / tokenizer.temporal_compression
    last_frame = tokenizer.encode(to_video(torch.from_numpy(frames)[None, -1:]))[0].flatten(1).T
    row = batch.tokens_S1P[num_tokens : num_tokens + len(last_frame), 0]
    torch.testing.assert_close(row, last_frame, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [10])
def test_killed_again_and_again_it_leaves_the_same_bytes(prepared, videos, start_ranks, tmp_path, num_kills):
    out = tmp_path / "killed"
    options = [*OPTIONS[:-3], "1", *OPTIONS[-2:]]
    generator = random.Random(3)
    kills = 0
    while True:
        (process,) = start_ranks(1, "-m", "megadit.models.shared.cli.verbs", "prepare", "videos", videos, out, *options)
        if kills < num_kills:
            wait_for_news(out, process, generator)
        if process.poll() is None and kills < num_kills:
            process.kill()
            kills += 1
            process.wait()
            continue
        told, _ = process.communicate()
        assert process.returncode == 0, told
        if kills == num_kills:
            break
        shutil.rmtree(out)  # finished before it could be killed often enough: once more
    assert shard_bytes(out) == shard_bytes(prepared)
    assert not list(out.rglob(".*.tar"))


def wait_for_news(out: Path, process, generator: random.Random) -> None:
    """Until the run has written something, and a random moment longer."""
    before = len(list(out.rglob("*")))
    deadline = time.monotonic() + 30
    while process.poll() is None and len(list(out.rglob("*"))) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 0.6))


def test_an_image_is_a_video_of_one_frame(tmp_path):
    from sklearn.datasets import load_sample_image

    source = tmp_path / "images"
    source.mkdir()
    rows = []
    for number, name in enumerate(("china.jpg", "flower.jpg")):
        for place in range(10):
            picture = load_sample_image(name)[place * 15 : place * 15 + 120, place * 20 : place * 20 + 160]
            Image.fromarray(picture).save(source / f"{number}-{place}.png")
            rows.append(f"{number}-{place}.png,part {place} of {name[:-4]},{place / 2}\n")
    (source / "metadata.csv").write_text("file_name,text,aesthetic_score\n" + "".join(rows) + "../china.png,x,9\n")
    Image.new("RGB", (160, 120), "red").save(source / "plain.png")
    (source / "metadata.csv").open("a").write("plain.png,red,9\nlost.png,lost,9\n")
    out = tmp_path / "dataset"
    sizes = ["--sizes", "64x64,64x96", "--num_workers", "0", "--num_frames", "1", "--min_aesthetic_score", "4"]
    assert prepare.main(["images", str(source), str(out), *sizes, "--channels", "24", "--debug"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["skips"]["low aesthetic score"] == 16 and report["skips"]["blank"] == 1
    assert report["skips"]["outside the source folder"] == 1 and report["skips"]["missing file"] == 1
    described = samples(out)
    assert {tuple(tensors["latent"].shape) for _, tensors in described} == {(24, 1, 8, 12)}
    assert all(item["fps"] == 0 and item["aesthetic_score"] >= 4 for item, _ in described)
    assert torch.isfinite(described[0][1]["latent"]).all()
