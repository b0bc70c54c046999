"""Exported networks under OpenVINO, on the CPU, in float32.

Seen with OpenVINO 2026.4: a process that has computed here dies of SIGSEGV when a forked child ends (a worker of a data
loader). Commands that sample fork none.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import ExportedNetworks, NetworkSpec, Shape
from megadit.infer.runtimes.onnx import TORCH_DTYPES
from megadit.infer.runtimes.widen import graph_for_cpus
from megadit.models.shared.errors import UserError


class OpenVinoNetwork:
    """One graph: compiled for the sizes of the first call, and once others come, in its place, for all.

    With one size OpenVINO fuses more, and a denoiser takes some 5 % less time. Tensors are passed by address.
    """

    def __init__(self, path: Path, spec: NetworkSpec, *, rebuild: str = "export it again") -> None:
        """Read a graph.

        Raises:
            UserError: without OpenVINO, or if it does not read the graph.
        """
        self.spec = spec
        self._rebuild = rebuild
        self._openvino = load_openvino()
        self._core = self._openvino.Core()
        self._name = path.name
        with self._reading():
            self._model = self._core.read_model(path)
            split_products(self._model)
            self._core.query_model(self._model, "CPU")
        self._request = None
        self._compiled_for: Mapping[str, Shape] | None = None
        """Shapes of the inputs; None for all, or if nothing is compiled."""

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], output_shape: Shape) -> Tensor:
        """The output, float32.

        Raises:
            UserError: for sizes that were not exported, or if OpenVINO cannot compile the graph.
        """
        shapes = {tensor.name: tuple(inputs[tensor.name].shape) for tensor in self.spec.inputs}
        self.spec.check(shapes, self._rebuild)
        if self._request is None:
            model = self._model.clone()
            model.reshape({name: list(shape) for name, shape in shapes.items()})
            to_batch_first(model)
            self._compile(model, shapes)
        elif self._compiled_for not in (None, shapes):
            self._compile(self._model, None)
            self._warm_up()
        return self._run(inputs, torch.empty(output_shape))

    def _compile(self, model, shapes: Mapping[str, Shape] | None) -> None:
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # on CPUs with bfloat16 products its default is bfloat16
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # torch's threads, and other processes, are on the same cores
        }
        self._request = None  # its memory is free before the next one is compiled
        with self._reading():
            self._request = self._core.compile_model(model, "CPU", settings).create_infer_request()
        self._compiled_for = shapes

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"OpenVINO {self._openvino.__version__.partition('-')[0]} does not read {self._name}: {reason}; use "
                "--runtime onnx, or export with --precision fp32"
            ) from error

    def _run(self, inputs: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor | None:
        held = {self.spec.output: out} if out is not None else {}  # the request uses this memory until it is done
        for tensor in self.spec.inputs:
            held[tensor.name] = inputs[tensor.name].to("cpu", TORCH_DTYPES[tensor.dtype]).contiguous()
        for name, value in held.items():
            self._request.set_tensor(name, self._openvino.Tensor(value.numpy(), shared_memory=True))
        self._request.infer()
        return out

    def _warm_up(self) -> None:
        """Runs small inputs, each axis longer than its shortest where sizes differ.

        Kernels are generated in the first call, and if an axis was 1 there (a single token), OpenVINO 2026.4 repeats
        one value along it in all later calls, with results that are wrong.
        """
        sizes = {name: min(axis.min + axis.step, axis.max) for name, axis in self.spec.axes.items()}
        shapes = {tensor.name: tensor.shape(sizes) for tensor in self.spec.inputs}
        self._run({name: torch.zeros(shape) for name, shape in shapes.items()})


class OpenVinoNetworks:
    """The graphs of a folder `onnx/` by name, each read and compiled at first use."""

    def __init__(self, exported: ExportedNetworks, device: torch.device) -> None:
        """Open a folder.

        Raises:
            UserError: without OpenVINO, or for another device than a CPU.
        """
        load_openvino()
        if device.type != "cpu":
            raise UserError(
                f"the openvino runtime is for CPUs, not device {device}: use --device cpu, or --runtime onnx"
            )
        self.device, self._exported = device, exported
        self._networks: dict[str, OpenVinoNetwork] = {}

    def __getitem__(self, name: str) -> OpenVinoNetwork:
        if name not in self._networks:
            with graph_for_cpus(self._exported, name) as path:
                network = OpenVinoNetwork(path, self._exported.network(name), rebuild=self._exported.rebuild)
            self._networks[name] = network
        return self._networks[name]


def load_openvino():
    """The library, without `openvino_telemetry`, by which it would report each import to its makers.

    Raises:
        UserError: if it is missing.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # cannot be imported then, and openvino has a stub for that
    try:
        import openvino
    except (ImportError, OSError):
        raise UserError("the openvino runtime needs the library openvino: pip install 'megadit[openvino]'") from None
    return openvino


