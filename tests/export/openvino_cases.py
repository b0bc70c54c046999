"""An export under OpenVINO: torch's videos at all sizes by two compilations, one line for what it cannot run."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from megadit.export import command, engines
from megadit.export.engines import add_report
from megadit.export.signatures import sample_inputs, trace_sizes
from megadit.infer.generate import command as generate
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import EXPORTED, open_exported
from megadit.infer.runtimes.network_spec import Axis, NetworkSpec, TensorSpec
from megadit.infer.runtimes.openvino import OpenVinoNetwork, load_openvino
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from tests.exports import export_denoiser

try:
    openvino = load_openvino()
except UserError as missing:
    pytest.skip(str(missing), allow_module_level=True)
CPU = torch.device("cpu")
ONE_TOKEN, USUAL = (1, 4, 4), (9, 16, 32)


@pytest.fixture(scope="module")
def exported() -> Bundle:
    """What test_openvino.py has exported: to do it again takes most of the time of this process."""
    return Bundle.open(os.environ["EXPORTED"], verify=True)


@pytest.fixture(scope="module")
def compared(exported, tmp_path_factory) -> Bundle:
    """The tiny bundle after `megadit export --format openvino`."""
    folder = tmp_path_factory.mktemp("openvino") / "tiny"
    shutil.copytree(exported.path, folder)
    add_report(folder, "openvino")
    return Bundle.open(folder, verify=True)


def video(bundle, size, runtime="openvino", pipeline=None):
    pipeline = pipeline or TextToVideo.from_pretrained(bundle, device="cpu", runtime=runtime)
    frames, height, width = size
    (made,) = pipeline(["a red seven"], seeds=3, num_frames=frames, height=height, width=width, num_steps=1)
    return made.video.astype(int)


REPORTED = """
import socket
socket.socket.connect = lambda self, place: print("connects to", place)
{first}
import openvino, sys, time
time.sleep(1)
print("reports" if sys.modules.get("openvino_telemetry") else "is silent")
"""


@pytest.mark.parametrize("is_ours", [True, False], ids=["here", "by itself, the control"])
def test_nobody_is_told_that_it_is_used(tmp_path, is_ours):
    first = "from megadit.infer.runtimes.openvino import load_openvino; load_openvino()" if is_ours else ""
    found = subprocess.run(
        [sys.executable, "-c", REPORTED.format(first=first)],
        env={**{name: value for name, value in os.environ.items() if name != "CI"}, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "is silent" if is_ours else found.stdout.endswith("reports\n")
    assert is_ours == (not (tmp_path / "intel").exists())


def test_it_passes_the_gate_of_the_graphs(compared):
    report, graphs = (compared.manifest["export"][name]["report"] for name in ("openvino", "onnx"))
    assert report.keys() == graphs.keys()
    for name, one in report.items():
        assert one["psnr"] >= 50 if name == "video" else one["worst"] <= one["tolerance"] == 1e-4
        assert name == "video" or one["cases"].keys() == graphs[name]["cases"].keys()


def test_fifty_sizes_are_torchs_videos_by_two_compilations_of_each_graph(compared, monkeypatch):
    """For the sizes of the first call, and for all."""
    compiled, compile_model = Counter(), openvino.Core.compile_model

    def counted(core, model, *more):
        compiled[model.output().any_name, model.is_dynamic()] += 1
        return compile_model(core, model, *more)

    monkeypatch.setattr(openvino.Core, "compile_model", counted)
    ours, theirs = (TextToVideo.from_pretrained(compared, device="cpu", runtime=name) for name in ("openvino", "torch"))
    sizes = [(frames, height, width) for frames in (13, 5, 1, 9) for height in (8, 32, 24) for width in range(8, 48, 8)]
    made = {ONE_TOKEN: video(compared, ONE_TOKEN, pipeline=ours)}
    assert (video(compared, ONE_TOKEN, pipeline=ours) == made[ONE_TOKEN]).all()
    assert compiled == Counter([("x0", False), ("video", False)]), "one size"
    made |= {size: video(compared, size, pipeline=ours) for size in sizes[:49]}
    assert len(made) == 50 and compiled == Counter(
        (name, is_for_all) for name in ("x0", "video") for is_for_all in (0, 1)
    )
    for size in list(made)[::7]:
        assert np.abs(made[size] - video(compared, size, pipeline=theirs)).max() <= 1, size


def test_its_first_call_decides_nothing(compared, monkeypatch):
    """Control: without a call before, a single token makes OpenVINO 2026.4 repeat a value in all that follows."""
    expected = video(compared, USUAL, "torch")

    def after_one_token():
        pipeline = TextToVideo.from_pretrained(compared, device="cpu", runtime="openvino")
        for size in ((5, 8, 8), ONE_TOKEN):  # the graphs are compiled for all sizes at the second
            video(compared, size, pipeline=pipeline)
        return np.abs(video(compared, USUAL, pipeline=pipeline) - expected).max()

    assert after_one_token() <= 1
    monkeypatch.setattr(OpenVinoNetwork, "_warm_up", lambda self: None)
    assert after_one_token() > 1, "OpenVINO needs no first call any more"


def test_generate_gives_torchs_video(compared, tmp_path):
    out = tmp_path / "seven.mp4"
    arguments = ["--checkpoint_path", str(compared.path), "--prompt", "a cat", "--video_save_path", str(out)]
    assert generate.main([*arguments, "--runtime", "openvino", "--device", "cpu"]) == 0
    assert out.stat().st_size > 0 and '"runtime": "openvino"' in (tmp_path / "seven.mp4.json").read_text()
    assert np.abs(video(compared, USUAL) - video(compared, USUAL, "torch")).max() <= 1


def test_it_has_the_threads_that_torch_has_and_computes_in_float32(compared):
    network = EXPORTED["openvino"].open(open_exported(compared, "openvino"), CPU)["denoiser"]
    inputs = sample_inputs(network.spec, trace_sizes(network.spec))
    network(inputs, tuple(inputs["x"].shape))
    model = network._request.get_compiled_model()
    assert model.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert model.get_property("INFERENCE_NUM_THREADS") == torch.get_num_threads()


def test_queries_keys_and_values_are_a_product_each(compared):
    network = EXPORTED["openvino"].open(open_exported(compared, "openvino"), CPU)["denoiser"]
    exported = openvino.Core().read_model(compared.path / "onnx" / "denoiser.onnx")
    ours, theirs = (
        sum(one.get_type_name() == "MatMul" for one in model.get_ops()) for model in (network._model, exported)
    )
    assert ours == theirs + 2 * compared.config.num_layers


@pytest.mark.parametrize("batch", [1, 2])
def test_fused_kernels_compute_what_was_exported(compared, batch, monkeypatch):
    """Of one video OpenVINO fuses positions, transpositions with attention, and GELU; of two, positions."""
    networks = EXPORTED["openvino"].open(open_exported(compared, "openvino"), CPU)
    inputs = sample_inputs(networks["denoiser"].spec, {**trace_sizes(networks["denoiser"].spec), "batch": batch})
    found, kinds = [], []
    for is_rewritten in (True, False):
        if not is_rewritten:
            monkeypatch.setattr("megadit.infer.runtimes.openvino.to_batch_first", lambda model: None)
        network = EXPORTED["openvino"].open(open_exported(compared, "openvino"), CPU)["denoiser"]
        found.append(network(inputs, tuple(inputs["x"].shape)))
        model = network._request.get_compiled_model().get_runtime_model()
        kinds.append(Counter(node.get_rt_info()["layerType"].astype(str) for node in model.get_ordered_ops()))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert kinds[0]["RoPE"] == 2 * compared.config.num_layers and kinds[1]["RoPE"] == 0
    assert (kinds[0]["Transpose"] < kinds[1]["Transpose"]) == (batch == 1)


@pytest.mark.parametrize(("sides", "axis"), [((-1, 2, 2, 4), 3), ((2, -1, 8), 0), ((-1, 2, 4), -2), ((-1, 2, 4), 2)])
def test_any_product_that_is_split_gives_what_it_gave(tmp_path, sides, axis):
    """Of channels or not: of the first two, parts are of tokens too, so that they are split as they were."""
    weight = np.arange(32, dtype=np.float32).reshape(4, 8)
    constants = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in (("w", weight), ("s", sides))]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Reshape", ["xw", "s"], ["grouped"]),
        helper.make_node("Split", ["grouped", "parts"], ["a", "b"], axis=axis),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    half = {3: 2, 0: 1, -2: 1, 2: 2}[axis]
    constants.append(onnx.numpy_helper.from_array(np.array([half, half]), "parts"))
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["n", 4]), ("y", None))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], constants), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.save(model, tmp_path / "denoiser.onnx")
    rows = Axis(name="n", min=2, opt=4, max=8, step=2)
    spec = NetworkSpec(name="denoiser", inputs=(TensorSpec(name="x", dtype="float32", axes=(rows, 4)),), output="y")
    network = OpenVinoNetwork(tmp_path / "denoiser.onnx", spec)
    for n in (4, 6, 2):
        given = torch.randn(n, 4)
        a, b = np.split((given.numpy() @ weight).reshape(sides), 2, axis)
        assert np.allclose(network({"x": given}, a.shape).numpy(), a - b, atol=1e-4)


@pytest.mark.parametrize(
    ("divisor", "one", "half"), [(2**0.5, 1, 0.5), (1, 1, 0.5), (2**0.5, 1, 0.25), (2**0.5, 2, 0.5)]
)
def test_only_gelu_is_taken_for_gelu(tmp_path, divisor, one, half):
    weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    constants = [("w", weight), ("divisor", divisor), ("one", one), ("half", half)]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Div", ["xw", "divisor"], ["small"]),
        helper.make_node("Erf", ["small"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["more"]),
        helper.make_node("Mul", ["half", "more"], ["gate"]),
        helper.make_node("Mul", ["xw", "gate"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1, size]) for name, size in (("x", 4), ("y", 8))
    )
    constants = [onnx.numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "denoiser.onnx"
    )
    rows = Axis(name="n", min=1, opt=4, max=8, step=1)
    spec = NetworkSpec(name="denoiser", inputs=(TensorSpec(name="x", dtype="float32", axes=(rows, 1, 4)),), output="y")
    given = torch.randn(6, 1, 4)
    product = given @ torch.from_numpy(weight)
    made = OpenVinoNetwork(tmp_path / "denoiser.onnx", spec)({"x": given}, tuple(product.shape))
    torch.testing.assert_close(made, product * half * (one + torch.erf(product / divisor)))


def test_one_that_differs_is_not_recorded(exported, monkeypatch, tmp_path):
    """Negative control: networks whose outputs are a thousandth off."""

    class Wrong:
        def __init__(self, networks):
            self.networks = networks

        def __getitem__(self, name):
            return lambda inputs, shape: 1.001 * self.networks[name](inputs, shape)

    row = EXPORTED["openvino"]
    wrong = SimpleNamespace(open=lambda exported, device: Wrong(row.open(exported, device)))
    monkeypatch.setattr(engines, "EXPORTED", {"openvino": wrong})
    shutil.copytree(exported.path, tmp_path / "copy")
    with pytest.raises(UserError, match="denoiser under openvino is not the network: with .* it differs by"):
        add_report(tmp_path / "copy", "openvino")
    with pytest.raises(UserError, match="onnx was never compared with torch under openvino: run `megadit export .*"):
        open_exported(Bundle.open(tmp_path / "copy", verify=True), "openvino")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_precisions_pass_too(shallow, tmp_path, precision):
    export_denoiser(shallow.path, tmp_path / "out", profiles=("text=1,4,9",), precision=precision)
    add_report(tmp_path / "out", "openvino")
    assert open_exported(Bundle.open(tmp_path / "out"), "openvino").settings["precision"] == precision


def error_of(capsys, main, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    *_, error = capsys.readouterr().err.splitlines()  # after a warning about the size, and progress
    assert error.startswith("error: ")
    return error


def test_what_it_cannot_run_is_one_line(compared, exported, tiny_bundle, monkeypatch, tmp_path, capsys):
    def told(path, *more):
        words = ("--prompt", "a cat", "--runtime", "openvino", "--video_save_path", tmp_path / "a.mp4", *more)
        return error_of(capsys, generate.main, "--checkpoint_path", path, *words)

    assert "has no onnx/: make a bundle that has it with" in (error := told(tiny_bundle.path))
    assert "OUT --format openvino" in error
    assert "never compared with torch under openvino" in told(exported.path)
    assert "was exported for" in (error := told(compared.path, "--num_frames", 29)) and "--profile" in error
    with pytest.raises(UserError, match="is for CPUs, not device cuda: use --device cpu, or --runtime onnx"):
        EXPORTED["openvino"].open(open_exported(compared, "openvino"), torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "pip install 'megadit[openvino]'" in told(compared.path)
    export = (tiny_bundle.path, tmp_path / "out", "--format", "openvino")
    assert "pip install 'megadit[openvino]'" in error_of(capsys, command.main, *export)
    assert not (tmp_path / "out").exists()


def test_an_operator_that_it_does_not_know_is_named(tmp_path):
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    node = helper.make_node("Fold", ["x"], ["y"], domain="ours")
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "denoiser.onnx")
    axis = Axis(name="n", min=1, opt=2, max=4)
    spec = NetworkSpec(name="denoiser", inputs=(TensorSpec(name="x", dtype="float32", axes=(axis,)),), output="y")
    with pytest.raises(UserError, match="does not read denoiser.onnx: .*Fold.*; use --runtime onnx"):
        OpenVinoNetwork(tmp_path / "denoiser.onnx", spec)
