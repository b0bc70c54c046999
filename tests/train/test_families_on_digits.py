"""A network of every family learns a batch by heart, learns digits, and becomes a bundle that makes videos.

Here each trains for a few steps. With MEGADIT_FAMILY_SECONDS=60 each has a minute of one processor core at the size of
the recipe `digits`, is exported too, and what it makes of 24 prompts is left as a picture and counted
(`models/README.md` has the figures).
"""

import json
import os
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.infer.media.contact_sheet import contact_sheet
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.text_encoders import ClassLabels
from megadit.train.checkpoints.to_bundle import main as make_bundle
from megadit.train.data.prepare.drawn import prepare_drawn
from megadit.train.data.writer import DatasetWriter
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.classifier import DigitReader, classify
from megadit.train.demos.digits.samples import DIGITS

JOB = Path(__file__).parent / "jobs" / "families.py"
SECONDS = float(os.environ.get("MEGADIT_FAMILY_SECONDS", "0"))
RECIPE, COUNT = ("digits", 8000) if SECONDS else ("digits_tiny", 150)
NUM_PROMPTS = 24 if SECONDS else 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 20 * SECONDS)]

LEARNED = ("model.position_embedding=learned", "model.learned_positions=[3,4,4]")
EXPERTS = ("model.experts.num_experts=4", "model.experts.ffn_hidden_size=192", "optimizer.optimizer=adamw")
FAMILIES = {
    "dit": (),
    "moviegen": (
        *("model.family=moviegen", "model.num_attention_heads=4", "model.num_query_groups=2"),
        *("model.qk_layernorm=false", *LEARNED),
    ),
    "st_dit": ("model.family=st_dit", "model.adaln_lora_dim=24"),
    "wan": ("model.family=wan", "model.parameterization=flow"),
    "token choice": (*EXPERTS, "optimizer.lr=4e-3", "model.experts.shared_ffn_hidden_size=96"),
    "expert choice": (*EXPERTS, "optimizer.lr=4e-3", "model.experts.routing=expert_choice"),
    "classes": (
        *("model.family=dit", "model.num_classes=60", "model.crossattn_emb_size=2", "model.qk_layernorm=false"),
        "model.position_embedding=sincos",
    ),
}
"""Name -> changes of the recipe; `classes` sees images, as its positions know no time."""
CLASSES = tuple(f"{colour} {digit}" for colour in digits.COLOURS for digit in digits.DIGITS)


