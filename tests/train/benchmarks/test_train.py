"""`megadit benchmark train`: its figures agree with each other and with the run they are of."""

import json
import os
import subprocess
import sys
from contextlib import chdir
from unittest import mock

import pytest

from megadit.infer.benchmarks.profile import ELEMENTWISE, OPERATIONS, kind_of
from megadit.train.benchmarks import growth as benchmark_growth
from megadit.train.benchmarks import train as benchmark_train
from megadit.train.benchmarks.growth import AXES, BASE, RECIPE, Exponents, Point, draw, table_of
from megadit.train.config.load import resolve_config
from megadit.train.config.rules import check_layout
from megadit.train.plan.work import count_parameters, upstream_pack_flops


@pytest.fixture(scope="module")
def measured(run_ranks, tmp_path_factory):
    """(what the command printed, its JSON, its trace)."""
    folder = tmp_path_factory.mktemp("benchmark")
    command = ("-m", "megadit.train.benchmarks.train", "--recipe", "digits_tiny", "train.num_threads=1")
    options = ("--ops", "gated_residual=reference", "--steps", "3", "--warmup", "1")
    written = ("--json", folder / "figures.json", "--trace", folder / "trace.json")
    with chdir(folder), mock.patch.dict(os.environ, COLUMNS="150"):
        (printed,) = run_ranks(1, *command, *options, *written)
    assert {path.name for path in folder.iterdir()} == {"figures.json", "trace.json"}, "it leaves nothing else"
    return printed, *(json.loads((folder / name).read_text()) for name in ("figures.json", "trace.json"))


def test_megatron_is_imported_after_the_cpu_shim_only():
    """Its import warns of missing libraries, which a help text does not need, and comes after `cpu_shim.install`."""
    code = "import sys, megadit.train.benchmarks.scaling; print('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "False\n"


def test_figures_agree_with_each_other(measured):
    _, record, _ = measured
    measurements, config = record["measurements"], resolve_config("digits_tiny")
    assert measurements["parameters"] == count_parameters(config.model).total
    assert measurements["seconds_lowest"] <= measurements["seconds"] <= measurements["seconds_highest"]
    assert measurements["tokens_per_second"] == pytest.approx(measurements["tokens_per_step"] / measurements["seconds"])
    places = config.data.global_batch_size * config.data.seq_length
    assert (
        measurements["fill"] == pytest.approx(measurements["tokens_per_step"] / places)
        and 0.5 < measurements["fill"] <= 1
    )
    assert measurements["peak_memory_gb"] >= measurements["empty_memory_gb"] > 0
    for shares in (measurements["parts"], measurements["operations"]):
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    assert {"computing losses and gradients", "updating the weights"} <= set(measurements["parts"])
    assert {"attention", "matrix products", ELEMENTWISE} <= set(measurements["operations"])


def test_the_variants_that_ran_are_told(measured):
    printed, record, _ = measured
    assert set(record["ops"]["gated_residual"]) == {"reference"} and "gated_residual reference" in printed
    assert set(record["ops"]["modulated_norm"]) == {"by_length_group"} and "modulated_norm by_length_group" in printed


def test_the_published_formula_counts_modulation_for_every_token(measured):
    """6 x parameters x tokens is a lower bound of it; of what is computed it is twice as much for such short clips."""
    _, record, _ = measured
    measurements = record["measurements"]
    flops = measurements["upstream_tflops"] * 1e12 * measurements["seconds"]
    assert flops > 6 * measurements["parameters"] * measurements["tokens_per_step"]
    assert flops < 1.2 * 6 * measurements["parameters"] * measurements["tokens_per_step"]
    assert 1.2 < measurements["upstream_tflops"] / measurements["tflops"] < 3


