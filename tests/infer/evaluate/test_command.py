"""`megadit evaluate` from end to end, on a tiny random bundle and on folders of videos."""

import json
import random
import re
import shutil
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megadit.infer.evaluate import command, features
from megadit.infer.evaluate import generated as made
from megadit.infer.evaluate import tokenizer as tokenizer_command
from megadit.infer.evaluate.metrics.lpips import LAYERS, LPIPS
from megadit.infer.evaluate.report import report as compare
from megadit.infer.media.video_io import read_video, write_video
from megadit.models.shared.files import read_json
from megadit.models.shared.folder_lock import FolderLock
from tests.bundles import write_clip_bundle

from .conftest import write_folder

FIGURES = {"kid", "kvd", "precision", "recall", "density", "coverage", "consistency", "motion", "flicker"}
CHEAP = ["--metrics", "kid", "kvd", "motion"]


def report_of(out):
    report = read_json(out / "report.json")
    assert set(report.pop("seconds")) == {"videos", "features", "metrics"}
    return report


def values(report, model=None):
    return {
        (each["metric"], each["guidance"]): each["value"]
        for each in report["metrics"]
        if model in (None, each["model"])
    }


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, bundle_dir, real_folder, reader_file):
    """The bundle at two guidances, and its loss."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    names = ["--metrics", *sorted(FIGURES), "loss"]
    arguments = ["--real", real_folder, "--extractors", reader_file, "--guidances", "1", "4", *names]
    assert command.main([str(each) for each in (bundle_dir, "--out", out, *arguments)]) == 0
    return out, [str(each) for each in arguments]


def test_a_report_has_every_figure_with_its_interval(evaluated):
    report = report_of(evaluated[0])
    assert {each["metric"] for each in report["metrics"] if "loss" not in each["metric"]} == FIGURES
    assert {each["guidance"] for each in report["metrics"]} == {1.0, 4.0, None}
    for each in report["metrics"]:
        assert each["low"] <= each["value"] <= each["high"] and each["videos"] == 40
        assert re.match(r"megadit 1: .* 5 frames of 16x24 at 8 fps from the middle; 40 videos", each["protocol"])
    losses = [each for each in report["metrics"] if each["metric"].startswith("loss")]
    assert len(losses) == 5 and all(each["value"] > 0 for each in losses)
    distances = [each for each in report["metrics"] if each["metric"] in ("kid", "kvd")]
    assert all(each["baseline"]["high"] < each["low"] for each in distances)  # random weights are far from real


def test_a_page_that_needs_nothing_else(evaluated):
    page = (evaluated[0] / "report.html").read_text()
    assert page.count("data:image/") >= 3 and "http" not in page.replace("http-equiv", "")
    assert "Best and worst of" in page and "guidance 4" in page
    picture, _ = read_video(evaluated[0] / "grid.png")
    assert picture.std() > 10
    assert (evaluated[0] / "curves.png").is_file()


def test_what_is_there_is_not_computed_again(evaluated, bundle_dir, tmp_path, monkeypatch):
    out, arguments = evaluated
    copy = shutil.copytree(out, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.safetensors")}
    monkeypatch.setattr(made.TextToVideo, "from_pretrained", None)
    monkeypatch.setattr(features, "_features", None)
    assert command.main([str(bundle_dir), "--out", str(copy), *arguments]) == 0
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.safetensors")} == before
    assert report_of(copy) == report_of(out)
    with FolderLock(copy, "evaluates"):
        assert command.main([str(bundle_dir), "--out", str(copy), *arguments]) == 2
    next(iter((copy / "features").glob("*.safetensors"))).unlink()  # the control: this has to be computed
    with pytest.raises(TypeError):
        command.main([str(bundle_dir), "--out", str(copy), *arguments])


def test_a_curve_of_distance_against_texts_by_a_clip_of_ours(bundle_dir, real_folder, tmp_path):
    clip, out = write_clip_bundle(tmp_path / "clip", seed=4).path, tmp_path / "out"
    arguments = ["--real", real_folder, "--extractors", clip, "--guidances", "1", "6", "--metrics", "fid", "clip"]
    assert command.main([str(each) for each in (bundle_dir, "--out", out, *arguments)]) == 0
    found = report_of(out)["metrics"]
    assert {(each["metric"], each["guidance"]) for each in found} == {
        (metric, guidance) for metric in ("fid", "clip") for guidance in (1.0, 6.0)
    }
    assert all("bicubic with antialias to 32x32, embedding" in each["protocol"] for each in found)
    of_texts = [each["value"] for each in found if each["metric"] == "clip"]
    assert all(0 < value <= 100 for value in of_texts) and of_texts[0] != of_texts[1]
    assert (out / "curves.png").is_file() and "CLIP score" in (out / "report.html").read_text()


def words_of(bundle_dir, out, arguments):
    return "-m", "megadit.infer.evaluate.command", str(bundle_dir), "--out", str(out), *arguments


@pytest.mark.slow
def test_two_ranks_find_the_features_of_one(evaluated, run_ranks, bundle_dir, tmp_path):
    out, arguments = evaluated
    run_ranks(2, *words_of(bundle_dir, tmp_path / "two", arguments))
    assert report_of(tmp_path / "two") == report_of(out)
    names = sorted(path.relative_to(out) for path in out.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*.safetensors"))
    assert all((out / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


@pytest.mark.slow
def test_killed_at_any_moment_the_same_report_comes_of_it(
    evaluated, start_ranks, run_ranks, bundle_dir, tmp_path, request
):
    out, arguments = evaluated
    killed, whole = tmp_path / "killed", len(list(out.rglob("*.safetensors")))
    command, cases = words_of(bundle_dir, killed, arguments), request.config.getoption("--cases") or 10
    for moment in sorted(random.Random(0).sample(range(whole + 1), min(cases, whole + 1))):
        (process,) = start_ranks(1, *command)
        while len(list(killed.rglob("*.safetensors"))) < moment:
            assert process.poll() in (None, 0), process.communicate()[0]
            time.sleep(0.005)
        process.kill()
        if process.wait() == 0:  # it was over before it could be killed
            break
        assert not (killed / "report.json").exists()
    run_ranks(1, *command)
    assert report_of(killed) == report_of(out)
    assert all((out / name).read_bytes() == (killed / name).read_bytes() for name in ("grid.png", "curves.png"))
    assert (out / "report.html").read_bytes() == (killed / "report.html").read_bytes()


# --------------------------------------------------------------------------------------------- folders, differences


def evaluate(out, *arguments):
    return command.main([str(each) for each in ("--out", out, *arguments)])


def test_two_folders_against_each_other(tmp_path, real_folder, reader_file):
    good = write_folder(tmp_path / "good", 40, seed=5)
    bad = write_folder(tmp_path / "bad", 40, seed=5)
    for path in bad.glob("*.mp4"):
        video, fps = read_video(path)
        write_video(path, np.repeat(video[:1] // 2, len(video), 0), fps)  # dim and still
    common = ("--real", real_folder, "--extractors", reader_file, *CHEAP)
    assert evaluate(tmp_path / "out", "--videos", good, "--against", bad, *common) == 0
    report = report_of(tmp_path / "out")
    verdicts = {each["metric"]: each["better"] for each in report["differences"]}
    assert verdicts == {"kid": "good", "kvd": "good", "motion": "good"}
    for each in report["differences"]:
        assert each["value"] == pytest.approx(
            values(report, "good")[each["metric"], None] - values(report, "bad")[each["metric"], None], rel=1e-4
        )
    assert "cannot be told apart" not in (tmp_path / "out" / "report.html").read_text()
    assert (
        evaluate(tmp_path / "same", "--videos", good, "--against", shutil.copytree(good, tmp_path / "again"), *common)
        == 0
    )
    assert all(each["better"] == "" for each in report_of(tmp_path / "same")["differences"])


def test_a_model_against_a_folder_with_a_shared_cache(tmp_path, bundle_dir, real_folder, reader_file):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square\na blue square\n")
    options = ("--real", real_folder, "--extractors", reader_file, "--prompts", prompts, "--metrics", "kid")
    more = ("--count", 10, "--seed", 7, "--features", tmp_path / "features", "--export_for", "vbench")
    size = ("--num_video_frames", 9, "--frames", 4, "--size", 16, 16, "--guidance", 3, "--num_steps", 2)
    assert (
        evaluate(
            tmp_path / "out",
            bundle_dir,
            "--against",
            real_folder,
            *options,
            *more,
            *size,
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--dtype",
            "float32",
        )
        == 0
    )
    report = report_of(tmp_path / "out")
    assert report["window"] == "4 frames of 16x16 at 8 fps from the middle, cropped and resized"
    assert {each["videos"] for each in report["metrics"]} == {10}
    assert list((tmp_path / "features").glob("*.safetensors")) and not (tmp_path / "out" / "features").exists()
    exported = tmp_path / "out" / "exported" / "tiny-guidance-3"
    assert sorted(path.name for path in exported.iterdir())[:2] == ["a blue square-0.mp4", "a blue square-1.mp4"]
    assert len(list(exported.iterdir())) == 10
    request = read_json(next((tmp_path / "out" / "videos").glob("*/request.json")))
    assert request["seed"] == 7 and request["prompts"][:3] == ["a red square", "a blue square", "a red square"]


def test_settings_reach_the_videos(tmp_path, bundle_dir, real_folder, reader_file):
    words = ("--real", real_folder, "--extractors", reader_file, *CHEAP[:2], "--count", 8, "--num_steps", 2)
    for number, more in enumerate(
        (
            (),
            ("--sampler", "heun"),
            ("--height", 32, "--width", 32, "--size", 16, 24),
            ("--eta", 1.0),
            ("--negative_prompt", "a square"),
        )
    ):
        assert evaluate(tmp_path / str(number), bundle_dir, *words, *more) == 0
    found = {values(report_of(out))["kid", 2.0] for out in tmp_path.iterdir()}
    assert len(found) == 5


def test_reports_of_different_protocols_are_not_put_side_by_side(evaluated, tmp_path, capsys):
    report = read_json(evaluated[0] / "report.json")
    for each in report["metrics"]:
        each["model"] = "another"
    (tmp_path / "same.json").write_text(json.dumps(report))
    assert compare.main([str(evaluated[0]), str(tmp_path / "same.json")]) == 0
    assert "another, guidance 4" in capsys.readouterr().out
    report["metrics"][0]["protocol"] = report["metrics"][0]["protocol"].replace("5 frames", "16 frames")
    (tmp_path / "other.json").write_text(json.dumps(report))
    assert compare.main([str(evaluated[0]), str(tmp_path / "other.json")]) == 2
    assert "metrics of different protocols cannot be compared" in capsys.readouterr().err
    (tmp_path / "none.json").write_text("[]")
    assert compare.main([str(tmp_path / "none.json")]) == 2
    assert "is not a report" in capsys.readouterr().err


def write_lpips(folder):
    """AlexNet and heads with random weights."""
    folder.mkdir()
    torch.manual_seed(0)
    network = LPIPS()
    backbone, heads = {}, {}
    for number, (layer, convolution) in enumerate(zip(LAYERS, network.convolutions, strict=True)):
        backbone |= {f"features.{layer}.{name}": tensor for name, tensor in convolution.state_dict().items()}
        heads[f"lin{number}.model.1.weight"] = torch.rand(1, convolution.out_channels, 1, 1)
    torch.save(backbone, folder / "alexnet.pth")
    torch.save(heads, folder / "alex.pth")
    return folder


def test_a_tokenizer_is_measured(bundle_dir, real_folder, tmp_path, capsys):
    more = ("--count", 12, "--frames", 5, "--size", 16, 16, "--lpips_weights", write_lpips(tmp_path / "lpips"))
    words = [bundle_dir, real_folder, "--out", tmp_path / "figures.json", *more]
    assert tokenizer_command.main([str(each) for each in words]) == 0
    assert "12 videos, 5 frames of 16x16" in capsys.readouterr().out
    metric_values = read_json(tmp_path / "figures.json")["metrics"]
    assert set(metric_values) == {
        "PSNR (dB)",
        "SSIM",
        "LPIPS",
        "latents' size / sigma_data",
        "latents' mean / sigma_data",
    }
    assert (
        metric_values["PSNR (dB)"]["value"] > 40 and metric_values["SSIM"]["value"] > 0.99
    )  # Haar loses nothing but rounding
    assert 0 <= metric_values["LPIPS"]["value"] < 0.05


def test_ssim_is_torchmetrics_own():
    image = pytest.importorskip("torchmetrics.functional.image", reason="torchmetrics is not installed (megadit[dev])")
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(3, 3, 40, 48, generator=generator) * 2 - 1
    b = (a + 0.2 * torch.randn(a.shape, generator=generator)).clamp(-1, 1)
    theirs = image.structural_similarity_index_measure((a + 1) / 2, (b + 1) / 2, data_range=1.0, reduction="none")
    a_wide, b_wide = (F.pad(each, (5, 5, 5, 5), mode="reflect") for each in (a, b))  # theirs reaches beyond the picture
    assert tokenizer_command.ssim(a_wide, b_wide).numpy() == pytest.approx(theirs.numpy(), abs=1e-4)
    expected = image.peak_signal_noise_ratio((a + 1) / 2, (b + 1) / 2, data_range=1.0, reduction="none", dim=(1, 2, 3))
    assert tokenizer_command.psnr(a, b).numpy() == pytest.approx(expected.numpy(), abs=1e-3)


def test_single_frames_are_pictures_whatever_their_speed(tmp_path, bundle_dir, real_folder, reader_file, capsys):
    """Nothing moves in them: they are compared with frames of videos of any speed, without optical flow."""
    made = (bundle_dir, "--num_frames", 1, "--fps", 30, "--num_steps", 1, "--count", 8, "--out", tmp_path / "out")
    seen = ("--real", real_folder, "--frames", 1, "--extractors", reader_file)
    assert command.main([str(each) for each in (*made, *seen, "--metrics", "kid")]) == 0
    (metric_value,) = report_of(tmp_path / "out")["metrics"]
    assert metric_value["metric"] == "kid" and "1 frames of 16x24 from the middle; 8 videos" in metric_value["protocol"]
    assert "--metrics motion needs" in said(capsys, *made, *seen, "--metrics", "motion")


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def three(tmp_path):
    return write_folder(tmp_path / "three", 3)


def said(capsys, *arguments):
    assert command.main([str(each) for each in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    return line


def test_mistakes_are_one_line_that_says_what_to_do(tmp_path, capsys, bundle_dir, real_folder, reader_file, three):
    out = ("--out", tmp_path / "out")
    seen = ("--extractors", reader_file)
    assert "give a model, or --videos FOLDER" in said(capsys, *out)
    assert "give --real" in said(capsys, bundle_dir, *out)
    made = (bundle_dir, *out, "--real", three)
    assert "there are no weights at nowhere" in said(capsys, *made, "--extractors", "nowhere")
    assert "is unknown; did you mean 'fid'" in said(capsys, *made, "--metrics", "fidd")
    needs = said(capsys, *made, "--metrics", "clip", *seen)
    assert "--metrics clip needs an extractor of pictures and texts" in needs
    few = said(capsys, "--videos", three, *out, "--real", real_folder, *seen)
    assert "3 generated videos are too few for metrics with intervals: give 8 or more" in few
    few = said(capsys, "--videos", real_folder, *out, "--real", real_folder, *seen, "--metrics", "fvd")
    assert "40 generated videos are too few for a Fréchet distance of 96 features: give 194 or more" in few
    none = write_folder(tmp_path / "none", 2, captions=False)
    assert "without captions: give --prompts FILE" in said(capsys, bundle_dir, *out, "--real", none, *seen)
    wide = write_folder(tmp_path / "wide", 3, size=(5, 32, 48))
    assert "give --size 32 48" in said(capsys, bundle_dir, *out, "--real", wide, *seen)
    several = write_folder(tmp_path / "several", 9)
    shutil.copy(next(wide.glob("*.mp4")), several / "wide.mp4")
    mixed = said(capsys, "--videos", several, *out, "--real", real_folder, *seen, "--metrics", "kid")
    assert "give --size 16 24" in mixed
    others = said(capsys, "--videos", several, "--against", real_folder, *out, "--real", real_folder, *seen)
    assert "(several has 10, real has 40): give --count 10" in others
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no videos" in said(capsys, "--videos", empty, *out, "--real", real_folder)
    (empty / "broken.mp4").write_bytes(b"no video")
    assert "holds no video that can be read, only broken.mp4" in said(
        capsys, "--videos", real_folder, *out, "--real", empty
    )
    long = said(capsys, bundle_dir, *out, "--real", real_folder, *seen, "--frames", 9)
    assert "makes 5 frames, the window has 9" in long
    assert "30 frames per second" not in long
    assert "makes 8 frames per second" not in long
    fast = said(capsys, bundle_dir, *out, "--real", real_folder, *seen, "--fps", 30)
    assert "makes 30 frames per second, the real videos have 8" in fast


def test_real_clips_are_thinned_out_to_the_rate_of_the_model(bundle_dir, tmp_path, capsys):
    """What every folder of clips has: another rate, and a file that is none. Nothing is ranked by a figure of all."""
    real = write_folder(tmp_path / "real", 8, size=(12, 16, 24))
    for path in real.glob("*.mp4"):
        write_video(path, read_video(path)[0], 12)
    (real / "000_empty.mp4").touch()
    made = (str(bundle_dir), "--num_steps", "1", "--num_frames", "5", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert command.main([*made, "--real", str(real), "--metrics", "motion", "--count", "8"]) == 0
    assert "left out of real: 1 that cannot be read (000_empty.mp4)" in capsys.readouterr().err
    report = read_json(tmp_path / "out" / "report.json")
    assert report["window"].startswith("5 frames of 16x24 at 8 fps")
    assert "Best and worst" not in (tmp_path / "out" / "report.html").read_text()