# --- graphs, in forms for which OpenVINO has faster kernels -------------------------------------------------------


def split_products(model) -> None:
    """Computes queries, keys and values by a product each, in place of one that is split: its parts would be copied.

    Products of weights in eight bits, those with biases, and those whose split parts are not of channels are left as
    they are.
    """
    operators = load_openvino().opset13
    for split in model.get_ordered_ops():
        if split.get_type_name() != "VariadicSplit" or split.input_value(0).get_node().get_type_name() != "Reshape":
            continue
        grouped = split.input_value(0).get_node()
        product = grouped.input_value(0).get_node()
        if product.get_type_name() != "MatMul" or product.get_attributes()["transpose_b"]:
            continue
        weight, (axis, sizes) = product.input_value(1).get_node(), (split.input_value(i).get_node() for i in (1, 2))
        if any(node.get_type_name() != "Constant" for node in (weight, axis, sizes)):
            continue
        *of_tokens, _ = product.get_output_partial_shape(0)
        sides, num_tokens_axes = list(grouped.get_output_partial_shape(0)), len(of_tokens)
        groups = [side.get_length() if side.is_static else 0 for side in sides[num_tokens_axes:]]
        if sides[:num_tokens_axes] != of_tokens or math.prod(groups) != weight.data.shape[1]:
            continue
        axis = axis.data.item() % len(sides) - num_tokens_axes + 1
        if axis < 1:
            continue
        grouped_weight, ends = weight.data.reshape(len(weight.data), *groups), np.cumsum(sizes.data)
        for place, part in enumerate(np.split(grouped_weight, ends[:-1], axis)):
            matrix = np.ascontiguousarray(part.reshape(len(part), -1))
            result = operators.matmul(product.input_value(0), operators.constant(matrix), False, False)
            shape = np.array([0] * num_tokens_axes + list(part.shape[1:]))  # 0: as it is
            split.output(place).replace(operators.reshape(result, shape, special_zero=True).output(0))


def to_batch_first(model) -> None:
    """Rewrites parts of a graph with fixed sizes and one video from [S, 1, ...] to [1, S, ...].

    Only then OpenVINO transposes within its kernel of attention, and computes a large product and GELU in one; rotary
    positions are written as its own kernel expects them.
    """
    operators = load_openvino().opset13
    rewrites = {"Transpose": _transposed, "Add": _rotated, "Erf": _product_with_gelu}
    for node in model.get_ordered_ops():
        if rewrite := rewrites.get(node.get_type_name()):
            rewrite(node, operators)


def _transposed(node, operators) -> None:
    """Heads from [S, 1, N, K] to [1, N, S, K], keys further to [1, N, K, S], and outputs back."""
    order, sides = _constant(node, 1), _sides(node.input_value(0))
    if order == [1, 2, 0, 3] and sides[1:2] == [1]:
        heads = operators.reshape(node.input_value(0), [1, sides[0], *sides[2:]], False)
        order, users = [0, 2, 1, 3], _users(node)
        if len(users) == 1 and users[0].get_type_name() == "Transpose" and _constant(users[0], 1) == [0, 1, 3, 2]:
            order, node = [0, 2, 3, 1], users[0]
        _replace(node, operators.transpose(heads, order))
    elif order == [2, 0, 1, 3] and sides[:1] == [1]:
        tokens = operators.transpose(node.input_value(0), [0, 2, 1, 3])
        _replace(node, operators.reshape(tokens, [sides[2], 1, sides[1], sides[3]], False))


