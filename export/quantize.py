"""8-bit quantisation of graphs: pairs of QuantizeLinear and DequantizeLinear around the factors of products.

TensorRT fuses such pairs on both inputs of a product into one 8-bit product; ONNX Runtime computes them literally.
Ranges of activations are the largest magnitudes while videos of a few prompts are sampled.
Only the linears of the blocks are quantised: embeddings, modulation and the last layer take little time and need
precision (as in NVIDIA's recipes for diffusion transformers).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.export.conditioning_cases import required_conditioning
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import as_one
from megadit.infer.runtimes.network_spec import DENOISERS
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.bundle import Bundle
from megadit.models.lora.layers import move_adapters
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import load_network

_QUANTISED = re.compile(r"blocks\.\d+\.(self_attention|cross_attention|mlp)\.\w+$")
CALIBRATION_STEPS = 8


@dataclass(frozen=True, slots=True)
class EightBit:
    """An 8-bit number format."""

    dtype: ir.DataType
    torch_dtype: torch.dtype
    least: float
    largest: float
    per_channel: bool
    """Whether weights have a scale for each output; else one for all, as TensorRT's fp8 products need."""


FORMATS = {
    "int8": EightBit(ir.DataType.INT8, torch.int8, -128.0, 127.0, True),
    "fp8": EightBit(ir.DataType.FLOAT8E4M3FN, torch.float8_e4m3fn, -448.0, 448.0, False),
}


def quantised_linears(dit: nn.Module) -> dict[str, nn.Linear]:
    """Name -> module of the linears that are quantised."""
    found = {name: module for name, module in dit.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in found.items() if _QUANTISED.search(name)}


def calibrate(bundle: Bundle, prompts: Sequence[str], name: str = DENOISERS[0]) -> dict[str, float]:
    """The largest input magnitude of each quantised linear of the denoiser of this name, while these prompts are
    sampled with the bundle's defaults.

    Raises:
        UserError: without prompts.
    """
    if not prompts:
        raise UserError("calibration needs at least one prompt")
    dits = [load_network(bundle.path / network, dtype=torch.float32) for network in bundle.networks]
    num_steps = min(bundle.defaults.num_steps, CALIBRATION_STEPS)
    settings = replace(bundle.defaults, num_steps=num_steps, autoguidance="", cache_budget=0.0)
    conditioning = required_conditioning(bundle)
    with recorded_ranges(dits[DENOISERS.index(name)]) as ranges:
        for seed, prompt in enumerate(prompts):
            list(_pipeline(bundle, dits).stream([prompt], settings, seeds=seed, conditioning=conditioning))
    return ranges


@contextmanager
def recorded_ranges(dit: nn.Module) -> Iterator[dict[str, float]]:
    """The largest input magnitude of each quantised linear in the calls within this context."""
    linears = quantised_linears(dit)
    largest = dict.fromkeys(linears, 0.0)
    handles = [module.register_forward_pre_hook(_recorder(largest, name)) for name, module in linears.items()]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def _pipeline(bundle: Bundle, dits: Sequence[DiT]) -> TextToVideo:
    return TextToVideo(
        denoiser=as_one(list(map(TorchDenoiser, dits)), bundle.boundary),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        config=bundle.config,
        defaults=bundle.defaults,
        conditionings=bundle.conditionings,
        image_encoder=bundle.load_image_encoder(),
    )


def _recorder(largest: dict[str, float], name: str):
    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        largest[name] = max(largest[name], args[0].abs().max().item())

    return record


def round_linears(dit: nn.Module, ranges: Mapping[str, float], precision: str) -> None:
    """Rounds weights and inputs of a torch network's linears as the products of its graph do (`quantise`), in place.

    The rounded network differs from the graph like one in half precision, except for values near the middle between two
    8-bit numbers, which may be rounded differently.
    """
    form, linears = FORMATS[precision], quantised_linears(dit)
    for name, largest in ranges.items():
        linear = linears[name]
        number = torch.empty(0, dtype=linear.weight.dtype).numpy().dtype
        steps, scale = _weight_steps(linear.weight.detach().float().T.numpy(), form, number)
        weight_OI = torch.from_numpy(steps.astype(np.float32) * scale.astype(np.float32)).T
        weight_OI = weight_OI.to(linear.weight.dtype).contiguous()
        rounded = RoundedLinear(linear, weight_OI, float(_scale(np.asarray(largest), form, number)), form)
        move_adapters(linear, rounded)  # they read unrounded inputs
        dit.set_submodule(name, rounded)


