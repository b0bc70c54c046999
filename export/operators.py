"""Checks, before any engine is built, that TensorRT supports a graph's operators, types and ranks."""

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import onnx

from megadit.models.shared.errors import UserError

BASE_VERSION = (10, 1)
"""The oldest TensorRT version with a list of operators here."""


@cache
def operator_table() -> dict[str, Any]:
    """Operators that TensorRT supports, with sources."""
    return json.loads(resources.files("megadit.export").joinpath("tensorrt_operators.json").read_text(encoding="utf-8"))


def check_operators(path: Path, version: str = "10.1") -> None:
    """Raises an error for a graph that TensorRT `version` does not read.

    Raises:
        UserError: with the operator or type, and its layer.
    """
    known, number = operator_table(), _number(version)
    if number < BASE_VERSION:
        raise UserError(f"TensorRT {version} is too old: install 10.1 or newer")
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        since = known["since"].get(node.op_type)
        if node.op_type not in known["operators"] and since is None:
            raise UserError(f"{path.name}: TensorRT does not support {node.op_type}, in {_layer(node)}")
        if since is not None and number < _number(since):
            raise UserError(
                f"{path.name}: {node.op_type}, in {_layer(node)}, needs TensorRT {since} or newer (this is {version}); "
                "export with --opset 18"
            )
    _check_values(path, model.graph, known)


def reads_attention(version: str) -> bool:
    """Whether TensorRT `version` reads attention as one operator, as in the newest opset."""
    return _number(version) >= max(map(_number, operator_table()["since"].values()))


def _check_values(path: Path, graph: onnx.GraphProto, known: dict[str, Any]) -> None:
    makers = {name: node for node in graph.node for name in node.output}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        layer = _layer(makers[value.name]) if value.name in makers else f"its input {value.name}"
        name = onnx.TensorProto.DataType.Name(kind.elem_type)
        if name not in known["types"]:
            raise UserError(f"{path.name}: TensorRT has no type {name}, in {layer}")
        if len(kind.shape.dim) > known["largest_rank"]:
            raise UserError(f"{path.name}: TensorRT has at most {known['largest_rank']} dimensions, in {layer}")


def _layer(node: onnx.NodeProto) -> str:
    return node.name.rpartition("/")[0] or node.name or "a node without a name"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
