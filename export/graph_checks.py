"""Static checks of a graph: axes that should be dynamic, and number types."""

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx

from megadit.export.quantize import FORMATS
from megadit.infer.runtimes.network_spec import Axis, NetworkSpec
from megadit.infer.runtimes.onnx import PROVIDERS
from megadit.models.shared.errors import UserError

PRODUCTS = ("MatMul", "Gemm", "Conv")


def check_open_sides(path: Path, spec: NetworkSpec) -> None:
    """Raises UserError if the graph fixed the size of an axis that should be dynamic."""
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    for tensor in spec.inputs:
        for place, (axis, side) in enumerate(zip(tensor.axes, shapes[tensor.name], strict=True)):
            if isinstance(axis, Axis) and not axis.is_fixed and side.HasField("dim_value"):
                raise UserError(
                    f"the exported {spec.name} has fixed axis {place} ({axis.name}) of its input {tensor.name} at "
                    f"{side.dim_value}; it must be dynamic, {axis.min} to {axis.max}"
                )


def check_types(path: Path, spec: NetworkSpec, precision: str) -> None:
    """Raise UserError if a graph casts to less than the requested precision, which outputs may not show."""
    asked = {"bf16": ["BFLOAT16"], "fp32": []}.get(precision, ["FLOAT16"]) if spec.is_denoiser else []
    for node in onnx.load(path, load_external_data=False).graph.node:
        to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), onnx.TensorProto.FLOAT)
        kind = onnx.TensorProto.DataType.Name(to)
        if node.op_type == "Cast" and "FLOAT" in kind and kind not in ("FLOAT", *asked):
            raise _another_type(spec, kind, node, precision)


def check_products(path: Path, spec: NetworkSpec, precision: str, layers: Collection[str] = ()) -> None:
    """Raises UserError if a product of these layers of the denoiser does not have two 8-bit factors of the requested
    precision, or a product of another layer has any."""
    graph = onnx.load(path, load_external_data=False).graph
    eight_bit = {f"denoiser.dit.{layer}" for layer in layers}
    types = _types_of_eight_bits(graph)
    for node in graph.node:
        if node.op_type not in PRODUCTS:
            continue
        is_asked = node.name.rpartition("/")[0] in eight_bit
        asked = FORMATS[precision].dtype.name if is_asked else None
        for kind in (types.get(name) for name in node.input[: 2 if is_asked else None]):
            if kind != asked:
                raise _another_type(spec, kind or "more than 8 bits", node, precision)


def _types_of_eight_bits(graph: onnx.GraphProto) -> Mapping[str, str]:
    """Dequantised value -> its 8-bit type, by the zero point."""
    kinds = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    return {node.output[0]: kinds[node.input[2]] if len(node.input) > 2 else "UINT8" for node in pairs}


def _another_type(spec: NetworkSpec, kind: str, node: onnx.NodeProto, precision: str) -> UserError:
    layer = node.name.rpartition("/")[0]
    return UserError(f"the exported {spec.name} computes in {kind} in the layer {layer}; {precision} was requested")


def opened_by(path: Path) -> dict[str, str]:
    """Provider of the installed ONNX Runtime -> its error when a plain session opens a graph, or "". Raises UserError
    if the GPU provider is installed and fails."""
    import onnxruntime

    found = {}
    for device, providers in PROVIDERS.items():
        if providers[0] in onnxruntime.get_available_providers():
            try:
                onnxruntime.InferenceSession(str(path), providers=providers)
                found[providers[0]] = ""
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                found[providers[0]] = str(error).strip().splitlines()[0]
                if device != "cpu":
                    raise UserError(
                        f"{path.name} does not open on a GPU: {found[providers[0]]}; use --precision fp16"
                    ) from error
    return found


def where_it_runs(name: str, opened: Mapping[str, str]) -> str | None:
    """A note if a graph does not open on CPUs, else None."""
    if not opened.get("CPUExecutionProvider"):
        return None
    return (
        f"NOTE: {name} in bfloat16 is for GPUs: by itself, onnxruntime opens it on no CPU (generate --runtime onnx "
        "does, as a copy in float32, which was compared); for other programs on CPUs, use --precision fp32 or fp16"
    )