class RoundedLinear(nn.Linear):
    """A linear with a rounded weight, which rounds its inputs to steps of `scale`."""

    def __init__(self, linear: nn.Linear, weight_OI: Tensor, scale: float, form: EightBit) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = nn.Parameter(weight_OI, requires_grad=False), linear.bias
        self.scale, self.form = scale, form

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        steps = x.float() / self.scale
        steps = steps.round() if self.form.torch_dtype == torch.int8 else steps
        steps = steps.clamp(self.form.least, self.form.largest).to(self.form.torch_dtype)
        return F.linear((steps.float() * self.scale).to(x.dtype), self.weight, self.bias)


def quantise(path: Path, ranges: Mapping[str, float], precision: str, prefix: str = "denoiser.dit.") -> None:
    """Inserts quantise and dequantise pairs before the products of these layers, in place. Raises UserError if a layer
    is not in the graph as one product with its weight."""
    form, model = FORMATS[precision], ir.load(path)
    products = {node.name.rpartition("/")[0]: node for node in model.graph if node.op_type == "MatMul"}
    for layer, largest in ranges.items():
        node = products.get(prefix + layer)  # products of adapters have their own layers
        if node is None or node.inputs[1].const_value is None:
            raise UserError(f"{path.name}: the layer {layer} is no product with a weight, and cannot be quantised")
        _quantise_input(model.graph, node, largest, form)
        _quantise_weight(model.graph, node, form)
    external = f"{path.name}.data" if path.with_name(f"{path.name}.data").exists() else None
    ir.save(model, path, external_data=external)


def _quantise_input(graph: ir.Graph, node: ir.Node, largest: float, form: EightBit) -> None:
    x = node.inputs[0]
    scale = _scale(np.asarray(largest), form, x.dtype.numpy())
    scale, zero = _constants(graph, f"{node.name}/input", scale, np.zeros((), form.dtype.numpy()))
    quantised = _insert(graph, node, "QuantizeLinear", [x, scale, zero], f"{node.name}/input_q")
    restored = _insert(graph, node, "DequantizeLinear", [quantised, scale, zero], f"{node.name}/input_dq")
    node.replace_input_with(0, restored)


def _quantise_weight(graph: ir.Graph, node: ir.Node, form: EightBit) -> None:
    """Quantise a weight [in, out] to 8-bit constants with their scale."""
    weight = node.inputs[1]
    stored, scale = _weight_steps(weight.const_value.numpy().astype(np.float32), form, weight.dtype.numpy())
    scale, zero = _constants(graph, f"{node.name}/weight", scale, np.zeros(scale.shape, form.dtype.numpy()))
    (steps,) = _constants(graph, f"{node.name}/weight_steps", stored)
    axis = {"axis": 1} if form.per_channel else {}
    restored = _insert(graph, node, "DequantizeLinear", [steps, scale, zero], f"{node.name}/weight_dq", axis)
    node.replace_input_with(1, restored)
    if not weight.uses():
        del graph.initializers[weight.name]


def _weight_steps(values: np.ndarray, form: EightBit, number: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(8-bit numbers, scale) of a weight [in, out]; one scale for each output, or one for all."""
    scale = _scale(np.abs(values).max(axis=0 if form.per_channel else None), form, number)
    steps = np.clip(values / scale.astype(np.float32), -form.largest, form.largest)
    steps = np.rint(steps) if form.dtype == ir.DataType.INT8 else steps
    return steps.astype(form.dtype.numpy()), scale


def _scale(largest: np.ndarray, form: EightBit, number: np.dtype) -> np.ndarray:
    """Quantisation step, in the number type of the product; positive even if all values are zero."""
    return np.maximum((largest / form.largest).astype(number), np.finfo(number).smallest_subnormal)


def _constants(graph: ir.Graph, name: str, *arrays: np.ndarray) -> list[ir.Value]:
    values = []
    for place, array in enumerate(arrays):
        tensor = ir.tensor(array, name=f"{name}_{place}")
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(value)
        values.append(value)
    return values


def _insert(
    graph: ir.Graph, before: ir.Node, kind: str, inputs: Sequence[ir.Value], name: str, attributes=None
) -> ir.Value:
    node = ir.node(kind, inputs=inputs, attributes=attributes or {}, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]
