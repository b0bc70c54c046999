"""`megadit classify`: pictures to classes, by torch and by an exported graph."""

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.export.build import ExportSettings, export_bundle
from megadit.export.engines import add_engines
from megadit.export.to_tensorrt import EngineSettings
from megadit.infer import generate
from megadit.infer.classify import Classifier, accuracy, main
from megadit.infer.evaluate.videos import Clip
from megadit.models.bundle.bundle import Bundle, write_bundle
from megadit.models.config import DiTConfig
from megadit.models.networks import build_network
from megadit.models.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.models.text_encoders import ClassLabels
from megadit.models.tokenizers import HaarTokenizer

NAMES = ("a cat, kitty", "dog", "bird")
CONFIG = DiTConfig(
    family="vit",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    in_channels=3,
    patch_spatial=4,
    crossattn_emb_size=2,
    position_embedding="learned",
    learned_positions=(1, 4, 4),
    qk_layernorm=False,
    num_classes=len(NAMES),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A random classifier of pictures of 16 x 16."""
    model, generator = build_network(CONFIG), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    path = tmp_path_factory.mktemp("classifier") / "bundle"
    write_bundle(
        path,
        config=CONFIG,
        state_dict=model.state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=1, spatial_compression=1),
        text_encoder=ClassLabels(names=NAMES),
        defaults=SamplingSettings(num_steps=1, guidance=1.0, num_frames=1, height=16, width=16, fps=0.0),
    )
    return path


@pytest.fixture(scope="module")
def exported(bundle, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "bundle"
    report = export_bundle(bundle, out, ExportSettings(profiles=("batch=1,2,3",)))
    return out, report


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


def test_a_graph_names_what_torch_names(bundle, exported):
    out, report = exported
    assert report["classifier"]["worst"] < 1e-4 and list(report) == ["classifier"]
    clips = [clip(), clip(24)]
    torch.testing.assert_close(
        Classifier(Bundle.open(out), runtime="onnx")(clips),
        Classifier(Bundle.open(bundle))(clips),
        rtol=1e-4,
        atol=1e-5,
    )


def test_every_option_reaches_what_is_named(exported, pictures, tmp_path, capsys):
    options = ["--labelled", "--top", "2", "--out", str(tmp_path / "out.json"), "--device", "cpu", "--batch_size", "2"]
    out = exported[0]
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


def test_engines_of_its_graph_are_built_elsewhere(exported):
    with pytest.raises(UserError, match="classify --runtime onnx_tensorrt"):
        add_engines(exported[0], EngineSettings())


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"adapter_rank": 4}, {"profiles": ("height=16,32,32",)}])
def test_what_a_classifier_has_not_is_refused_when_exporting(bundle, tmp_path, settings):
    with pytest.raises(UserError, match="a classifier"):
        export_bundle(bundle, tmp_path / "out", ExportSettings(**settings))
