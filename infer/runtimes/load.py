"""Loads the networks of a bundle for a runtime: a table with one row for each runtime except torch. High-noise and
low-noise experts are one denoiser (Wan 2.2).

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megadit.infer.runtimes.cuda_graphs import RecordedDenoiser
from megadit.infer.runtimes.distributed import DevicePlacement, DistributedDenoiser
from megadit.infer.runtimes.exported import ExportedDenoiser, ExportedTokenizer, Networks, with_exported_network
from megadit.infer.runtimes.network_spec import DENOISERS, ExportedNetworks
from megadit.infer.runtimes.offloaded import load_offloaded_dit
from megadit.infer.runtimes.options import AUTO, TORCH, RuntimeOptions
from megadit.infer.runtimes.shared_torch import load_shared_denoiser
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.sampling.guidance import Denoiser
from megadit.models.bundle import Bundle, check_transformer, open_bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.ops.crossover import tune_for_cpu
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.storage.components import load_config, load_network
from megadit.models.text_encoders import TextEncoder
from megadit.models.text_encoders.base import on_device
from megadit.models.tokenizers import VideoTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedRuntime:
    """A runtime for networks that `megadit export` wrote."""

    folder: str
    """Folder of a bundle that holds them."""
    format: str = "onnx"
    """The `--format` that writes them, and compares them with torch under this runtime."""
    open: Callable[[ExportedNetworks, torch.device], Networks]
    """Opens them on a device; raises UserError if this runtime cannot run there."""


def _open_onnx(exported: ExportedNetworks, device: torch.device) -> Networks:
    from megadit.infer.runtimes.onnx import OnnxNetworks

    return OnnxNetworks(exported, device)


def _open_onnx_tensorrt(exported: ExportedNetworks, device: torch.device) -> Networks:
    """ONNX Runtime with its TensorRT provider, which builds engines when it loads the graphs."""
    from megadit.infer.runtimes.onnx import TENSORRT, OnnxNetworks

    return OnnxNetworks(exported, device, TENSORRT)


def _open_openvino(exported: ExportedNetworks, device: torch.device) -> Networks:
    from megadit.infer.runtimes.openvino import OpenVinoNetworks

    return OpenVinoNetworks(exported, device)


def _open_tensorrt(exported: ExportedNetworks, device: torch.device) -> Networks:
    from megadit.infer.runtimes.tensorrt import open_engines

    return open_engines(exported, device)


EXPORTED: dict[str, ExportedRuntime] = {
    "onnx": ExportedRuntime(folder="onnx", open=_open_onnx),
    "onnx_tensorrt": ExportedRuntime(folder="onnx", open=_open_onnx_tensorrt),
    "openvino": ExportedRuntime(folder="onnx", format="openvino", open=_open_openvino),
    "tensorrt": ExportedRuntime(folder="plan", format="tensorrt", open=_open_tensorrt),
}
"""Name of a runtime -> its `ExportedRuntime`; `torch` needs no export."""


def check_runtime(options: RuntimeOptions, *, num_ranks: int = 1, device: torch.device | None = None) -> None:
    """Raises UserError for an unknown runtime, options that only torch has (an export has its own precision), and
    options that need the whole network on one rank."""
    name = options.name
    choose_one(name, (TORCH, *EXPORTED), f"runtime {name!r} is unknown")
    if name != TORCH and options.compile:
        raise UserError(f"compile is for the torch runtime, not for {name}: leave it out")
    if name != TORCH and options.dtype not in (None, AUTO, "float32", "fp32"):
        raise UserError(
            f"dtype {options.dtype} is for the torch runtime: for {name}, choose the precision when exporting "
            "(--precision)"
        )
    is_whole = name == TORCH and num_ranks == 1
    if options.cuda_graphs and not (is_whole and device is not None and device.type == "cuda"):
        raise UserError("cuda_graphs needs a GPU with the whole of torch's network: leave it out")
    if options.resident_blocks and (not is_whole or options.compile or options.cuda_graphs):
        raise UserError("resident_blocks needs the torch runtime on one rank, neither compiled nor recorded")


def open_exported(bundle: Bundle, runtime: str) -> ExportedNetworks:
    """Open the description of a bundle's exported networks: their inputs, outputs and files.

    Raises:
        UserError: if it has none of this kind, they were made from other weights, or the export was killed before it
            verified them; the message names the command that makes them.
    """
    row = EXPORTED[runtime]
    command = f"`megadit export {bundle.path} OUT --format {row.format}`"
    exported = ExportedNetworks.open(bundle.path / row.folder, weights_checksum(bundle), command)
    if row.format != "onnx" and row.format not in bundle.manifest.get("export", {}):
        raise UserError(f"{exported.directory} was never compared with torch under {runtime}: run {command}")
    return exported


def taken(bundle: Bundle, runtime: str) -> tuple[str, ...]:
    """Conditionings that the network supports: those it was trained with, if it was exported with inputs for them."""
    if runtime == TORCH:
        return bundle.conditionings
    names = {tensor.name for tensor in open_exported(bundle, runtime).network("denoiser").inputs}
    return bundle.conditionings if "clean" in names else ()


def adapter_inputs(bundle: Bundle, runtime: str) -> AdapterInputs | None:
    """Adapter inputs that a bundle's denoiser was exported with; None if it has none.

    Raises:
        UserError: if it was not exported for `runtime`.
    """
    about = open_exported(bundle, runtime).settings.get("adapters")
    return None if about is None else AdapterInputs.from_dict(about, bundle.config)


def weights_checksum(bundle: Bundle) -> str:
    """Checksum of the weights that an export was made from: the SHA-256 of each network."""
    files = bundle.manifest["files"]
    return " ".join(files[f"{network}/model.safetensors"]["sha256"] for network in bundle.networks)


def load_denoiser(
    bundle: Bundle,
    options: RuntimeOptions,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: DevicePlacement | None = None,
) -> Denoiser:
    """Load the denoiser of a bundle, with options that passed `check_runtime`.

    With `ranks`, these processes hold the weights instead of this one.

    Raises:
        UserError: if it was not exported for the runtime, this does not run here, or ranks cannot share it.
    """
    if ranks is not None:
        distributed = DistributedDenoiser(bundle, ranks, options, device=device, dtype=dtype)
        return as_one([distributed] * len(bundle.networks), bundle.boundary)
    if not options.is_torch:
        networks, slots = _open(bundle, options.name, device), adapter_inputs(bundle, options.name)
        names = DENOISERS[: len(bundle.networks)]
        return as_one([ExportedDenoiser(networks, slots, name) for name in names], bundle.boundary)
    if options.cuda_graphs or options.resident_blocks is not None or options.num_ranks > 1:
        check_transformer(bundle, "it does not support CUDA graphs, block offloading and several ranks")
    if device.type == "cpu":
        tune_for_cpu()
    sizes = {"tensor": options.tensor_parallel, "context": options.context_parallel}
    shared = {"device": device, "dtype": dtype, "compile": options.compile}

    def of_torch(part: str) -> Denoiser:
        directory, resident = bundle.path / part, options.resident_blocks
        if options.num_ranks > 1:
            return load_shared_denoiser(directory, **sizes, **shared)
        if resident is None or resident + 1 >= load_config(directory).num_layers:
            dit = load_network(directory, device=device, dtype=dtype)
        else:
            dit = load_offloaded_dit(directory, device=device, dtype=dtype, resident=resident)
        denoiser = TorchDenoiser(dit, **shared)
        return RecordedDenoiser(denoiser, device) if options.cuda_graphs else denoiser

    return as_one(list(map(of_torch, bundle.networks)), bundle.boundary)


def with_exported_networks(
    tokenizer: VideoTokenizer, bundle: Bundle, runtime: str, device: torch.device
) -> VideoTokenizer:
    """`tokenizer`, with its networks under `runtime` if they were exported."""
    if runtime == TORCH or "video_decoder" not in (exported := open_exported(bundle, runtime)).settings["networks"]:
        return tokenizer
    return ExportedTokenizer(_open(bundle, runtime, device), tokenizer, exported.network("video_encoder").axes)


def with_exported_text_network(
    text_encoder: TextEncoder, bundle: Bundle, runtime: str, device: torch.device
) -> TextEncoder:
    """`text_encoder` on `device`, with its network under `runtime` if it was exported; loaded when a text is first
    encoded."""
    text_encoder = on_device(text_encoder, device)
    if runtime == TORCH or "text_encoder" not in open_exported(bundle, runtime).settings["networks"]:
        return text_encoder
    return with_exported_network(text_encoder, lambda: _open(bundle, runtime, device), device)


def load_text_encoder(bundle: Bundle, runtime: str, device: torch.device) -> TextEncoder:
    """A bundle's text encoder, as `with_exported_text_network` places it."""
    return with_exported_text_network(bundle.load_text_encoder(), bundle, runtime, device)


