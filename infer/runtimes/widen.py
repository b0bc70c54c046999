"""Converts bfloat16 graphs to float32 for CPUs, where ONNX Runtime has no bfloat16 kernels.

Every weight keeps its exact value; only the rounding of results to bfloat16 is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megadit.infer.runtimes.network_spec import ExportedNetworks
from megadit.models.shared.errors import library_errors


@contextmanager
def graph_for_cpus(exported: ExportedNetworks, name: str) -> Iterator[Path]:
    """Context with the file of a network that CPUs run: a copy in float32 in place of a denoiser in bfloat16."""
    path = exported.directory / f"{name}.onnx"
    if exported.network(name).is_denoiser and exported.settings["precision"] == "bf16":
        with widened(path) as copy:
            yield copy
    else:
        yield path


@contextmanager
def widened(path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """Context with a copy in float32, which is written into `scratch` or the folder for temporary files."""
    import onnx_ir as ir

    with library_errors(lambda reason: f"{path} cannot be converted to float32: {reason}"):
        model = ir.load(path)
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.BFLOAT16:
            value.const_value = _float32(value.const_value, value.name)
            value.dtype = ir.DataType.FLOAT
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
    for node in model.graph:
        for value in node.outputs:
            if value.dtype == ir.DataType.BFLOAT16:
                value.dtype = ir.DataType.FLOAT
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == ir.DataType.BFLOAT16:
                node.attributes[name] = ir.AttrTensor(name, _float32(attribute.value, attribute.value.name))
            if name == "to" and attribute.value == ir.DataType.BFLOAT16:
                node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)
    with TemporaryDirectory(dir=scratch) as directory:
        copy = Path(directory) / path.name
        with library_errors(lambda reason: f"{path} cannot be converted to float32: {reason}"):  # weights are read here
            ir.save(model, copy, external_data=f"{path.name}.data")
        yield copy


def _float32(tensor, name: str | None):
    """The tensor in float32, which is converted only when it is written, to hold one at a time in memory."""
    import onnx_ir as ir

    return ir.LazyTensor(
        lambda: ir.tensor(tensor.numpy().astype(np.float32)), dtype=ir.DataType.FLOAT, shape=tensor.shape, name=name
    )
