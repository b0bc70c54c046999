"""8-bit denoisers through the whole export: what is compared, and what is refused."""

import shutil

import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from megadit.export import signatures as contract
from megadit.export import to_onnx, verify
from megadit.export.layers import weight_hashes
from megadit.export.networks import build_network, comparable
from megadit.export.quantize import FORMATS, calibrate, quantise
from megadit.export.references import reference_cases

LAYER, OTHER = "denoiser.dit.blocks.0.mlp.fc1", "denoiser.dit.blocks.1.self_attention.qkv"
NOT_QUANTISED = "denoiser.dit.final_layer.linear"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build(tiny_bundle):
    """What builds the network once more."""
    return lambda: build_network("denoiser", tiny_bundle, tiny_bundle.load_tokenizer(), torch.float16)


@pytest.fixture(scope="module")
def in_halves(build, specs, tmp_path_factory):
    """The graph in which products are to be of 8 bits."""
    spec, path = specs["denoiser"], tmp_path_factory.mktemp("in_halves") / "denoiser.onnx"
    inputs = contract.sample_inputs(spec, contract.trace_sizes(spec))
    about = {"megadit_version": "0", "source": ""}
    to_onnx.export_onnx(build(), spec, inputs, path, opset=to_onnx.EIGHT_BIT_OPSET, metadata=about)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def eight_bit(request, tiny_bundle, specs, build, in_halves, tmp_path_factory):
    """(precision, graph, ranges, cases without and with roundings, hashes, what builds the network once more)."""
    precision, spec, network = request.param, specs["denoiser"], build()
    path = shutil.copy(in_halves, tmp_path_factory.mktemp(precision) / "denoiser.onnx")
    ranges = calibrate(tiny_bundle, ["a red seven moving left"])
    quantise(path, ranges, precision)
    plain = reference_cases(network, spec, tiny_bundle)
    hashes = weight_hashes(network)
    cases = reference_cases(comparable(network, precision, ranges), spec, tiny_bundle)
    return precision, path, ranges, plain, cases, hashes, lambda: comparable(build(), precision, ranges)


@pytest.fixture
def check(eight_bit, specs, tiny_bundle, tmp_path):
    """Runs the gate on a changed copy of the graph."""
    precision, path, ranges, _, cases, hashes, rebuild = eight_bit

    def run(change=lambda graph: None):
        copy = shutil.copy(path, tmp_path / "denoiser.onnx")
        model = onnx.load(copy)
        change(model.graph)
        onnx.save(model, copy)
        spec, config = specs["denoiser"], tiny_bundle.config
        return verify.verify_network(tmp_path / copy.name, spec, cases, config, precision, hashes, rebuild, ranges)

    return run


def product(graph, layer):
    found = (node for node in graph.node if node.op_type == "MatMul" and node.name.startswith(f"{layer}/MatMul"))
    return next(found)


def test_graph_is_torch_with_the_same_roundings(check, eight_bit, tiny_bundle):
    """Random inputs that leave the calibrated ranges are cut off alike."""
    precision, _, ranges, plain, cases, _, _ = eight_bit
    report = check()
    cost = verify.check_rounding(plain, cases, precision, verify.sampled_levels("denoiser", tiny_bundle))["rounding"]
    print(f"{precision}: {report['worst']:.1e}; costs {cost['worst']:.1e}")
    assert report["ranges"] == ranges and report["worst"] <= verify.TOLERANCES[precision]
    assert cost["worst"] > 1e-3 and len(cost["cases"]) == 6, "sigma 80 is not sampled by this bundle"


def test_one_product_left_in_half_precision(check, eight_bit):
    def skip(graph):
        makers = {node.output[0]: node for node in graph.node}
        node = product(graph, LAYER)
        node.input[0] = makers[makers[node.input[0]].input[0]].input[0]  # before the pair

    with pytest.raises(ValueError, match=f"computes in more than 8 bits in the layer {LAYER}; {eight_bit[0]} was"):
        check(skip)


def test_one_product_in_eight_bits_that_should_have_more(check, eight_bit):
    def round_down(graph):
        node = product(graph, NOT_QUANTISED)
        pair = product(graph, LAYER).input[0]
        rounded = next(one for one in graph.node if one.output[0] == pair)
        scales = rounded.input[1:]
        graph.node.extend(
            [
                helper.make_node("QuantizeLinear", [node.input[0], *scales], ["steps"], name=f"{NOT_QUANTISED}/q"),
                helper.make_node("DequantizeLinear", ["steps", *scales], ["rounded"], name=f"{NOT_QUANTISED}/dq"),
            ]
        )
        node.input[0] = "rounded"

    kind = FORMATS[eight_bit[0]].dtype.name
    with pytest.raises(ValueError, match=f"computes in {kind} in the layer {NOT_QUANTISED}; {eight_bit[0]} was"):
        check(round_down)


def test_one_scale_that_is_wrong(check):
    """Of a weight's, twice what it was: F shows it, and the layer is found."""

    def stretch(graph):
        weight = next(one for one in graph.node if one.output[0] == product(graph, OTHER).input[1])
        scale = next(tensor for tensor in graph.initializer if tensor.name == weight.input[1])
        values = numpy_helper.to_array(scale)
        scale.CopyFrom(numpy_helper.from_array((values * 2).astype(values.dtype), scale.name))

    with pytest.raises(ValueError, match=f"the first layer that differs is {OTHER} "):
        check(stretch)


def test_ranges_that_cut_off_what_is_sampled(eight_bit, specs, tiny_bundle):
    precision, _, ranges, plain, _, _, _ = eight_bit
    narrow = {layer: largest / 30 for layer, largest in ranges.items()}
    network = build_network("denoiser", tiny_bundle, tiny_bundle.load_tokenizer(), torch.float16)
    cases = reference_cases(comparable(network, precision, narrow), specs["denoiser"], tiny_bundle)
    with pytest.raises(
        ValueError, match=rf"{precision} changes what the denoiser predicts by \d+% .*--calibration_pro"
    ):
        verify.check_rounding(plain, cases, precision, verify.sampled_levels("denoiser", tiny_bundle))