def _rotated(node, operators) -> None:
    """x cos + (x2, x1) (-sin, sin) -> x cos + (-x2, x1) (sin, sin) for x = (x1, x2)."""
    by_cos, by_sin = _inputs(node)
    if _kinds([by_cos, by_sin]) != ["Multiply", "Multiply"] or _kinds(_inputs(by_sin)) != ["Concat", "Concat"]:
        return
    x, sides, (swapped, signed) = by_cos.input_value(0), _sides(by_cos.input_value(0)), _inputs(by_sin)
    slices, (negative, *others) = _inputs(swapped), _inputs(signed)
    if _kinds([*slices, negative]) != ["Slice", "Slice", "Negative"] or len(others) != 1 or not sides:
        return
    half, sin = sides[-1] // 2, signed.input_value(1)
    starts, sources = [_constant(each, 1) for each in slices], {each.input_value(0) for each in slices}
    if starts != [[half], [0]] or sources != {x} or negative.input_value(0) != sin:
        return
    x1_x2 = operators.variadic_split(x, np.int64(len(sides) - 1), [half, half])
    minus_x2 = operators.multiply(x1_x2.output(1), operators.constant(np.array([-1], np.float32)))
    turned = operators.concat([minus_x2, x1_x2.output(0)], -1)  # a last axis by its number is not recognised
    _replace(node, operators.add(by_cos, operators.multiply(turned, operators.concat([sin, sin], -1))))


def _product_with_gelu(node, operators) -> None:
    """(x W) (1 + erf(x W / sqrt(2))) / 2 for tokens [S, 1, D]; `node` is erf."""
    divide, *_ = _inputs(node)
    ends = [node]
    while len(ends) < 4 and len(users := _users(ends[-1])) == 1:
        ends += users
    if _kinds([divide, *ends[1:]]) != ["Divide", "Add", "Multiply", "Multiply"]:
        return
    product, numbers = _inputs(divide)[0], [_number(each) for each in (divide, *ends[1:3])]
    if product.get_type_name() != "MatMul" or product.output(0) not in ends[3].input_values():
        return
    sides, of_weight = _sides(product.output(0)), _sides(product.input_value(1))
    if not np.allclose(numbers, [2**0.5, 1, 0.5]) or len(sides) != 3 or sides[1] != 1 or len(of_weight) != 2:
        return
    tokens = operators.reshape(product.input_value(0), [1, sides[0], -1], False)
    inner = operators.matmul(tokens, product.input_value(1), False, product.get_attributes()["transpose_b"])
    _replace(ends[3], operators.reshape(operators.gelu(inner, "erf"), sides, False))


def _kinds(nodes) -> list[str]:
    return [each.get_type_name() for each in nodes]


def _inputs(node) -> list:
    return [each.get_node() for each in node.input_values()]


def _users(node) -> list:
    return [each.get_node() for each in node.output(0).get_target_inputs()]


def _sides(output) -> list[int]:
    """The shape; empty if it is not fixed."""
    shape = output.get_partial_shape()
    return list(shape.to_shape()) if shape.is_static else []


def _constant(node, place: int) -> list[int] | None:
    value = node.input_value(place).get_node()
    return value.data.tolist() if value.get_type_name() == "Constant" else None


def _number(node) -> float:
    """The number among its inputs; nan if there is none."""
    constants = [each.data for each in _inputs(node) if each.get_type_name() == "Constant" and each.data.size == 1]
    return constants[0].item() if constants else math.nan


def _replace(node, other) -> None:
    node.output(0).replace(other.output(0))