def test_the_machine_and_versions_stand_beside_the_figures(measured):
    printed, record, trace = measured
    about = record["machine"]
    assert about["processor"] and about["torch"] and about["cores"] >= 1 and about["ranks"] == 1
    for words in ("tokens/s/device", "upstream formula", "MFU of the measured matmul rate", about["torch"]):
        assert words in printed
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no recipe"),
        (["--recipe", "digts"], "did you mean 'digits'"),
        (["--recipe", "digits", "--steps", "0"], "--steps=0 must be at least 1"),
        (["--recipe", "digits", "--ops", "atention=reference"], "did you mean 'attention'"),
        (["--recipe", "digits", "optimizer.leer=1"], "optimizer.lr"),
        (["--recipe", "digits", "data.path=/nowhere"], "data.path=/nowhere"),
    ],
)
def test_a_mistake_is_one_line(argv, message, capsys):
    assert benchmark_train.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_kinds_of_operations():
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert kind_of("void flash_fwd_kernel<cutlass_gemm>") == "attention"
    assert kind_of("sm90_xmma_gemm_bf16") == "matrix products"
    assert kind_of("ncclDevKernel_AllReduce") == "communication"
    assert kind_of("triton_red_fused_native_layer_norm") == ELEMENTWISE
    assert len({kind for kind, _ in OPERATIONS}) == len(OPERATIONS)


def test_the_upstream_formula_of_a_pack():
    from megadit.models.packing.pack_layout import PackLayout
    from megadit.models.packing.segments import Segment

    model = resolve_config("digits_tiny").model
    pack = PackLayout.pack([Segment((1, 4, 4), 2), Segment((3, 4, 4), 0)], capacity=96, text_capacity=8)
    attention = 12 * (16**2 + 48**2) * model.attention_size * model.num_layers
    assert upstream_pack_flops(pack, model) == 6 * count_parameters(model).total * 64 + attention


@pytest.mark.parametrize("name", AXES)
def test_every_point_of_growth_is_a_run(name):
    axis = AXES[name]
    for value in axis.values:
        config = resolve_config(RECIPE, overrides=["data.mock=true", *BASE, *axis.overrides(value)])
        assert check_layout(config, axis.num_ranks(value)) == axis.num_ranks(value)
        lengths = [height * width * frames for frames, height, width in config.data.mock_latent_shapes]
        if name == "segments":
            assert len(set(lengths)) == value and sum(lengths) <= 8192
        if name == "tokens":
            assert lengths == [value]


def test_exponents_are_the_slopes(tmp_path):
    places = [1000.0, 2000.0, 4000.0, 8000.0]
    cube = Exponents.of(places, [5 * place**3 for place in places])
    assert cube.overall == pytest.approx(3) and cube.last == pytest.approx(3)
    mixed = Exponents.of(places, [place + place**2 / 4000 for place in places])
    assert 1 < mixed.overall < mixed.last < 2
    points = [Point(place=x, seconds=x**2, operations=x**1.5, memory=x, planned_memory=2 * x) for x in places]
    draw({"tokens": points}, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert list(table_of({"tokens": points}).columns[2].cells) == ["+2.00 (+2.00)"]


def test_options_of_the_steps_reach_them(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("train: {seed: 77}")
    options = benchmark_train._parse(["--recipe", "digits", "--config-file", str(tmp_path / "run.yaml")])
    assert benchmark_train.run_of(options.recipe, options.config_file, ()).train.seed == 77
    started = []
    monkeypatch.setattr(benchmark_train, "launch", lambda *asked, num_processes: started.append(num_processes) or 0)
    assert benchmark_train.main(["--recipe", "digits", "--nproc", "2"]) == 0 and started == [2]


def test_options_of_growth_choose_its_points(tmp_path, monkeypatch):
    measured = []

    def measure_point(axis, value, file, steps):
        measured.append((axis, value, steps))
        return Point(place=value, seconds=value, operations=value, memory=value, planned_memory=value)

    monkeypatch.setattr(benchmark_growth, "measure_point", measure_point)
    monkeypatch.setattr(benchmark_growth, "draw", lambda curves, path: None)

    def points(*more):
        measured.clear()
        assert benchmark_growth.main([str(tmp_path), *more]) == 0
        return list(measured)

    everything = points()
    assert len(everything) == sum(len(axis.values) for axis in AXES.values()) and {
        steps for *_, steps in everything
    } == {3}
    assert {axis for axis, *_ in points("--along", "tokens")} == {AXES["tokens"]}
    assert len(points("--points", "2")) == 2 * len(AXES)
    assert {steps for *_, steps in points("--steps", "7", "--points", "2")} == {7}
