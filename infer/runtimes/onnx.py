"""Exported networks under ONNX Runtime, on the CPU or on a CUDA GPU."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import ExportedNetworks, NetworkSpec, Shape
from megadit.infer.runtimes.widen import graph_for_cpus
from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import cache_folder

NUMPY_DTYPES = {"float32": np.float32, "int64": np.int64}
TORCH_DTYPES = {"float32": torch.float32, "int64": torch.int64}
PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
TENSORRT = "TensorrtExecutionProvider"


class OnnxNetwork:
    """One graph in memory. Tensors are passed by address: on a GPU nothing is copied to the host."""

    def __init__(
        self,
        path: Path,
        spec: NetworkSpec,
        *,
        device: torch.device,
        rebuild: str = "export it again",
        provider: str = "",
    ) -> None:
        self.spec = spec
        self.device = device
        self._rebuild = rebuild
        options = tensorrt_options(spec) if provider == TENSORRT else None
        self._session = open_session(path, device, tensorrt=options)

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], output_shape: Shape) -> Tensor:
        """The output, float32, on `device`.

        Raises:
            UserError: for sizes that were not exported.
        """
        self.spec.check({name: tuple(tensor.shape) for name, tensor in inputs.items()}, self._rebuild)
        binding = self._session.io_binding()
        place, index = self.device.type, self.device.index or 0
        held = []  # the session reads this memory until it is done
        for tensor in self.spec.inputs:
            value = inputs[tensor.name].to(self.device, TORCH_DTYPES[tensor.dtype]).contiguous()
            held.append(value)
            dtype, shape = NUMPY_DTYPES[tensor.dtype], tuple(value.shape)
            binding.bind_input(tensor.name, place, index, dtype, shape, value.data_ptr())
        out = torch.empty(output_shape, device=self.device)
        binding.bind_output(self.spec.output, place, index, np.float32, output_shape, out.data_ptr())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the session works on a stream of its own
        self._session.run_with_iobinding(binding)
        return out


class OnnxNetworks:
    """The graphs of a folder `onnx/` by name, each loaded at first use.

    `provider` is the execution provider that comes before CUDA's or the CPU's; "" means none.
    """

    def __init__(self, exported: ExportedNetworks, device: torch.device, provider: str = "") -> None:
        self.device = device
        self._exported, self._provider = exported, provider
        self._networks: dict[str, OnnxNetwork] = {}

    def __getitem__(self, name: str) -> OnnxNetwork:
        if name not in self._networks:
            self._networks[name] = self._open(name)
        return self._networks[name]

    def _open(self, name: str) -> OnnxNetwork:
        spec = self._exported.network(name)
        options = {"device": self.device, "rebuild": self._exported.rebuild, "provider": self._provider}
        if self.device.type == "cpu":
            with graph_for_cpus(self._exported, name) as path:
                return OnnxNetwork(path, spec, **options)
        return OnnxNetwork(self._exported.directory / f"{name}.onnx", spec, **options)


def tensorrt_options(spec: NetworkSpec) -> dict[str, str]:
    """Options of ONNX Runtime's TensorRT provider: the profile of the spec, and the cache of built engines."""
    cache = cache_folder() / "tensorrt"
    options = {"trt_engine_cache_enable": "1", "trt_timing_cache_enable": "1", "trt_engine_cache_path": str(cache)}
    for extreme in ("min", "opt", "max"):
        shapes = (f"{tensor.name}:{'x'.join(map(str, tensor.shape_at(extreme)))}" for tensor in spec.inputs)
        options[f"trt_profile_{extreme}_shapes"] = ",".join(shapes)
    return options


def open_session(
    path: Path | str, device: torch.device, *, prepack: bool = True, tensorrt: Mapping[str, str] | None = None
):
    """A session of ONNX Runtime; without `prepack` weights stay in the mapped file, which is slower.

    `tensorrt` are the options of its TensorRT provider, which then runs the nodes that it supports.

    Raises:
        UserError: if ONNX Runtime is missing, has no provider for `device`, or cannot open the graph, such as one with
            weights outside of its folder.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise UserError("the onnx runtime needs the library onnxruntime: pip install 'megadit[export]'") from None
    providers = [*([TENSORRT] if tensorrt is not None else []), *PROVIDERS[device.type]]
    there = onnxruntime.get_available_providers()
    if providers[0] not in there:
        raise UserError(
            f"this onnxruntime has no {providers[0]} (it has {', '.join(there)}): pip install onnxruntime-gpu, or use "
            "device cpu"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    # without VNNI, int8 sums of products would saturate at 16 bits: an error of 2 % of a layer; rounding alone has 1 %
    options.add_session_config_entry("session.x64quantprecision", "1")
    of_gpu = {"device_id": device.index or 0}
    own = {TENSORRT: {**of_gpu, **(tensorrt or {})}, "CUDAExecutionProvider": of_gpu}
    settings = [own.get(name, {}) for name in providers]
    # which moves fp8 quantization through transpositions that do not support that type
    disabled = ["QDQPropagationTransformer"]
    with library_errors(lambda reason: f"ONNX Runtime cannot open {path}: {reason}"):
        return onnxruntime.InferenceSession(
            str(path), options, providers=providers, provider_options=settings, disabled_optimizers=disabled
        )
