"""`megadit info` recognises what megadit writes and refuses everything else."""

import io
import json
import shutil
import tarfile
from dataclasses import replace

import pytest
import torch

from megadit.infer.inspect import info
from megadit.infer.media.video_io import write_video
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert.published import open_published
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.flops import forward_flops
from megadit.models.networks.dit import DiT
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.config.load import resolve_config, to_yaml
from megadit.train.recipes import load_recipe
from tests.bundles import DEFAULTS, write_classifier_bundle, write_tiny_bundle

TRAIN_ITERS = load_recipe("digits").train.train_iters
NUM_PARAMETERS = sum(parameter.numel() for parameter in DiT(NAMED_CONFIGS["digits"]).parameters())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("info") / "bundle"
    videos = [torch.rand(40, 3, 9, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1]
    write_bundle(
        path,
        config=NAMED_CONFIGS["digits"],
        state_dict=DiT(NAMED_CONFIGS["digits"]).state_dict(),
        tokenizer=HaarTokenizer.fit(videos, channels=32),
        text_encoder=HashedWordEncoder(dim=64),
        defaults=SamplingSettings(num_steps=12, guidance=3.0, num_frames=9, height=32, width=32, fps=8.0),
        training={"recipe": "digits", "step": 3500},
    )
    return path


def add_checkpoint(run, iteration: int, *, name: str | None = None):
    folder = run / "checkpoints" / (name or f"iter_{iteration:07d}")
    (folder / "tensors").mkdir(parents=True)
    (folder / "tensors" / ".metadata").touch()
    (folder / "SHA256SUMS").touch()
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())
    progress = {"iteration": iteration, "consumed_samples": 10 * iteration, "consumed_tokens": 1000 * iteration}
    (folder / "state.json").write_text(json.dumps({"run": progress, "ema_sigma_rels": [0.05, 0.1]}))
    return folder


