"""What is wrong in a graph is refused, and the layer is named."""

import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from megadit.export import verify
from megadit.export.layers import layer_of_failure, weight_hashes
from megadit.export.networks import build_network
from megadit.export.references import reference_cases
from megadit.models.networks.attention import QKNorm


@pytest.fixture(scope="module")
def network(exported):
    return build_network("denoiser", exported, exported.load_tokenizer(), torch.float32)


@pytest.fixture(scope="module")
def cases(network, specs, exported):
    return reference_cases(network, specs["denoiser"], exported)


@pytest.fixture
def check(exported, specs, network, cases, tmp_path):
    """Runs the gate on a changed copy of the denoiser."""

    def run(change=lambda graph: None, network=network, cases=cases, weights=None):
        path = shutil.copy(exported.path / "onnx/denoiser.onnx", tmp_path / "denoiser.onnx")
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)
        weights = weight_hashes(network) if weights is None else weights
        spec, config = specs["denoiser"], exported.config
        return verify.verify_network(tmp_path / "denoiser.onnx", spec, cases, config, "fp32", weights, lambda: network)

    return run


def node_of(graph, layer, kind):
    return next(node for node in graph.node if node.name.startswith(f"{layer}/{kind}"))


def scale_weight(graph, layer, entries):
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensor = next(tensors[name] for name in node_of(graph, layer, "MatMul").input if name in tensors)
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[entries] *= 1.01
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def test_unchanged_graph_passes(check):
    assert check()["worst"] < 1e-4


def test_one_weight_changed_by_one_percent(check):
    layer = "denoiser.dit.blocks.1.mlp.fc1"
    with pytest.raises(ValueError, match=f"a weight of the layer {layer} was changed"):
        check(lambda graph: scale_weight(graph, layer, slice(5, 6)))


def test_a_whole_weight_changed_by_one_percent_shows_in_what_it_computes(check):
    layer = "denoiser.dit.blocks.1.mlp.fc1"
    with pytest.raises(ValueError, match=rf"first layer that differs is {layer} \(by 1.0e-02\)"):
        check(lambda graph: scale_weight(graph, layer, slice(None)), weights={})


def test_one_side_made_static(check):
    def fix(graph):
        graph.input[0].type.tensor_type.shape.dim[3].dim_value = 4

    with pytest.raises(ValueError, match=r"fixed axis 3 \(height\) of its input x at 4"):
        check(fix)


def test_one_side_made_static_inside(check):
    def fix(graph):
        node = node_of(graph, "denoiser.dit.blocks.0.self_attention", "Reshape")
        graph.initializer.append(numpy_helper.from_array(np.array([12, 2, 2, 3, 16]), "static"))
        node.input[1] = "static"

    with pytest.raises(ValueError, match="does not run with .* the layer denoiser.dit.blocks.0.self_attention does"):
        check(fix)


def round_output(layer):
    """A change: what the layer gives is rounded to bfloat16 and back."""

    def change(graph):
        node = node_of(graph, layer, "MatMul")
        place, name = list(graph.node).index(node), node.output[0]
        node.output[0] = "exact"
        half = helper.make_node("Cast", ["exact"], ["half"], name=f"{layer}/half", to=onnx.TensorProto.BFLOAT16)
        back = helper.make_node("Cast", ["half"], [name], name=f"{layer}/back", to=onnx.TensorProto.FLOAT)
        graph.node.insert(place + 1, half)
        graph.node.insert(place + 2, back)

    return change


def test_one_operation_in_half_precision(check):
    """Queries of cross-attention: F hardly shows them."""
    layer = "denoiser.dit.blocks.0.cross_attention.q"
    with pytest.raises(ValueError, match=f"computes in BFLOAT16 in the layer {layer}; fp32 was requested"):
        check(round_output(layer))


def test_one_operation_in_half_precision_shows_in_what_it_computes(check, monkeypatch):
    monkeypatch.setattr(verify, "check_types", lambda *args: None)
    layer = "denoiser.dit.blocks.0.mlp.fc2"
    with pytest.raises(ValueError, match=f"first layer that differs is {layer} "):
        check(round_output(layer))


def test_rotary_positions_off_by_one(check, exported, monkeypatch):
    """Of the queries alone: rotation sees only differences, so that a shift of both would change nothing."""
    network = build_network("denoiser", exported, exported.load_tokenizer(), torch.float32)
    queries = network.denoiser.dit.blocks["1"].self_attention.q_layernorm
    whole = QKNorm.forward

    def shifted(x, rotary):
        return whole(queries, x, tuple(table.roll(1, dims=0) for table in rotary))

    monkeypatch.setattr(queries, "forward", shifted)
    with pytest.raises(ValueError, match="layer that differs is denoiser.dit.blocks.1.self_attention.q_layernorm"):
        check(network=network, cases=reference_cases(network, *_of(exported)))


def _of(exported):
    from megadit.infer.runtimes.load import open_exported

    return open_exported(exported, "onnx").network("denoiser"), exported


def test_unconditional_half_swapped(check):
    def swap(graph):
        for node in graph.node:
            node.input[:] = ["swapped" if name == "text_length" else name for name in node.input]
        limits = {"starts": -1, "ends": np.iinfo(np.int64).min, "axes": 0, "steps": -1}
        graph.initializer.extend(numpy_helper.from_array(np.array([v]), name) for name, v in limits.items())
        graph.node.insert(0, helper.make_node("Slice", ["text_length", *limits], ["swapped"], name="swap"))

    with pytest.raises(ValueError, match="first layer that differs is denoiser.dit.blocks.0.cross_attention.kv"):
        check(swap)


def test_failures_name_their_layer():
    message = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Add node. Name:'a.b/Add_3'"
    assert layer_of_failure(message) == "a.b" and layer_of_failure("no name") == ""
