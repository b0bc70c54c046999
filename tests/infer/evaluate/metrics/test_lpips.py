"""Our LPIPS against that of torchmetrics, with the weights that it brings and a random AlexNet."""

import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megadit.infer.commands import calibrate_cache
from megadit.infer.evaluate.metrics.lpips import LPIPS
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.step_cache import bundle_plans
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")


def alexnet() -> nn.Module:
    """The convolutions of torchvision's `alexnet`, under its names, with random weights."""
    torch.manual_seed(0)
    pool = lambda: nn.MaxPool2d(3, 2)  # noqa: E731
    layers = [
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), pool(), nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), pool(),
        nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), pool(),
    ]  # fmt: skip
    network = nn.Module()
    network.features = nn.Sequential(*layers)
    return network


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lpips")
    torch.save(alexnet().state_dict(), root / "alexnet-owt-00000000.pth")
    shutil.copy(Path(torchmetrics.__file__).parent / "functional/image/lpips_models/alex.pth", root)
    return root


@pytest.fixture
def reference(monkeypatch):
    """torchmetrics' LPIPS, whose torchvision has our random AlexNet and nothing else."""
    from torchmetrics.functional.image import lpips

    stand_in = ModuleType("torchvision")
    stand_in.models = ModuleType("torchvision.models")
    stand_in.models.alexnet = lambda weights: alexnet()
    monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    monkeypatch.setattr(lpips, "_TORCHVISION_AVAILABLE", True)
    return lpips._LPIPS(pretrained=True, net="alex", pnet_rand=True, use_dropout=True)


def pictures(seed: int) -> torch.Tensor:
    return 2 * torch.rand(3, 3, 72, 88, generator=torch.Generator().manual_seed(seed)) - 1


def test_distances_are_those_of_torchmetrics(folder, reference):
    a, b = pictures(1), pictures(2)
    ours, expected = LPIPS.load(folder)(a, b), reference(a, b).flatten()
    torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)
    assert (ours > 0.01).all() and LPIPS.load(folder)(a, a).abs().max() == 0


def test_other_files_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="holds 0 files alexnet"):
        LPIPS.load(tmp_path)
    (tmp_path / "alexnet.pth").write_bytes(b"nothing")
    with pytest.raises(UserError, match="alexnet.pth cannot be read"):
        LPIPS.load(tmp_path)
    torch.save({"other": torch.zeros(1)}, tmp_path / "alexnet.pth")
    whole = (tmp_path / "alexnet.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "alexnet.pth", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("alexnet/data/9", bytes(1 << 26))
    with pytest.raises(UserError, match="alexnet.pth is hostile: unpacked, it is larger than"):
        LPIPS.load(tmp_path)
    (tmp_path / "alexnet.pth").write_bytes(whole)
    shutil.copy(folder / "alex.pth", tmp_path)
    with pytest.raises(UserError, match="does not hold the weights of LPIPS"):
        LPIPS.load(tmp_path)


def test_a_cache_is_calibrated_by_how_the_frames_look(folder, bundle_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate_cache, "NUM_DISTRIBUTED", 1)
    monkeypatch.setattr(calibrate_cache, "NUM_ROUNDS", 1)
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    settings = ["--checkpoint_path", str(tmp_path / "bundle"), "--num_steps", "4", "--cache_budget", "0.3"]
    measure = ["--cache_measure", "lpips"]
    seeds = ["--prompt", "a", "--seeds", *map(str, range(16)), "--device", "cpu"]
    assert calibrate_cache.main([*settings, *measure, *seeds, "--lpips_weights", str(folder)]) == 0
    (plan,) = bundle_plans(Bundle.open(tmp_path / "bundle"), "lpips")
    assert plan.skipped and 0 < plan.largest_error <= 0.85 * 0.3
    assert bundle_plans(Bundle.open(tmp_path / "bundle")) == []
    # the same, measured here
    pipeline = TextToVideo.from_pretrained(tmp_path / "bundle", device="cpu", cache_measure="lpips")
    videos = [pipeline(["a"] * 16, seeds=range(16), num_steps=4, **more) for more in ({}, {"cache_budget": 0.3})]
    exact, spared = ([torch.from_numpy(one.video).permute(0, 3, 1, 2) / 127.5 - 1 for one in side] for side in videos)
    network = LPIPS.load(folder)
    errors = [network(a, b).mean().item() for a, b in zip(spared, exact, strict=True)]
    assert max(errors) == pytest.approx(plan.largest_error, rel=0.02)
