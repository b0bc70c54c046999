"""The runtimes of this CPU beside diffusers' network: each computes what its network computes in torch."""

import json
from dataclasses import replace

import pytest
import torch

from megadit.export import benchmark_cpu
from megadit.infer.benchmarks.beside_diffusers import COSMOS
from megadit.models.shared.cli.verbs import main

pytest.importorskip("diffusers", reason="diffusers is not installed (megadit[diffusers])")
pytest.importorskip("openvino", reason="openvino is not installed (megadit[openvino])")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (megadit[export])")

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch):
    config = replace(COSMOS.config, num_layers=1, hidden_size=64, num_attention_heads=2, crossattn_emb_size=16)
    monkeypatch.setattr(benchmark_cpu, "COSMOS", replace(COSMOS, config=config, latents=(2, 4, 4)))


def test_every_contestant_samples_and_is_compared(small, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["benchmark", "cpu", "--rounds", "2", "--threads", "1", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    found = {one["name"]: one for one in figures["candidates"]}
    runtimes = ("torch", "ONNX Runtime", "OpenVINO", "torch.compile with freezing")
    assert found.keys() == {
        *(f"{who}, {runtime}" for who in ("megadit", "diffusers") for runtime in runtimes),
        *(f"{benchmark_cpu.EIGHT_BITS}, {runtime}" for runtime in ("ONNX Runtime", "OpenVINO")),
        "megadit, training step",
    }
    assert figures["machine"]["threads"] == 1
    for name, one in found.items():
        assert len(one["seconds"]) == 2 and all(second > 0 for second in one["seconds"])
        if name.startswith(benchmark_cpu.EIGHT_BITS):
            assert found[name.replace(" in int8", "")]["error"] < one["error"] < 5e-2, "rounded, and to eight bits"
        else:
            assert one["error"] is None if name.endswith("step") else one["error"] < 1e-4, name
    assert set(found[benchmark_cpu.BASELINE]["of_baseline"]) == set(found[benchmark_cpu.BASELINE]["seconds"])


def test_a_runtime_that_is_not_there_is_left_out(small, tmp_path, monkeypatch):
    def missing(path, spec):
        raise benchmark_cpu.UserError("not installed")

    monkeypatch.setattr(benchmark_cpu, "OpenVinoNetwork", missing)
    monkeypatch.setattr(
        benchmark_cpu, "OnnxNetwork", lambda path, spec, device: lambda inputs, shape: torch.ones(shape)
    )
    for step in ("export_onnx", "quantise"):
        monkeypatch.setattr(benchmark_cpu, step, lambda *_, **__: None)
    monkeypatch.setattr(benchmark_cpu.torch, "compile", lambda network: network)
    timed = benchmark_cpu.measure(benchmark_cpu.COSMOS, 1)
    assert not [one for one in timed if "OpenVINO" in one.name] and len(timed) == 8
    assert all(one.error > 0.1 for one in timed if "ONNX" in one.name), "what computes something else is seen"
