"""Finds the first layer of a graph that differs from torch.

The output of every module of the torch network is compared with the value of the same layer in the graph: nodes are
named after their layers (`to_onnx.py`), and the last node of a layer computes the module's output.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from torch import Tensor, nn

from megadit.infer.runtimes.onnx import open_session

Weights = Mapping[tuple[int, ...], set[bytes]]
"""Shape -> hashes of a network's tensors of that shape."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference|, both as whole tensors; infinite if a value is not finite."""
    value, reference = value.double(), reference.double()
    error = (value - reference).norm() / reference.norm().clamp(min=1e-3 * reference.numel() ** 0.5)
    return error.item() if torch.isfinite(error) else float("inf")


def first_difference(
    path: Path, network: nn.Module, inputs: Mapping[str, Tensor], tolerance: float
) -> tuple[str, float]:
    """(layer, relative error) of the first layer beyond `tolerance`, in the order in which torch computes them.

    If all are within it, the layer that differs most.
    """
    references = module_values(network, inputs)
    last_value = last_values(path, references)
    values = graph_values(path, inputs, set(last_value.values()))
    worst = ("", 0.0)
    for layer, reference in references.items():
        value = values.get(last_value.get(layer, ""))
        if value is None or value.shape != reference.shape:
            continue
        error = relative_error(value, reference)
        if error > tolerance:
            return layer, error
        worst = max(worst, (layer, error), key=lambda one: one[1])
    return worst


def layer_of_failure(message: str) -> str:
    """The layer whose node an ONNX Runtime error names, if it does."""
    found = re.search(r"Name:'([^']*)'", message)
    return found.group(1).rpartition("/")[0] if found else ""


def weight_hashes(network: nn.Module) -> Weights:
    """Hashes of every tensor of a network, original and transposed, by shape."""
    hashes: dict[tuple[int, ...], set[bytes]] = {}
    for tensor in network.state_dict().values():
        for one in (tensor, tensor.T) if tensor.ndim == 2 else (tensor,):
            content = one.detach().cpu().contiguous().view(torch.uint8).numpy()
            hashes.setdefault(tuple(one.shape), set()).add(hashlib.sha256(content).digest())
    return hashes


def changed_weight(path: Path, hashes: Weights) -> str | None:
    """The layer of the first graph tensor with the shape of a weight and other values; None if there is none."""
    for value in onnx_ir.load(path).graph.initializers.values():
        shape = tuple(value.shape.numpy())
        # 8-bit ones are checked by the network's output
        if len(shape) > 1 and shape in hashes and value.dtype.is_floating_point() and value.dtype.itemsize > 1:
            content = np.ascontiguousarray(value.const_value.numpy()).view(np.uint8)
            if hashlib.sha256(content).digest() not in hashes[shape]:
                return ", ".join(sorted({node.name.rpartition("/")[0] for node in value.consumers()}))
    return None


@contextmanager
def recorded_outputs(network: nn.Module, record: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block, call `record` with the output of every module."""

    def hook(name: str):
        def reported(module, args, output):
            if isinstance(output, Tensor):
                record(name, output)

        return reported

    handles = [module.register_forward_hook(hook(name)) for name, module in network.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def module_values(network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Output of each module, in order of completion."""
    values: dict[str, Tensor] = {}
    with recorded_outputs(network, lambda name, value: values.setdefault(name, value.float().cpu())):
        network(*inputs.values())
    return values


def last_values(path: Path, layers: Iterable[str]) -> dict[str, str]:
    """The name of the last value of each layer that has nodes."""
    known, found = set(layers), {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        scope = node.name.rpartition("/")[0]
        while scope:
            if scope in known:
                found[scope] = node.output[0]
            scope = scope.rpartition(".")[0]
    return found


def graph_values(path: Path, inputs: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """The outputs of a graph, and these values inside it."""
    session = session_with(path, names)
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    values = zip((output.name for output in session.get_outputs()), found, strict=True)
    return {name: torch.from_numpy(value.astype(np.float32)) for name, value in values if value.dtype.kind == "f"}


def session_with(path: Path, names: set[str]):
    """A session of a graph, by a copy with these values as further outputs."""
    model = onnx.load(path, load_external_data=False)
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(names - outputs))
    copy = path.with_name(f"layers_{path.name}")  # next to the file of its weights
    try:
        onnx.save(model, copy)
        return open_session(copy, torch.device("cpu"), prepack=False)
    finally:
        copy.unlink(missing_ok=True)
