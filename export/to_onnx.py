"""Exports one network to one ONNX file: traced by torch's exporter, cleaned by its optimizer, deterministic.

Every node is named after its layer (`denoiser.dit.blocks.3.mlp.fc1/linear_12`), as shown by errors, profilers and
`layers.py`. Files contain no information about the machine that wrote them.
"""

import ast
import contextlib
import gc
import inspect
import io
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megadit.infer.runtimes.network_spec import Axis, NetworkSpec
from megadit.models.shared.errors import choose_one

OPSETS = (18, 20, 23)
"""18 is read by any TensorRT; 20 has 8-bit numbers with half precision; 23 has attention and RMS norms as operators,
which TensorRT reads from 10.15 on."""
DEFAULT_OPSET, EIGHT_BIT_OPSET, ATTENTION_OPSET = 18, 20, 23
EXTERNAL_DATA_FROM = 2**27
"""Bytes of weights from which they are written to a separate file: inside the ONNX file, they are held several times
while writing, and it is limited to 2 GB."""


def check_opset(opset: int) -> None:
    """Raises UserError for an opset that the exporter does not support."""
    choose_one(opset, OPSETS, f"opset {opset} is not supported (18 is for any TensorRT)")


def export_onnx(
    network: nn.Module,
    spec: NetworkSpec,
    inputs: Mapping[str, Tensor],
    path: Path,
    *,
    opset: int = DEFAULT_OPSET,
    metadata: Mapping[str, str],
) -> None:
    """Writes `path` (and `path`.data next to it, for large weights); `inputs` are those to trace with."""
    import onnx_ir

    example = tuple(inputs[tensor.name] for tensor in spec.inputs)
    with torch.no_grad(), _quiet():
        shapes = tuple(inspect.signature(network.forward).bind(*_dynamic_shapes(spec)).arguments.values())
        traced = torch.export.export(network, example, dynamic_shapes=shapes, strict=False)
        _select_outputs(traced.graph_module)
        if opset < ATTENTION_OPSET:  # from there on attention has its scale in float32
            _scale_exactly(traced.graph_module)
        program = torch.onnx.export(
            traced,
            dynamo=True,
            opset_version=opset,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[spec.output],
            optimize=True,
            verbose=False,
        )
    _expand_masks(program.model.graph)
    _trust_masks(program.model.graph)
    _clean(program.model, spec, metadata)
    size = sum(parameter.nbytes for parameter in network.parameters())
    external = _data_of(path).name if size >= EXTERNAL_DATA_FROM else None
    onnx_ir.save(program.model, path, external_data=external)


def collect_after(path: Path) -> None:
    """Collects reference cycles that hold weights, if those of the graph at `path` are large: a collection takes a
    fraction of a second."""
    if _data_of(path).exists():
        gc.collect()


def _data_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _dynamic_shapes(spec: NetworkSpec) -> tuple[dict[int, object], ...]:
    """Dynamic axes for torch.export: equal names are one dimension, steps are kept; those of one size are none."""
    roots = {name: torch.export.Dim(f"{name}_count") for name, axis in spec.axes.items() if axis.step > 1}

    def side(axis: Axis):
        if axis.step == 1:
            return torch.export.Dim.DYNAMIC  # dimensions that must be equal are unified
        return axis.step * roots[axis.name] + axis.offset if axis.offset else axis.step * roots[axis.name]

    return tuple(
        {place: side(axis) for place, axis in enumerate(tensor.axes) if isinstance(axis, Axis) and not axis.is_fixed}
        for tensor in spec.inputs
    )


