"""8-bit and bfloat16 graphs: what is put into them, and that ONNX Runtime computes what they say."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from megadit.export.quantize import calibrate, quantise, quantised_linears
from megadit.infer.runtimes.onnx import open_session
from megadit.infer.runtimes.widen import widened

LAYER = "blocks.0.mlp.fc1"


def write_product(path, kind=TensorProto.FLOAT):
    """y = x W under the name of a layer, in this type inside; (W, inputs)."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((48, 32), np.float32) * np.linspace(0.1, 1, 32, dtype=np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["inner"], name="in/Cast_0", to=kind),
        helper.make_node("MatMul", ["inner", "w"], ["product"], name=f"denoiser.dit.{LAYER}/MatMul_1"),
        helper.make_node("Cast", ["product"], ["y"], name="out/Cast_2", to=TensorProto.FLOAT),
    ]
    stored = helper.make_tensor("w", kind, weight.shape, weight.flatten())
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["tokens", w]) for n, w in (("x", 48), ("y", 32))]
    inner = helper.make_tensor_value_info("inner", kind, ["tokens", 48])
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], [stored], value_info=[inner])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return numpy_helper.to_array(stored).astype(np.float32), generator.standard_normal((64, 48), np.float32)


def run(path, x):
    return open_session(path, torch.device("cpu")).run(None, {"x": x})[0]


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("precision", "low", "high", "kind"),
    [
        ("int8", 2e-3, 2e-2, TensorProto.FLOAT),
        ("int8", 2e-3, 2e-2, TensorProto.FLOAT16),
        ("fp8", 1e-2, 6e-2, TensorProto.FLOAT16),  # in float32, ONNX Runtime takes fp8 for integers
    ],
)
def test_products_read_eight_bits(tmp_path, precision, low, high, kind):
    """Steps of 1/127 of the largest value, or 3 bits behind the leading one."""
    weight, x = write_product(tmp_path / "g.onnx", kind)
    quantise(tmp_path / "g.onnx", {LAYER: float(np.abs(x).max())}, precision)
    assert low < relative(run(tmp_path / "g.onnx", x), x @ weight) < high
    model = onnx.load(tmp_path / "g.onnx")
    onnx.checker.check_model(model)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("QuantizeLinear") == 1 and kinds.count("DequantizeLinear") == 2
    stored = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    assert stored == {TensorProto.INT8 if precision == "int8" else TensorProto.FLOAT8E4M3FN}, "no copy in full is kept"


def test_sums_of_eight_bits_are_not_cut_off_without_vnni(tmp_path):
    """ONNX Runtime asks the processor itself, which no test can change: this one looks at what it is asked for."""
    write_product(tmp_path / "g.onnx")
    options = open_session(tmp_path / "g.onnx", torch.device("cpu")).get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


def test_ranges_that_are_too_small_cut_values_off(tmp_path):
    """Negative control: the ranges matter."""
    weight, x = write_product(tmp_path / "g.onnx")
    quantise(tmp_path / "g.onnx", {LAYER: float(np.abs(x).max()) / 10}, "int8")
    assert relative(run(tmp_path / "g.onnx", x), x @ weight) > 0.2


def test_layers_that_are_no_products_are_named(tmp_path):
    write_product(tmp_path / "g.onnx")
    with pytest.raises(ValueError, match=r"the layer blocks.7.mlp.fc1 is no product with a weight"):
        quantise(tmp_path / "g.onnx", {"blocks.7.mlp.fc1": 1.0}, "int8")


def test_ranges_are_those_of_sampled_videos(tiny_bundle):
    one, two = calibrate(tiny_bundle, ["a cat"]), calibrate(tiny_bundle, ["a cat", "a dog on a beach"])
    assert one.keys() == quantised_linears(tiny_bundle.load_dit()).keys() and len(one) == 2 * 7
    assert all(0 < one[layer] <= two[layer] for layer in one) and one != two
    with pytest.raises(ValueError, match="at least one prompt"):
        calibrate(tiny_bundle, [])


def test_bfloat16_is_widened_without_a_change_of_weights(tmp_path):
    weight, x = write_product(tmp_path / "g.onnx", TensorProto.BFLOAT16)
    rounded = torch.from_numpy(weight)
    assert torch.equal(rounded, rounded.bfloat16().float())
    with widened(tmp_path / "g.onnx", tmp_path) as copy:
        np.testing.assert_allclose(run(copy, x), x @ weight, rtol=1e-5, atol=1e-5)
        assert {t.data_type for t in onnx.load(copy).graph.initializer} == {TensorProto.FLOAT}
    assert [file.name for file in tmp_path.iterdir()] == ["g.onnx"]
