"""A ViT of clips: the tower of images with a time axis, from its data to what judges and evaluates with it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.commands.classify import Classifier
from megadit.infer.commands.classify import main as classify
from megadit.infer.evaluate.command import main as evaluate
from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.videos import Clip
from megadit.infer.media.video_io import write_video
from megadit.infer.pictures import read_picture
from megadit.models.bundle import open_any_bundle
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.networks.registry import build_network
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.serve.backend.features import Features
from megadit.serve.service_info import Limits
from megadit.train.data.prepare import command as prepare
from megadit.train.demos.digits import compare_classifiers as compare_classifiers
from megadit.train.demos.digits import data as digits
from tests.bundles import random_state, write_classifier_bundle, write_clip_classifier_bundle, write_tiny_bundle

CPU = torch.device("cpu")
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
SHORT = (
    "data.global_batch_size=1",
    "checkpoint.save_interval=1000",
    "validation.interval=0",
    "logger.tensorboard=false",
    "logger.curves=false",
)
SMALL = replace(NAMED_CONFIGS["vit_digits_clips"], num_layers=2, hidden_size=64)


def noise(count=2, frames=9, height=16, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, frames, height, width, 3), generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_clip_classifier_bundle(tmp_path_factory.mktemp("clips") / "bundle")


@torch.no_grad()
def test_a_still_clip_is_what_the_tower_of_images_sees():
    """The image's weights, a third for each frame of a token, give of the still clip what they give of the image."""
    of_images, of_clips = (
        replace(SMALL, learned_positions=(1, 4, 4), patch_temporal=frames, num_classes=7) for frames in (1, 3)
    )
    state = random_state(of_images, spread=0.3)
    image, clip = build_network(of_images).eval(), build_network(of_clips).eval()
    image.load_state_dict(state)
    name = "x_embedder.linear.weight"
    clip.load_state_dict(state | {name: state[name].repeat(1, 3) / 3})
    x_BCTHW = torch.randn(2, 3, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    still_BCTHW = x_BCTHW.expand(-1, -1, 3, -1, -1)
    torch.testing.assert_close(clip(still_BCTHW), image(x_BCTHW), rtol=1e-4, atol=1e-4)
    moving_BCTHW = torch.cat([still_BCTHW[:, :, :2], x_BCTHW.roll(1, 4)], 2)
    assert not torch.allclose(clip(moving_BCTHW), image(x_BCTHW), atol=1e-2)


def white_clips(count, split, generator):
    """Pixels BCTHW of fast digits, and the direction of each."""
    directions = list(digits.DIRECTIONS)
    way_B = torch.randint(4, (count,), generator=generator)
    attributes = [
        digits.Attributes(digit=number % 10, colour="white", direction=directions[variant], speed="fast")
        for number, variant in enumerate(way_B.tolist())
    ]
    return digits.draw_clips(attributes, split, generator), way_B


def share_of_directions_learned(prepared):
    """Of held-out clips, by a small tower trained on clips that are `prepared`."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build_network(replace(SMALL, num_classes=4))
    video_BCTHW, way_B = white_clips(400, "train", generator)
    video_BCTHW = prepared(video_BCTHW)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    for _ in range(45):
        row_B = torch.randint(len(way_B), (32,), generator=generator)
        loss = F.cross_entropy(network(video_BCTHW[row_B]), way_B[row_B])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_BCTHW, way_B = white_clips(200, "heldout", generator)
    with torch.no_grad():
        return (network.eval()(prepared(held_BCTHW)).argmax(1) == way_B).float().mean().item()


def test_directions_are_learned_of_clips_and_not_of_their_middle_frame():
    assert share_of_directions_learned(lambda video: video) >= 0.8
    assert share_of_directions_learned(lambda video: video[:, :, 4:5].expand_as(video)) < 0.5


def test_a_bundle_is_an_extractor_of_clips(bundle):
    (extractor,) = open_extractors(bundle.path, CPU)
    assert (extractor.sees, extractor.fewest_frames, extractor.width) == ("clips", 9, 32)
    video = noise(frames=13)
    found = extractor(video)
    pixels = video[:, 2:11].movedim(-1, 1).float() / 127.5 - 1
    network = bundle.load_classifier()
    with torch.no_grad():
        torch.testing.assert_close(network.head.linear(found), network(pixels))
    assert not torch.allclose(found, extractor(video.flip(1)), atol=1e-3)
    assert extractor(noise(height=20, width=28)).shape == (2, 32)


def test_a_bundle_of_pictures_is_one_too_and_of_videos_none(tmp_path):
    write_classifier_bundle(tmp_path / "pictures")
    (extractor,) = open_extractors(tmp_path / "pictures", CPU)
    assert extractor.sees == "pictures" and extractor(noise(frames=1)).shape == (2, 32)
    write_tiny_bundle(tmp_path / "videos")
    with pytest.raises(UserError, match="makes videos: see `megadit generate`"):
        open_extractors(tmp_path / "videos", CPU)


@pytest.fixture
def folder(tmp_path):
    """Clips of nine frames of 16 x 16 at eight a second, eight in each of two folders."""
    for name, seed in (("left", 0), ("right", 1)):
        (tmp_path / "clips" / name).mkdir(parents=True)
        for number, video in enumerate(noise(8, seed=seed).numpy()):
            write_video(tmp_path / "clips" / name / f"{number}.mp4", video, 8)
    return tmp_path / "clips"


def test_clips_are_evaluated_through_it(bundle, folder, tmp_path):
    out = tmp_path / "out"
    videos, real = ("--videos", str(folder / "right")), ("--real", str(folder / "left"))
    asked = [*videos, *real, "--out", str(out), "--extractors", str(bundle.path), "--metrics", "kvd"]
    assert evaluate(asked) == 0
    assert "class token" in (out / "report.json").read_text()


def test_clips_are_classified_by_torch_and_by_a_graph(bundle, folder, tmp_path, capsys):
    export_bundle(bundle.path, tmp_path / "exported", ExportSettings(profiles=("batch=1,8,16",)))
    for of, runtime in ((bundle.path, "torch"), (tmp_path / "exported", "onnx")):
        out = tmp_path / f"{runtime}.json"
        assert classify([str(of), str(folder), "--runtime", runtime, "--labelled", "--out", str(out)]) == 0
    torch_rows, graph_rows = (read_json(tmp_path / f"{name}.json")["pictures"] for name in ("torch", "onnx"))
    assert len(torch_rows) == 16
    for ours, graph in zip(torch_rows, graph_rows, strict=True):
        assert ours["classes"] == pytest.approx(graph["classes"], abs=1e-4)
    write_video(tmp_path / "short.mp4", noise(1, frames=5)[0].numpy(), 8)
    capsys.readouterr()
    assert classify([str(bundle.path), str(tmp_path / "short.mp4")]) == 2
    assert "has 5 frames, fewer than 9" in capsys.readouterr().err


def test_a_served_model_takes_an_mp4(bundle, folder):
    limits = Limits(max_frames=1, max_pixels=1, max_work=1)
    served = Features("image_to_classes", bundle, runtime="torch", device="cpu", limits=limits)
    try:
        file = folder / "left" / "0.mp4"
        (row,) = served.answer([[file.read_bytes()]])
    finally:
        served.close()
    (expected,) = Classifier(bundle)([read_picture(file)])
    torch.testing.assert_close(torch.from_numpy(row[0]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_moving_digits_that_it_never_saw(run_ranks, tmp_path, capsys):
    """The recipe, with fewer layers and steps: the way of held-out clips is named, backwards the other way, and of a
    still clip it is a guess; the demo's classifier stands beside it."""
    assert prepare.main(["digit_clips", str(tmp_path / "data"), "--num_images", "2000"]) == 0
    run = tmp_path / "run"
    smaller = ("model.num_layers=2", "train.train_iters=90", *SHORT)
    folders = f"data.path={tmp_path / 'data'}", f"train.output_dir={run}"
    run_ranks(1, "-m", "megadit.train", "--recipe", "vit_digits_clips", *smaller, *folders)
    classifier = Classifier(open_any_bundle(str(run)))
    generator = torch.Generator().manual_seed(0)
    video_BCTHW, way_B = white_clips(200, "heldout", generator)
    video_BTHWC = ((video_BCTHW + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)
    wanted = [list(OPPOSITE)[variant] for variant in way_B.tolist()]

    def share(video_BTHWC, wanted):
        found = classifier([Clip(video.numpy(), 8.0, "") for video in video_BTHWC]).argmax(1).tolist()
        said = [classifier.names[index].split()[2] for index in found]
        return sum(map(str.__eq__, said, wanted)) / len(wanted)

    assert share(video_BTHWC, wanted) >= 0.9
    assert share(video_BTHWC.flip(1), [OPPOSITE[variant] for variant in wanted]) >= 0.9
    assert share(video_BTHWC[:, 4:5].expand_as(video_BTHWC), wanted) < 0.5
    assert compare_classifiers.main([str(run), "--num_steps", "5", "--num_clips", "100"]) == 0
    said = capsys.readouterr().out
    assert said.count("ms a clip") == 4 and "vit, 528 clips as drawn: digit " in said