def _open(bundle: Bundle, runtime: str, device: torch.device) -> Networks:
    return EXPORTED[runtime].open(open_exported(bundle, runtime), device)


def most_videos_at_once(bundle: Bundle, runtime: str) -> int | None:
    """Return the batch size in videos that a bundle's networks were exported for; None: any number.

    Guidance takes two rows of the denoiser for each video (conditional, unconditional), unless that is
    guidance-distilled.

    Raises:
        UserError: if the bundle was not exported for `runtime`.
    """
    if runtime == TORCH:
        return None
    check_runtime(RuntimeOptions(runtime=runtime))
    rows = open_exported(bundle, runtime).network("denoiser").axes["batch"].max
    return rows if bundle.config.guidance_embedding_range is not None else max(1, rows // 2)


def as_one(denoisers: Sequence[Denoiser], boundary: float | None) -> Denoiser:
    """Denoiser of a bundle's networks: one, or two experts for noise levels above and below `Bundle.boundary`."""
    return denoisers[0] if boundary is None else ExpertDenoiser(*denoisers, boundary)


def experts_of(denoiser: Denoiser) -> tuple[Denoiser, ...]:
    """The denoisers of its networks: one, or two experts."""
    return (denoiser.high, denoiser.low) if isinstance(denoiser, ExpertDenoiser) else (denoiser,)


def check_low_guidance(denoiser: Denoiser, settings: SamplingSettings) -> None:
    """Raises UserError for a scale of the low-noise expert where there is one network."""
    if settings.low_guidance and not isinstance(denoiser, ExpertDenoiser):
        raise UserError(
            f"low_guidance={settings.low_guidance} is for checkpoints of a high-noise and a low-noise expert; this has "
            "one network"
        )


class ExpertDenoiser:
    """D(x; sigma) by the expert of the noise level, which all videos of a batch share."""

    def __init__(self, high: Denoiser, low: Denoiser, boundary: float) -> None:
        """`boundary` is the lowest sigma of `high`."""
        self.high, self.low, self.boundary = high, low, boundary
        self._attached: dict[str, tuple[Denoiser, ...]] = {}
        """Adapter's name -> the denoisers whose networks have it."""

    @property
    def dtype(self) -> torch.dtype:
        return self.high.dtype

    def load_adapter(
        self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig, *, expert: str | None = None
    ) -> None:
        """Attach an adapter to `expert` ("high" or "low"), or to both.

        Raises:
            UserError: for one that does not fit the networks.
        """
        if self.high is self.low:  # each rank has both, and chooses between them as this does
            self._attached[name] = (self.high,)
            self.high.load_adapter(name, state, adapter, expert=expert)
            return
        self._attached[name] = {"high": (self.high,), "low": (self.low,)}.get(expert, (self.high, self.low))
        for denoiser in self._attached[name]:
            denoiser.load_adapter(name, state, adapter)

    def remove_adapter(self, name: str) -> None:
        """Detach an adapter."""
        for denoiser in self._attached.pop(name):
            denoiser.remove_adapter(name)

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0, BCTHW, float32."""
        denoiser = self.high if sigma_B[0].item() >= self.boundary else self.low
        return denoiser(x_BCTHW, sigma_B, conditioning)


# --- weaker checkpoints, for autoguidance ----------------------------------------------------------------------


def autoguidance_bundle(path: str, bundle: Bundle) -> Bundle:
    """The bundle of a weaker checkpoint for autoguidance.

    Raises:
        UserError: if there is none, or its latents or text features are not those of `bundle`.
    """
    weaker = open_bundle(path)
    for part, fingerprint in bundle.manifest["fingerprints"].items():
        if weaker.manifest["fingerprints"][part] != fingerprint:
            name = part.replace("_", " ")
            raise UserError(
                f"autoguidance={path} has another {name} than {bundle.path}: use a checkpoint with the same"
            )
    return weaker


@dataclass
class WeakerDenoisers:
    """Loads denoisers of weaker checkpoints for autoguidance; the last one stays in memory."""

    bundle: Bundle
    load: Callable[[Bundle], Denoiser]
    _cached: dict[str, Denoiser] = field(default_factory=dict)

    def __call__(self, path: str) -> Denoiser:
        """Raises UserError: as `autoguidance_bundle`."""
        if path not in self._cached:
            self._cached = {path: self.load(autoguidance_bundle(path, self.bundle))}
        return self._cached[path]


def no_autoguidance_denoiser(path: str) -> Denoiser:
    """Raises UserError: the pipeline opens no path."""
    raise UserError(f"autoguidance={path}: this pipeline cannot load a second checkpoint")