@pytest.fixture
def run(tmp_path):
    config = resolve_config("digits", overrides=["data.mock=true"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    for iteration in (1000, 500):
        add_checkpoint(tmp_path, iteration)
    (tmp_path / "checkpoints" / "iter_0001500.unfinished").mkdir()
    records = [{"step": 1199, "loss": 0.5}, {"step": 1200, "loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 12')
    return tmp_path


def test_bundle(bundle):
    facts = info.describe(bundle)
    assert facts["bundle"] == str(bundle)
    assert facts["parameters"] == f"{NUM_PARAMETERS:,}"
    assert facts["training recipe"] == "digits"
    assert facts["default num_steps"] == 12
    assert facts["tokenizer"].startswith("haar")


def test_what_is_off_is_shown_on_demand(bundle, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "400")
    off = ("churn", "second_guidance", "shift", "sigmas", "guidance_interval", "cache_budget")
    shown = []
    for more in ([], ["--all"]):
        assert info.main([str(bundle), *more]) == 0
        shown.append(capsys.readouterr().out)
    assert not [name for name in off if f"default {name} " in shown[0]]
    assert not [name for name in off if f"default {name} " not in shown[1]]
    for name in ("num_steps", "guidance", "sampler", "sigma_max", "rho"):
        assert f"default {name} " in shown[0]
    levels = replace(DEFAULTS, sigmas=(10.0, 1.0, 0.1), num_steps=3, churn=2.0, sampler="euler")
    kept = info.in_force(info.describe(write_tiny_bundle(tmp_path / "levels", defaults=levels).path))
    assert kept["default churn"] == 2.0 and "default sigmas" in kept
    assert not {"default schedule", "default rho", "default sigma_min"} & kept.keys()


def test_a_bundle_says_whether_it_makes_images(bundle, tmp_path):
    tiny = write_tiny_bundle(tmp_path / "images", defaults=replace(DEFAULTS, num_frames=1))
    judge = write_classifier_bundle(tmp_path / "judge")
    kinds = [(each["kind"], each.get("makes")) for each in map(info.describe, (bundle, tiny.path, judge.path))]
    assert kinds == [("video", "videos"), ("video", "images"), ("classifier", None)]


def test_run(run):
    facts = info.describe(run)
    assert facts["recipe"] == "digits"
    assert facts["checkpoints"] == "iter_0000500, iter_0001000"  # one more is unfinished
    step = f"1,200 of {TRAIN_ITERS:,}; the newest checkpoint is of step 1,000"
    assert facts["tokens seen"] == "1,000,000"
    assert (facts["step"], facts["last loss"]) == (step, 0.25)  # the half line is passed over
    assert facts["parameters"] == f"{NUM_PARAMETERS:,}"


def test_checkpoint(run):
    facts = info.describe(run / "checkpoints" / "iter_0000500")
    assert facts["step"] == f"500 of {TRAIN_ITERS}"
    assert facts["averages (sigma_rel)"] == "0.05, 0.1"
    assert facts["recipe"] == "digits"


def test_unfinished_checkpoint_is_refused(run):
    with pytest.raises(UserError, match=r"no state\.json"):
        info.describe(run / "checkpoints" / "iter_0001500.unfinished")


def test_run_without_checkpoints_or_metrics(run):
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder)
    (run / "metrics.jsonl").unlink()
    facts = info.describe(run)
    assert facts["checkpoints"] == "none"
    assert "last loss" not in facts


def test_dataset(tmp_path):
    manifest = {"format_version": 1, "latent_channels": 32, "num_samples": {"train": 70, "val": 7}}
    (tmp_path / "megadit.json").write_text(json.dumps(manifest))
    (tmp_path / "train-000000.tar").write_bytes(bytes(2048))
    facts = info.describe(tmp_path)
    assert facts["num samples train"] == 70
    assert facts["shards"] == "1, 2 KiB"


def test_a_data_set_says_what_its_samples_are(tmp_path):
    (tmp_path / "megadit.json").write_text(json.dumps({"format_version": 1, "num_samples": {"train": 4}}))
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        for number, about in enumerate(
            [
                {"height": 64, "width": 96, "num_frames": 17, "fps": 8, "caption": "a seven"},
                {"height": 64, "width": 96, "num_frames": 17, "fps": 8, "caption": "a two"},
                {"height": 32, "width": 32, "num_frames": 1, "fps": 0, "caption": ""},
                {"height": {}, "width": [1] * 99, "num_frames": "many", "fps": 2, "caption": "\x1b[2J"},
                ["no description"],
            ]
        ):
            content = json.dumps(about).encode()
            member = tarfile.TarInfo(f"{number}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    facts = info.describe(tmp_path)
    assert facts["sizes"] == "64x96: 2, 32x32: 1, {}x[1, 1, 1, 1, 1, 1, 1: 1"
    assert facts["lengths"] == "17 frames (2.1 s): 2, image: 1, many frames: 1"
    assert facts["longest"] == "2.0 times the mean sample"
    assert facts["captions"] == "3 different (a seven; a two;  [2J), 1 without one", "nothing that a terminal obeys"


@pytest.mark.parametrize("frames", [1, 2, 30])
def test_a_data_set_says_how_much_more_work_its_longest_clips_are(tmp_path, frames):
    (tmp_path / "megadit.json").write_text(json.dumps({"format_version": 1, "num_samples": {"train": 8}}))
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        for number, shape in enumerate([(frames, 88, 160), *[(1, 88, 160)] * 60]):
            header = json.dumps({"latent": {"dtype": "U8", "shape": [16, *shape], "data_offsets": [0, 0]}}).encode()
            files = {"safetensors": len(header).to_bytes(8, "little") + header, "json": b'{"height": 8, "width": 8}'}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    found = info.describe(tmp_path).get("max / mean work")
    segments = [Segment((num, 44, 80), 1) for num in (frames, *[1] * 60)]
    tokens = [segment.num_tokens for segment in segments]
    work = [forward_flops(segment, NAMED_CONFIGS["cosmos_7b"]) for segment in segments]
    expected = work[0] / tokens[0] / (sum(work) / sum(tokens))
    assert found is None if frames == 1 else found.startswith(f"up to {expected:.2f} for")
    assert ("data.balance=work" in str(found)) is (expected > 1.15) is (frames == 30)


@pytest.mark.parametrize("suffix", ["mp4", "gif", "webp", "png"])
def test_a_video_says_what_it_is_and_how_it_was_made(bundle, tmp_path, suffix, capsys):
    count = 1 if suffix == "png" else 5
    path = tmp_path / f"video.{suffix}"
    write_video(path, torch.randint(0, 255, (count, 16, 24, 3), dtype=torch.uint8).numpy(), 10)
    facts = info.describe(path)
    assert facts["size"] == "16x24 (height x width)" and facts["settings"].startswith("none inside")
    assert facts.get("frames") == (5 if count > 1 else None)
    record = json.dumps({"megadit_record": 1, "prompt": "a seven", "seed": 3, "churn": 0.0})
    write_video(path, torch.zeros((count, 16, 24, 3), dtype=torch.uint8).numpy(), 8, metadata={"comment": record})
    facts = info.describe(path)
    assert facts["made with prompt"] == "a seven" and facts["made with seed"] == 3
    path.write_bytes(b"broken")
    assert info.main([str(path)]) == 2 and "cannot read" in capsys.readouterr().err


def test_figures_are_written_in_words():
    said = info.in_words({"a": 0.1733060916264852, "b": 1234567, "c": True, "d": [1, 2.5], "e": None, "f": []})
    assert said == {"a": "0.1733", "b": "1,234,567", "c": "yes", "d": "1, 2.5", "f": "none"}


def test_a_blend_of_datasets(tmp_path, capsys):
    for name, samples in (("one", 70), ("two", 1200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "megadit.json").write_text(json.dumps({"num_samples": {"train": samples, "val": 7}}))
    blend = tmp_path / "both.yaml"
    blend.write_text(
        "splits:\n  train: {blend: [{weight: 1, path: one}, {weight: 2.5, path: two}]}\n  val: {path: one}\n"
    )
    assert info.describe(blend) == {
        "blend": str(blend),
        "train 1": f"{tmp_path / 'one'}: 70 samples, weight 1",
        "train 2": f"{tmp_path / 'two'}: 1,200 samples, weight 2.5",
        "val 1": f"{tmp_path / 'one'}: 7 samples, weight 1",
    }
    for text in ("a: 1\n", "splits: [1]\n", "splits: {train: {weight: 1}}\n", "splits: {train: {blend: 3}}\n"):
        blend.write_text(text)
        assert info.main([str(blend)]) == 2
        assert "is not a blend of data sets" in capsys.readouterr().err
    blend.write_text("splits: {train: {path: three}}\n")
    with pytest.raises(UserError, match="three/megadit.json does not exist"):
        info.describe(blend)


def test_a_page_shows_a_run(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert info.main([str(run), "--html", str(page)]) == 0
    assert "There are none yet" in page.read_text() and "Nothing went wrong." in page.read_text()
    frames = torch.randint(0, 255, (3, 16, 16, 3), dtype=torch.uint8).numpy()
    for step in range(100, 1300, 100):
        write_video(run / "samples" / f"step_{step:07d}" / "00_a_<red>_seven.mp4", frames, 8)
    write_video(run / "samples" / "step_0001200" / "01_a_two.png", frames[:1])
    write_video(run / "curves.png", frames[:1])
    (run / "events.jsonl").write_text('{"time": 1.0, "kind": "<spike>"}\n{"time": 2')
    assert info.main([str(run), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:video/mp4;base64,") == 8 and text.count("data:image/png;base64,") == 2
    assert "step 100<" in text and "step 1,200<" in text and "step 200<" not in text
    assert "&lt;spike&gt;" in text and "a_&lt;red&gt;_seven" in text and "<red>" not in text
    assert "recipe: digits" in text and "http" not in text
    capsys.readouterr()
    assert info.main([str(run / "checkpoints" / "iter_0000500"), "--html", str(page)]) == 2
    assert "--html is the page of a training run or a dataset" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl"])
def test_a_page_shows_no_file_to_which_a_link_leads(run, tmp_path_factory, capsys, name):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    private, page = elsewhere / "private", elsewhere / "page.html"
    private.write_text((run / name).read_text() if (run / name).exists() else "SECRET")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(private)
    assert info.main([str(run), "--html", str(page)]) == 2
    assert not page.exists() and "SECRET" not in capsys.readouterr().err


@pytest.mark.parametrize("link", ["samples", "samples/step_0000001", "samples/step_0000001/a.png"])
def test_a_page_shows_no_picture_of_elsewhere_and_any_bytes_as_text(run, tmp_path_factory, link):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    private = elsewhere / "samples/step_0000001/a.png"
    private.parent.mkdir(parents=True)
    write_video(private, torch.zeros(1, 8, 8, 3, dtype=torch.uint8).numpy())
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    (run / link).symlink_to(elsewhere / link)
    wide = json.dumps({f"<img src=x>{number}": number for number in range(100_000)})
    (run / "events.jsonl").write_bytes(b"\xff<script>\n" + wide.encode() + b"\n[1]\n")
    assert info.main([str(run), "--html", str(elsewhere / "page.html")]) == 0
    text = (elsewhere / "page.html").read_text()
    assert "step 1<" in text and "data:image" not in text
    assert "\ufffd&lt;script" in text and "<img" not in text and len(text) < 50_000


@pytest.mark.parametrize("as_json", [False, True])
def test_command_prints_a_table_or_json(bundle, capsys, monkeypatch, as_json):
    monkeypatch.setenv("COLUMNS", "400")
    assert info.main([str(bundle), *(["--json"] if as_json else [])]) == 0
    shown = capsys.readouterr().out
    assert f"{NUM_PARAMETERS:,}" in shown
    if as_json:
        assert json.loads(shown)["training step"] == 3500
        return
    facts = info.in_words(info.in_force(info.describe(bundle)))
    column = 2 + max(map(len, facts))
    rows = [(line[:column].rstrip(), line[column:].rstrip()) for line in shown.splitlines()]
    assert rows == list(facts.items()), "names in one column, what they are in another"


def test_other_folders_are_refused(tmp_path, capsys):
    assert info.main([str(tmp_path)]) == 2
    assert "neither a bundle nor a dataset" in capsys.readouterr().err
    with pytest.raises(UserError, match="does not exist"):
        info.describe(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["- 1", "model: {}", "a: ["])
def test_a_broken_configuration_is_refused(run, text):
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        info.describe(run)


def test_a_damaged_bundle_is_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / "transformer" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="missing"):
        info.describe(copy)


STEPS = {
    "empty": ([], "it is empty: was its download interrupted?"),
    "one folder too high": (["snapshots/0a/model_index.json"], "did you mean {}/snapshots/0a?"),
    "videos": (["a.MP4", "a.txt"], "megadit prepare videos makes a data set of its videos"),
    "images": (["a.jpg"], "megadit prepare images makes a data set of its images"),
    "tar files": (["00000.tar"], "megadit prepare webdataset makes a data set of its tar files"),
    "weights": (["model.safetensors"], "give one of its files of weights by itself"),
}


@pytest.mark.parametrize(("names", "step"), STEPS.values(), ids=STEPS)
def test_a_folder_that_cannot_be_described_or_converted_says_what_to_do(names, step, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    for read in (info.describe, open_published):
        with pytest.raises(UserError) as raised:
            read(tmp_path)
        assert str(raised.value).endswith(f"; {step.format(tmp_path)}")


def test_a_published_model_is_to_be_converted(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="; megadit convert makes a bundle of a published model$"):
        info.describe(tmp_path)
