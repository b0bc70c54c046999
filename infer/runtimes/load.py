"""The parts of a bundle under the runtime that a user names."""

from typing import Literal, get_args

import torch

from megadit.infer.guidance import Denoiser
from megadit.infer.runtimes.network_spec import ExportedNetworks
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.errors import UserError, nearest
from megadit.models.text_encoders import TextEncoder
from megadit.models.tokenizers import VideoTokenizer

Runtime = Literal["torch", "onnx", "onnx_tensorrt", "tensorrt"]
"""`onnx_tensorrt` is ONNX Runtime with its TensorRT provider, which builds engines of the graphs as it loads them."""
FOLDERS = {"onnx": "onnx", "onnx_tensorrt": "onnx", "tensorrt": "plan"}


def check_runtime(name: str, *, dtype: str | None = None, compile: bool = False) -> Runtime:
    """The runtime of this name.

    Raises:
        UserError: for an unknown name, or settings that only torch has: an export has a precision of its own.
    """
    if name not in get_args(Runtime):
        near = nearest(name, get_args(Runtime))
        hint = f"did you mean {near!r}?" if near else f"choose one of {', '.join(get_args(Runtime))}"
        raise UserError(f"runtime {name!r} is unknown; {hint}")
    if name != "torch" and compile:
        raise UserError(f"compile is for the torch runtime, not for {name}: leave it out")
    if name != "torch" and dtype not in (None, "float32", "fp32"):
        raise UserError(
            f"dtype {dtype} is for the torch runtime: for {name}, choose the precision when exporting (--precision)"
        )
    return name


def open_exported(bundle: Bundle, runtime: Runtime) -> ExportedNetworks:
    """The exported networks of a bundle.

    Raises:
        UserError: if it has none of this kind, or they are of other weights; names the command that makes them.
    """
    return ExportedNetworks.open(bundle.path / FOLDERS[runtime], weights_checksum(bundle))


def weights_checksum(bundle: Bundle) -> str:
    """What an export remembers of the weights it was made from."""
    return bundle.manifest["files"]["transformer/model.safetensors"]["sha256"]


def load_denoiser(
    bundle: Bundle, runtime: Runtime, *, device: torch.device, dtype: torch.dtype, compile: bool = False
) -> Denoiser:
    """The denoiser of a bundle.

    Raises:
        UserError: if it was not exported for `runtime`, or `runtime` does not run here.
    """
    if runtime in ("onnx", "onnx_tensorrt"):
        from megadit.infer.runtimes.onnx import OnnxDenoiser

        return OnnxDenoiser(open_exported(bundle, runtime), device=device, provider=_provider(runtime))
    if runtime == "tensorrt":
        from megadit.infer.runtimes.tensorrt import TensorRTDenoiser, open_engines

        return TensorRTDenoiser(open_engines(open_exported(bundle, runtime), device))
    dit = bundle.load_dit(device=device, dtype=dtype)
    return TorchDenoiser(dit, device=device, dtype=dtype, compile=compile)


def with_exported_networks(
    tokenizer: VideoTokenizer, bundle: Bundle, runtime: Runtime, device: torch.device
) -> VideoTokenizer:
    """`tokenizer`, its networks under `runtime`."""
    if runtime in ("onnx", "onnx_tensorrt"):
        from megadit.infer.runtimes.onnx import OnnxTokenizer

        exported = open_exported(bundle, runtime)
        return OnnxTokenizer(exported, tokenizer, device=device, provider=_provider(runtime))
    if runtime == "tensorrt":
        from megadit.infer.runtimes.tensorrt import TensorRTTokenizer, open_engines

        return TensorRTTokenizer(open_engines(open_exported(bundle, runtime), device), tokenizer)
    return tokenizer


def with_exported_text_network(
    text_encoder: TextEncoder, bundle: Bundle, runtime: Runtime, device: torch.device
) -> TextEncoder:
    """`text_encoder`, its network under `runtime` where it was exported; loaded when a text is first encoded."""
    exported = None if runtime == "torch" else open_exported(bundle, runtime)
    if exported is None or "text_encoder" not in exported.settings["networks"]:
        return text_encoder
    from megadit.infer.runtimes.text import with_exported_network

    def load():
        if runtime == "tensorrt":
            from megadit.infer.runtimes.tensorrt import open_engines

            return open_engines(exported, device)["text_encoder"]
        from megadit.infer.runtimes.onnx import open_network

        return open_network(exported, "text_encoder", device, _provider(runtime))

    return with_exported_network(text_encoder, load, device)


def _provider(runtime: Runtime) -> str:
    return "TensorrtExecutionProvider" if runtime == "onnx_tensorrt" else ""