def write_classes(out):
    """Images of digits, each of the class that says what it shows."""
    tokenizer, labels, generator = DIGITS.fit_tokenizer(0), ClassLabels(names=CLASSES), torch.Generator().manual_seed(1)
    with DatasetWriter(out, tokenizer=tokenizer, text_encoder=labels) as writer:
        for split, count, glyphs in (("val", 64, "heldout"), ("train", COUNT, "train")):
            shown = digits.random_attributes(count, images=True, generator=generator)
            names = [f"{one.colour} {digits.DIGITS[one.digit]}" for one in shown]
            latents = tokenizer.encode(digits.draw_images(shown, glyphs, generator)).half()
            for place, (latent_CTHW, text_LE) in enumerate(
                zip(latents, labels.encode(names).features_BLE, strict=True)
            ):
                writer.add(
                    split,
                    f"{split}-{place:06d}",
                    latent_CTHW=latent_CTHW,
                    text_LE=text_LE,
                    caption=names[place],
                    num_frames=1,
                    height=digits.FRAME_SIZE,
                    width=digits.FRAME_SIZE,
                    fps=0.0,
                )
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_ranks):
    """The folder in which all families were trained."""
    folder = tmp_path_factory.mktemp("families")
    prepare_drawn(DIGITS, folder / "digits", num_clips=COUNT // 2, num_images=COUNT, num_val=64)
    write_classes(folder / "images")
    settings = (
        *("data.num_workers=0", "data.global_batch_size=1", "train.train_iters=30", "train.num_threads=1"),
        "logger.tensorboard=false",
    )
    cases = {}
    for family, changes in FAMILIES.items():
        path = folder / ("images" if family == "classes" else "digits")
        cases[family] = [RECIPE, [*settings, f"data.path={path}", *changes]]
    (folder / "families.json").write_text(json.dumps(cases))
    run_ranks(1, JOB, folder, SECONDS, timeout=550 + 19 * SECONDS)
    return folder


@pytest.fixture(scope="module")
def bundles(trained):
    """bundles(family): the bundle of its last checkpoint."""

    def make(family):
        path = trained / f"{family} bundle"
        if not path.exists():
            assert make_bundle([str(trained / family), str(path)]) == 0
        return path

    return make


def numbers(trained, family):
    return json.loads((trained / f"{family}.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_learnt_by_heart(trained, family):
    losses = numbers(trained, family)["by_heart"]
    assert losses[0] > 0.5, "at first a network is zero"
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_validation_loss_falls(trained, family):
    found = numbers(trained, family)
    assert min(found["after"].values()) < (0.8 if SECONDS else 0.98) * found["before"]
    if SECONDS:
        print(f"\n{family}: { ({**found, 'by_heart': [found['by_heart'][0], found['by_heart'][-1]]}) }")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bundle_makes_videos(trained, bundles, family):
    shown, prompts = prompts_of(family)
    pipeline = TextToVideo.from_pretrained(bundles(family), device="cpu")
    videos = [video.video for video in pipeline(prompts, seeds=list(range(len(prompts))))]
    assert {video.shape for video in videos} == {(1 if family == "classes" else 9, 32, 32, 3)}
    assert all(video.std() > 0 for video in videos) and not np.array_equal(*videos[:2])
    if SECONDS:
        wide = [np.concatenate(video[:: max(1, len(video) // 3)], axis=1)[None] for video in videos]
        picture = trained / f"{family}.png"
        iio.imwrite(picture, contact_sheet(wide, prompts, 6)[0])
        print(f"\n{family}: {shares_right(videos, shown)}; look at {picture}")


def prompts_of(family):
    """(what is to be seen, how it is asked for)."""
    generator = torch.Generator().manual_seed(2)
    shown = digits.random_attributes(NUM_PROMPTS, images=family == "classes", generator=generator)
    if family == "classes":
        return shown, [f"{one.colour} {digits.DIGITS[one.digit]}" for one in shown]
    return shown, digits.random_captions(shown, "heldout", generator)


def shares_right(videos, shown):
    """Of colours and directions; which digit is seen is left to whoever looks."""
    video_BCTHW = torch.stack([torch.from_numpy(video) for video in videos]).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    seen = classify(DigitReader().eval(), video_BCTHW)
    colour_B1 = torch.tensor([[list(digits.COLOURS).index(one.colour)] for one in shown])
    shares = {"colour": (seen.colour_BT == colour_B1).float().mean().item()}
    if shown[0].direction:
        direction_B = torch.tensor([list(digits.DIRECTIONS).index(one.direction) for one in shown])
        shares["direction"] = (seen.direction_B == direction_B).float().mean().item()
    return shares


@pytest.mark.skipif(not SECONDS, reason="tests/export/test_families.py exports smaller networks of all families")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bundle_is_exported(trained, bundles, family):
    from megadit.export.build import ExportSettings, export_bundle

    frames = () if family != "classes" else ("frames=1", "text=1")
    report = export_bundle(bundles(family), trained / f"{family} exported", ExportSettings(profiles=frames))
    print(f"\n{family}: F differs by {report['denoiser']['worst']:.1e}, video {report['video']['psnr']:.1f} dB")
    assert report["denoiser"]["worst"] <= 1e-4 and report["video"]["psnr"] >= 50
    assert Bundle.open(trained / f"{family} exported").manifest["export"]["onnx"]["report"] == report
