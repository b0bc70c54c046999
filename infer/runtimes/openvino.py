"""Exported networks under OpenVINO, on the CPU, in float32.

Seen with OpenVINO 2026.4: a process that has computed here dies of SIGSEGV when a forked child ends (a worker of a data
loader). Commands that sample fork none.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import ExportedNetworks, NetworkSpec, Shape
from megadit.infer.runtimes.onnx import TORCH_DTYPES
from megadit.infer.runtimes.widen import graph_for_cpus
from megadit.models.shared.errors import UserError


class OpenVinoNetwork:
    """One compiled graph, for all sizes. Tensors are passed by address."""

    def __init__(self, path: Path, spec: NetworkSpec, *, rebuild: str = "export it again") -> None:
        """Compile a graph.

        Raises:
            UserError: without OpenVINO, or if it does not read the graph.
        """
        self.spec = spec
        self._rebuild = rebuild
        self._openvino = openvino = load_openvino()
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # on CPUs with bfloat16 products its default is bfloat16
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # torch's threads, and other processes, are on the same cores
        }
        try:
            self._request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"OpenVINO {openvino.__version__.partition('-')[0]} does not read {path.name}: {reason}; use --runtime "
                "onnx, or export with --precision fp32"
            ) from error
        self._warm_up()

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], output_shape: Shape) -> Tensor:
        """The output, float32.

        Raises:
            UserError: for sizes that were not exported.
        """
        self.spec.check({name: tuple(tensor.shape) for name, tensor in inputs.items()}, self._rebuild)
        return self._run(inputs, torch.empty(output_shape))

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
    """The graphs of a folder `onnx/` by name, each compiled at first use."""

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
