"""`megadit classify`: pictures to classes, by torch and by an exported graph."""

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.commands.classify import Classifier, accuracy, main
from megadit.infer.evaluate.videos import Clip
from megadit.infer.generate import command as generate
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from tests.bundles import write_classifier_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_classifier_bundle(tmp_path_factory.mktemp("classifier") / "bundle").path


@pytest.fixture
def pictures(tmp_path):
    """Pictures of several sizes, in folders that the network itself names them after, but for the last."""
    generator = np.random.default_rng(0)
    for index in range(5):
        folder = tmp_path / "pictures" / ("kitty" if index < 4 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        size = (16 + 8 * (index % 2), 16 + 4 * index, 3)
        iio.imwrite(folder / f"{index}.png", generator.integers(0, 256, size, dtype=np.uint8))
    return tmp_path / "pictures"


def clip(side=16):
    pixels = torch.arange(side * side * 3).reshape(1, side, side, 3).remainder(251).byte()
    return Clip(pixels.numpy(), 0.0, "a picture")


def test_probabilities_are_those_of_the_network(bundle):
    (found,) = Classifier(Bundle.open(bundle))([clip()])
    pixels_1CTHW = torch.from_numpy(clip().video_THWC)[None].movedim(-1, 1) / 127.5 - 1
    with torch.no_grad():
        expected = Bundle.open(bundle).load_classifier()(pixels_1CTHW).softmax(-1)[0]
    torch.testing.assert_close(found, expected)


def test_a_graph_names_what_torch_names(bundle, exported_classifier):
    report = exported_classifier.manifest["export"]["onnx"]["report"]
    assert report["classifier"]["worst"] < 1e-4 and list(report) == ["classifier"]
    clips = [clip(), clip(24)]
    torch.testing.assert_close(
        Classifier(exported_classifier, runtime="onnx")(clips),
        Classifier(Bundle.open(bundle))(clips),
        rtol=1e-4,
        atol=1e-5,
    )


def test_every_option_reaches_what_is_named(exported_classifier, pictures, tmp_path, capsys):
    options = ["--labelled", "--top", "2", "--out", str(tmp_path / "out.json"), "--device", "cpu", "--batch_size", "2"]
    out = exported_classifier.path
    assert main([str(out), str(pictures), *options, "--runtime", "onnx"]) == 0
    told, found = capsys.readouterr().out.splitlines(), read_json(tmp_path / "out.json")
    assert len(told) == 5 + 2 and told[-2].startswith("top-1: ") and told[-1].startswith("top-2: ")
    assert [row["picture"] for row in found["pictures"]] == sorted(map(str, pictures.rglob("*.png")))
    first = found["pictures"][0]["classes"]
    assert len(first) == 2 and list(first.values()) == sorted(first.values(), reverse=True)
    labels = ["dog", *["a cat, kitty"] * 4]
    right = sum(next(iter(row["classes"])) == label for row, label in zip(found["pictures"], labels, strict=True))
    assert found["accuracy"]["top-1"][0] == pytest.approx(right / 5)
    assert main([str(out), str(pictures / "dog")]) == 0  # of torch, without labels
    assert "top-1" not in capsys.readouterr().out


def test_shares_are_counted():
    probability_NK = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4], [0.2, 0.5, 0.3], [0.9, 0.1, 0.0]])
    found = accuracy(probability_NK, torch.tensor([0, 2, 0, 0]), 2)
    assert found["top-1"][0] == 0.5 and found["top-2"][0] == 0.75
    assert found["top-1"][1] < 0.5 < found["top-1"][2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.png"], "cannot read nowhere.png"),
        ([".", "--labelled"], "holds no picture"),
        (["PICTURES/dog/4.png", "--top", "0"], "--top=0 must be at least 1"),
        (["PICTURES/dog/4.png", "--runtime", "onnx"], "has no onnx/"),
    ],
)
def test_mistakes_are_one_line(bundle, pictures, tmp_path, monkeypatch, arguments, says, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main([str(bundle), *(each.replace("PICTURES", str(pictures)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_folders_that_are_no_classes_are_refused(bundle, pictures, capsys):
    (pictures / "dog").rename(pictures / "horse")
    assert main([str(bundle), str(pictures), "--labelled"]) == 2
    assert "'horse' is not a class of this network" in capsys.readouterr().err


def test_each_kind_of_bundle_names_its_command(bundle, bundle_dir, capsys):
    assert generate.main(["--checkpoint_path", str(bundle), "--prompt", "a dog", "--video_save_path", "x.mp4"]) == 2
    assert "names the classes of images: see `megadit classify`" in capsys.readouterr().err
    assert main([str(bundle_dir), "x.png"]) == 2
    assert "makes videos: see `megadit generate`" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"adapter_rank": 4}, {"profiles": ("height=16,32,32",)}])
def test_what_a_classifier_has_not_is_refused_when_exporting(bundle, tmp_path, settings):
    with pytest.raises(UserError, match="a classifier"):
        export_bundle(bundle, tmp_path / "out", ExportSettings(**settings))
