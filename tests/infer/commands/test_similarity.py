"""`megadit similarity`, and `megadit classify` with labels: by torch and by the exported towers."""

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.infer.commands.classify import Classifier
from megadit.infer.commands.classify import main as classify
from megadit.infer.commands.similarity import main
from megadit.infer.evaluate.videos import Clip
from megadit.infer.matching import Matcher, recall
from megadit.models.bundle import Bundle
from megadit.models.shared.files import read_json
from tests.bundles import write_clip_bundle

TEXTS = ["a red seven", "a green three on a table", "the number nine"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_clip_bundle(tmp_path_factory.mktemp("clip") / "bundle").path


@pytest.fixture
def pictures(tmp_path):
    generator = np.random.default_rng(0)
    for index, text in enumerate([*TEXTS, TEXTS[0]]):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        iio.imwrite(tmp_path / "pictures" / f"{index}.png", generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        (tmp_path / "pictures" / f"{index}.txt").write_text(f"{text}\n")
    return tmp_path / "pictures"


def clips(count=4):
    generator = np.random.default_rng(1)
    return [Clip(generator.integers(0, 256, (1, 32, 32, 3), dtype=np.uint8), 0.0, "a picture") for _ in range(count)]


@torch.no_grad()
def test_similarities_and_labels_are_those_of_the_network(bundle):
    opened = Bundle.open(bundle)
    network, words, matcher = opened.load_clip(), opened.load_text_encoder(), Matcher(opened)
    pixels = torch.stack([torch.from_numpy(clip.video_THWC) for clip in clips()]).movedim(-1, 1) / 127.5 - 1
    images_NE = network.embed_images(pixels)
    torch.testing.assert_close(matcher.pictures(clips()), images_NE)
    alone = [network.embed_texts(*words.tokens([text]))[0] for text in TEXTS]
    torch.testing.assert_close(matcher.texts(TEXTS), torch.stack(alone), rtol=1e-5, atol=1e-5)
    prompts = ["{}", "a picture of {}"]
    means = [sum(network.embed_texts(*words.tokens([p.format(text)]))[0] for p in prompts) for text in TEXTS]
    expected = (network.scale * images_NE @ torch.stack([mean / mean.norm() for mean in means]).T).softmax(-1)
    found = Classifier(opened, labels=TEXTS, prompts=prompts)(clips())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, Classifier(opened, labels=TEXTS, prompts=["{}"])(clips()), atol=1e-3)


def test_graphs_of_both_towers_are_torch(bundle, exported_clip):
    report = exported_clip.manifest["export"]["onnx"]["report"]
    assert list(report) == ["image_tower", "text_tower"] and max(each["worst"] for each in report.values()) < 1e-4
    graphs, torchs = Matcher(exported_clip, runtime="onnx"), Matcher(Bundle.open(bundle))
    assert graphs.most == 3
    torch.testing.assert_close(graphs.pictures(clips(3)), torchs.pictures(clips(3)), rtol=1e-4, atol=1e-5)
    texts = [*TEXTS, "a three", "seven"]
    torch.testing.assert_close(graphs.texts(texts), torchs.texts(texts), rtol=1e-4, atol=1e-5)


def test_every_option_reaches_what_is_told(exported_clip, pictures, tmp_path, capsys):
    out, told = exported_clip.path, tmp_path / "out.json"
    options = ["--out", str(told), "--batch_size", "2", "--device", "cpu"]
    assert main([str(out), str(pictures / "0.png"), *TEXTS, *options]) == 0
    (row,) = read_json(told)["pictures"]
    expected = Matcher(exported_clip).texts(TEXTS)
    assert list(row["texts"]) == TEXTS and len(expected) == 3 and all(-1 <= x <= 1 for x in row["texts"].values())
    assert "a red seven" in capsys.readouterr().out
    assert main([str(out), str(pictures), *options, "--runtime", "onnx"]) == 0
    found = read_json(told)
    assert list(found) == ["recall@1", "recall@5", "recall@10"] and found["recall@5"] == [1.0, 1.0]
    assert "recall@1: " in capsys.readouterr().out


def test_labels_and_prompts_name_pictures(exported_clip, pictures, capsys):
    arguments = [str(exported_clip.path), str(pictures / "0.png"), "--labels", *TEXTS, "--prompts", "a {}", "one {}"]
    assert classify([*arguments, "--runtime", "onnx"]) == 0
    assert capsys.readouterr().out.count("%") == 3


def test_recall_counts_all_that_are_one_s_own():
    similarity = torch.tensor([[0.9, 0.1], [0.8, 0.7], [0.1, 0.2]])
    own = torch.tensor([[True, False], [False, True], [False, True]])
    assert recall(similarity, own, [1, 2])["recall@1"] == (pytest.approx(2 / 3), 1.0)
    assert recall(similarity, own, [1, 2])["recall@2"] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        (main, ["nowhere.png", "a cat"], "cannot read nowhere.png"),
        (main, ["PICTURES/none.png"], "holds no text of none.png"),
        (main, ["PICTURES", "--batch_size", "0"], "--batch_size=0 must be at least 1"),
        (classify, ["PICTURES"], "has no classes: give --labels"),
        (classify, ["PICTURES", "--labels", "a cat", "--prompts", "a dog"], "for the label"),
    ],
)
def test_mistakes_are_one_line(bundle, pictures, command, arguments, says, capsys):
    assert command([str(bundle), *(each.replace("PICTURES", str(pictures)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_another_kind_of_bundle_is_refused(bundle_dir, capsys):
    assert main([str(bundle_dir), "x.png", "a cat"]) == 2
    assert "makes videos: see `megadit generate`" in capsys.readouterr().err
