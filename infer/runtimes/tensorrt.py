"""Exported networks as TensorRT engines: one stream and one workspace for all, CUDA graphs for repeated shapes."""

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import ExportedNetworks, NetworkSpec, Shape
from megadit.infer.runtimes.onnx import TORCH_DTYPES
from megadit.models.shared.errors import UserError

Shapes = tuple[Shape, ...]


class Engines:
    """The engines of a folder `plan/`. They run one after another in one stream and share their workspace: a thread
    that decodes waits for one that samples."""

    def __init__(self, exported: ExportedNetworks, device: torch.device) -> None:
        import tensorrt as trt

        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._trt, self._exported = trt, exported
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._runtime.engine_host_code_allowed = exported.settings["engine"]["version_compatible"]
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._engines: dict[str, Engine] = {}
        self.lock = threading.RLock()

    def __getitem__(self, name: str) -> "Engine":
        with self.lock, torch.cuda.device(self.device):
            return self._load(name)

    def _load(self, name: str) -> "Engine":
        if name not in self._engines:
            path = self._exported.directory / f"{name}.plan"
            engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
            if engine is None:
                raise UserError(f"TensorRT cannot load {path}; {_rebuild(self._exported)}")
            if self._exported.settings["engine"]["weight_streaming"]:
                engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
            self._engines[name] = Engine(self, engine, self._exported.network(name), self._exported.rebuild)
        return self._engines[name]

    def memory(self, size: int) -> Tensor:
        """Workspace of the engines, uint8 [bytes], of at least `size`: what the largest shapes so far need, and not
        those of the profile. All engines forget their graphs when it grows."""
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            for engine in self._engines.values():
                engine.forget()
        return self._memory

    def new_context(self, engine):
        return engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)


class Engine:
    """One network. A shape that is used again is captured as a CUDA graph."""

    def __init__(self, engines: Engines, engine, spec: NetworkSpec, rebuild: str) -> None:
        self.engine = engine
        self._engines, self._spec, self._rebuild = engines, spec, rebuild
        self._context = engines.new_context(engine)
        self._can_be_captured = True
        self.forget()

    def forget(self) -> None:
        """Drops the captured graph, which is bound to freed memory."""
        self._shapes: Shapes | None = None
        self._buffers: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], output_shape: Shape) -> Tensor:
        """The output, float32, on the device.

        Raises:
            UserError: for sizes that were not exported.
        """
        shapes = {tensor.name: tuple(inputs[tensor.name].shape) for tensor in self._spec.inputs}
        self._spec.check(shapes, self._rebuild)
        with self._engines.lock, torch.cuda.device(self._engines.device):
            return self._run(shapes, inputs, output_shape)

    def _run(self, shapes: Mapping[str, Shape], inputs: Mapping[str, Tensor], output_shape: Shape) -> Tensor:
        stream = self._engines.stream
        stream.wait_stream(torch.cuda.current_stream(self._engines.device))
        with torch.cuda.stream(stream):
            if self._shapes != (*shapes.values(), output_shape):
                self._prepare(shapes, output_shape)
                self._copy(inputs)
                self._execute()
            else:
                self._copy(inputs)
                self._replay()
            out = self._buffers[self._spec.output].clone()
        torch.cuda.current_stream(self._engines.device).wait_stream(stream)
        out.record_stream(torch.cuda.current_stream(self._engines.device))
        return out

    def _prepare(self, shapes: Mapping[str, Shape], output_shape: Shape) -> None:
        self.forget()
        for name, shape in shapes.items():
            self._context.set_input_shape(name, shape)
        memory = self._engines.memory(self._context.update_device_memory_size_for_shapes())
        device = self._engines.device
        for tensor in self._spec.inputs:
            shape, dtype = shapes[tensor.name], TORCH_DTYPES[tensor.dtype]
            self._buffers[tensor.name] = torch.empty(shape, dtype=dtype, device=device)
        self._buffers[self._spec.output] = torch.empty(output_shape, device=device)
        for name, buffer in self._buffers.items():
            self._context.set_tensor_address(name, buffer.data_ptr())
        self._context.set_device_memory(memory.data_ptr(), memory.numel())
        self._shapes = (*shapes.values(), output_shape)

    def _copy(self, inputs: Mapping[str, Tensor]) -> None:
        for tensor in self._spec.inputs:
            self._buffers[tensor.name].copy_(inputs[tensor.name], non_blocking=True)

    def _replay(self) -> None:
        if self._graph is None and self._can_be_captured:
            self._graph = self._captured()
        self._execute() if self._graph is None else self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._engines.stream, capture_error_mode="thread_local"):
                self._execute()
        except RuntimeError as error:
            self._can_be_captured = False
            warnings.warn(f"{self._spec.name} runs without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
            return None
        return graph

    def _execute(self) -> None:
        if not self._context.execute_async_v3(torch.cuda.current_stream(self._engines.device).cuda_stream):
            raise UserError(f"the engine of {self._spec.name} failed; see its messages above")


_opened: WeakValueDictionary[tuple[Path, str], Engines] = WeakValueDictionary()
"""Open engines by (folder, device): denoiser and tokenizer of a bundle share memory and stream."""


def open_engines(exported: ExportedNetworks, device: torch.device) -> Engines:
    """The engines of a bundle, loaded at first use.

    Raises:
        UserError: without TensorRT or a GPU, or for engines of another GPU or version; the message names the command to
            rebuild.
    """
    try:
        import tensorrt as trt
    except (ImportError, OSError):
        raise UserError("the tensorrt runtime needs TensorRT: pip install 'megadit[trt]'") from None
    if device.type != "cuda":
        raise UserError(f"the tensorrt runtime needs a GPU, not device {device}: use --runtime onnx there")
    check_engine(
        exported, trt.__version__, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    )
    key = (exported.directory, str(device))
    engines = _opened.get(key)
    if engines is None:
        _opened[key] = engines = Engines(exported, device)
    return engines


def check_engine(exported: ExportedNetworks, version: str, gpu: str, capability: tuple[int, int]) -> None:
    """Refuses engines that were built for another GPU or version.

    Raises:
        UserError: the message names the difference and the command to rebuild.
    """
    engine = exported.settings["engine"]
    if engine["tensorrt"] != version and not engine["version_compatible"]:
        raise UserError(f"these engines need TensorRT {engine['tensorrt']}, not {version}; {_rebuild(exported)}")
    if engine["hardware_compatible"] and tuple(capability) >= (8, 0):
        return
    if engine["compute_capability"] != list(capability):
        raise UserError(f"these engines were built on {engine['gpu']}, not for {gpu}; {_rebuild(exported)}")


def _rebuild(exported: ExportedNetworks) -> str:
    return f"build them here: megadit export {exported.directory.parent} OUT --format tensorrt"
