"""Engines of networks that judge, as far as a machine without TensorRT can tell: what is built and compared."""

import shutil

import pytest
import torch

from megadit.export import engines
from megadit.export.engines import add_engines
from megadit.export.operators import check_operators
from megadit.export.to_tensorrt import EngineSettings, Libraries
from megadit.infer.runtimes.load import open_exported
from megadit.infer.runtimes.onnx import OnnxNetworks
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from tests.export.test_to_tensorrt import FakePolygraphy, fake_tensorrt

NETWORKS = {"clip": ["image_tower", "text_tower"], "classifier": ["classifier"]}


@pytest.fixture(params=NETWORKS)
def exported(request, tmp_path):
    """A bundle with its graphs, to which engines may be added."""
    graphs = request.getfixturevalue(f"exported_{request.param}")
    return Bundle.open(shutil.copytree(graphs.path, tmp_path / "exported"))


@pytest.fixture
def polygraphy(monkeypatch):
    """What would build engines; those that are loaded are the graphs, by ONNX Runtime."""
    fake = FakePolygraphy()
    monkeypatch.setattr(engines, "load_libraries", lambda: Libraries(fake_tensorrt(), fake))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "_gpu", lambda: ("H200", (9, 0)))

    def open_engines(plan, device):
        bundle = Bundle.open(plan.directory.parent)
        return OnnxNetworks(open_exported(bundle, "onnx"), torch.device("cpu"))

    monkeypatch.setattr(engines, "open_engines", open_engines)
    return fake


def test_each_network_gets_an_engine_that_is_compared(exported, polygraphy):
    report = add_engines(exported.path, EngineSettings())
    names = NETWORKS[exported.kind]
    assert list(report) == names and all(0 < report[name]["worst"] < 1e-4 for name in names)
    plan = open_exported(Bundle.open(exported.path, verify=True), "tensorrt")
    assert [plan.network(name) for name in names] == [open_exported(exported, "onnx").network(name) for name in names]
    assert {file.name for file in plan.directory.iterdir()} == {"settings.json", *(f"{name}.plan" for name in names)}
    for name, profile in zip(names, polygraphy.profiles, strict=True):
        for tensor in plan.network(name).inputs:
            assert profile[tensor.name] == tuple(tensor.shape_at(extreme) for extreme in ("min", "opt", "max"))
        check_operators(exported.path / f"onnx/{name}.onnx", "10.1")


def test_an_engine_that_differs_leaves_none(exported, polygraphy, monkeypatch):
    """Negative control: one whose output is a thousandth off."""
    opened = engines.open_engines

    def wrong(plan, device):
        networks = opened(plan, device)
        return {
            name: lambda inputs, shape, name=name: 1.001 * networks[name](inputs, shape)
            for name in NETWORKS[exported.kind]
        }

    monkeypatch.setattr(engines, "open_engines", wrong)
    with pytest.raises(UserError, match="under tensorrt is not the network"):
        add_engines(exported.path, EngineSettings())
    assert not (exported.path / "plan").exists()


def test_engines_of_an_export_killed_before_their_comparison_are_opened_by_nobody(
    exported, polygraphy, monkeypatch, tmp_path
):
    killed, compare = tmp_path / "killed", engines.compare_under

    def copied(runtime, bundle, opened):
        shutil.copytree(bundle.path, killed)  # all that a kill leaves at this moment
        return compare(runtime, bundle, opened)

    monkeypatch.setattr(engines, "compare_under", copied)
    add_engines(exported.path, EngineSettings())
    assert (killed / "plan/settings.json").is_file()
    with pytest.raises(
        UserError, match="never compared with torch under tensorrt: run `megadit export .* --format tensorrt"
    ):
        open_exported(Bundle.open(killed, verify=True), "tensorrt")
