"""Images from words in two stages of resolution: the second begins where the first ended, and its pictures are videos
of one frame."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from megadit.infer.evaluate.command import main as evaluate
from megadit.infer.evaluate.extractors.digits import DigitReader
from megadit.infer.evaluate.extractors.files import KIND
from megadit.infer.generate.command import main as generate
from megadit.infer.media.video_io import read_video, write_video
from megadit.models.bundle import Bundle
from megadit.train.checkpoints.to_bundle import main as make_bundle
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.demos.digits.labelled import draw_captioned
from tests.stable_diffusion import random_vae

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = ("-m", "megadit.train", "--recipe")
SMALL = (
    *("data.num_workers=0", "data.global_batch_size=1", "ema.sigma_rels=[]", "validation.num_batches=2"),
    *("train.num_threads=1", "logger.tensorboard=false", "logger.curves=false", "checkpoint.save_interval=1000"),
)
FIRST_STEPS, SECOND_STEPS = 80, 8


@pytest.fixture(scope="module")
def first_stage(tmp_path_factory, run_ranks):
    """A folder with digits of both sizes and the run of the first stage."""
    folder = tmp_path_factory.mktemp("digits")
    for source in ("digit_images", "digit_images_64"):
        assert prepare.main([source, str(folder / source), "--num_images", "1000"]) == 0
    asked = (f"data.path={folder / 'digit_images'}", f"train.output_dir={folder / 'first'}", "validation.interval=0")
    run_ranks(1, *TRAIN, "image_digits", *SMALL, *asked, f"train.train_iters={FIRST_STEPS}")
    return folder


@pytest.fixture(scope="module")
def first_loss(first_stage, run_ranks):
    """first_loss(name, ...): of the first validation of `image_digits_64` with these overrides."""

    def loss(name: str, *changes: str) -> float:
        out = first_stage / name
        asked = (f"data.path={first_stage / 'digit_images_64'}", f"train.output_dir={out}", *changes)
        steps = (f"train.train_iters={SECOND_STEPS}", f"validation.interval={SECOND_STEPS}")
        run_ranks(1, *TRAIN, "image_digits_64", *SMALL, *steps, "validation.prompts=[]", *asked)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        return last["validation"]["none"]["mean"]

    return loss


def test_the_second_stage_begins_where_the_first_ended(first_stage, first_loss):
    """Its first validation loss is below that of a fresh start, and below its own with positions as before."""
    begun = f"checkpoint.init_from={first_stage / 'first'}"
    second, fresh = first_loss("second", begun), first_loss("fresh")
    assert second < 0.7 * fresh
    assert second < 0.95 * first_loss("as before", begun, "model.rope_interpolation=[1,1,1]")


def write_pictures(folder: Path, count: int) -> Path:
    """Digits of 64 x 64 pixels with a text beside each."""
    folder.mkdir()
    chunk = next(draw_captioned(count, seed=3, zoom=2))
    pixels_BTHWC = ((chunk.video_BCTHW.movedim(1, -1) + 1) * 127.5).round().byte().numpy()
    for number, (video_THWC, caption) in enumerate(zip(pixels_BTHWC, chunk.captions, strict=True)):
        write_video(folder / f"{number:03d}.png", video_THWC)
        (folder / f"{number:03d}.txt").write_text(caption)
    return folder


def test_latents_of_an_autoencoder_and_texts_of_clip(tmp_path, write_clip, run_ranks):
    """The published recipes, narrower: a folder of pictures to a curve over guidance."""
    pictures = write_pictures(tmp_path / "pictures", 48)
    random_vae().save_pretrained(tmp_path / "vae")
    parts = ["--tokenizer", str(tmp_path / "vae"), "--text_encoder", str(write_clip(tmp_path / "clip"))]
    narrow = ("model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=2", "train.precision=fp32")
    packs = ("data.seq_length=2048", "data.text_seq_length=512", "train.train_iters=4", "optimizer.lr_warmup_iters=1")
    begun = ()
    for side, recipe in ((32, "image_xl_256"), (64, "image_xl_512")):
        data, out = tmp_path / f"data{side}", tmp_path / recipe
        sizes = ["--sizes", f"{side}x{side}", "--val_share", "0.2"]
        assert prepare.main(["images", str(pictures), str(data), *sizes, *parts]) == 0
        assert DatasetInfo.read(data).latent_channels == 4
        asked = (f"data.path={data}", f"train.output_dir={out}", "validation.interval=0", *begun)
        run_ranks(1, *TRAIN, recipe, *SMALL, *narrow, *packs, *asked, "model.crossattn_emb_size=16")
        begun = (f"checkpoint.init_from={out}",)
    bundle = tmp_path / "bundle"
    assert make_bundle([str(tmp_path / "image_xl_512"), str(bundle)]) == 0
    assert Bundle.open(bundle).config.rope_interpolation == (1.0, 2.0, 2.0)
    picture, steps = tmp_path / "seven.png", ["--num_steps", "2"]
    asked = ["--checkpoint_path", str(bundle), "--prompt", "a red seven", "--video_save_path", str(picture)]
    assert generate([*asked, *steps]) == 0
    assert read_video(picture)[0].shape == (1, 64, 64, 3)
    save_file(DigitReader().state_dict(), tmp_path / "classifier.safetensors", metadata={KIND: "digits"})
    seen = ["--real", str(pictures), "--frames", "1", "--size", "32", "32", "--metrics", "kid"]
    curve = [
        "--extractors",
        str(tmp_path / "classifier.safetensors"),
        "--guidances",
        "1",
        "4",
        "--count",
        "16",
        "--out",
        str(tmp_path / "curve"),
    ]
    assert evaluate([str(bundle), *seen, *curve, *steps]) == 0
    metric_values = json.loads((tmp_path / "curve" / "report.json").read_text())["metrics"]
    assert len(metric_values) == 2 and {figure["metric"] for figure in metric_values} == {"kid"}