def _expand_masks(graph) -> None:
    """Expands masks of Attention (from opset 23) to a row for each query: ONNX Runtime does not broadcast them on
    CPUs."""
    import onnx_ir as ir

    masked = [node for node in graph if node.op_type == "Attention" and len(node.inputs) > 3 and node.inputs[3]]
    if not masked:
        return
    one = ir.Value(name="one", const_value=ir.tensor([1], name="one"))
    graph.register_initializer(one)

    def insert(kind: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        node = ir.node(kind, inputs=inputs, attributes=attributes)
        node.metadata_props.update(attention.metadata_props)
        graph.insert_before(attention, node)
        return node.outputs[0]

    for attention in masked:
        num_queries = insert("Shape", [attention.inputs[0]], start=2, end=3)
        shape = insert("Concat", [one, one, num_queries, one], axis=0)
        attention.replace_input_with(3, insert("Expand", [attention.inputs[3], shape]))


def _trust_masks(graph) -> None:
    """Removes the handling of fully masked rows after a softmax: every mask keeps a key.

    With it, TensorRT would not recognise the surrounding products as attention.
    """
    for node in list(graph):
        condition = node.inputs[0].producer() if node.op_type == "Where" else None
        if condition is None or condition.op_type != "IsNaN":
            continue
        probabilities = node.inputs[2]
        is_softmax = probabilities.producer() is not None and probabilities.producer().op_type == "Softmax"
        if is_softmax and condition.inputs[0] is probabilities:
            node.outputs[0].replace_all_uses_with(probabilities)
            graph.remove([node, condition], safe=True)


def _select_outputs(traced: torch.fx.GraphModule) -> None:
    """Selects parts of a tensor one by one: the exporter would write an ONNX sequence, which TensorRT does not read."""
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.unbind.int):
        x, dim = (*node.args, 0)[:2]
        for part in list(node.users):
            with traced.graph.inserting_before(part):
                selected = traced.graph.call_function(torch.ops.aten.select.int, (x, dim, part.args[1]))
            selected.meta = node.meta | {"val": part.meta["val"]}
            part.replace_all_uses_with(selected)
            traced.graph.erase_node(part)
        traced.graph.erase_node(node)
    traced.recompile()


def _scale_exactly(traced: torch.fx.GraphModule) -> None:
    """Scales the logits of attention in half precision by two factors whose product is the scale.

    The exporter multiplies queries and keys by the scale's root, rounded: in bfloat16 all logits would have the same
    error of up to 0.4 %.
    """
    attention, mul = torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.mul.Tensor
    for node in traced.graph.find_nodes(op="call_function", target=attention):
        query = node.args[0].meta["val"]
        if query.dtype not in (torch.float16, torch.bfloat16):
            continue
        scale = node.kwargs.get("scale") or query.shape[-1] ** -0.5
        for place, factor in enumerate(_factors(scale, query.dtype)):
            with traced.graph.inserting_before(node):
                scaled = traced.graph.call_function(mul, (node.args[place], factor))
            scaled.meta = node.meta | {"val": node.args[place].meta["val"]}
            node.update_arg(place, scaled)
        node.update_kwarg("scale", 1.0)
    traced.recompile()


def _factors(product: float, dtype: torch.dtype) -> tuple[float, float]:
    """Two numbers of this precision whose product is nearest to `product`."""
    eps = torch.finfo(dtype).eps
    first = 2.0 ** math.floor(math.log2(product) / 2) * torch.arange(1, 2, eps, dtype=torch.float64)
    second = (product / first).to(dtype).double()
    best = (first * second - product).abs().argmin()
    return first[best].item(), second[best].item()


@contextlib.contextmanager
def _quiet():
    """Silence the exporter's progress output on all channels; results are checked afterwards."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _clean(model, spec: NetworkSpec, metadata: Mapping[str, str]) -> None:
    """Name dimensions and nodes, and remove traces of this machine."""
    for place, node in enumerate(model.graph):
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        layer = scopes[-2] if len(scopes) > 1 else ""
        node.name = f"{layer}/{node.op_type}_{place}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for function in model.functions.values():
        function.metadata_props.clear()
    model.graph.name, model.graph.doc_string, model.doc_string = spec.name, None, None
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    model.producer_name, model.producer_version = "megadit", metadata["megadit_version"]
