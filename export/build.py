"""Exports a bundle: a copy with an ONNX graph of every network, verified against torch."""

import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import torch

from megadit.export import signatures as contract
from megadit.export import to_onnx, verify
from megadit.export.compared import check_compared, compared_defaults, fitted_defaults
from megadit.export.graph_checks import where_it_runs
from megadit.export.layers import weight_hashes
from megadit.export.networks import PRECISIONS, build_network, comparable
from megadit.export.quantize import FORMATS, calibrate, quantise
from megadit.export.references import reference_cases, usual_prompt
from megadit.infer.runtimes.load import EXPORTED, weights_checksum
from megadit.infer.runtimes.network_spec import DENOISERS, SETTINGS_FILE, SETTINGS_VERSION, NetworkSpec
from megadit.infer.sampling.resolve import DefaultOptions, with_changed_defaults
from megadit.models.bundle import Bundle, check_transformer, open_any_bundle
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.machine import free_memory
from megadit.models.shared.cli.setting import check_settings, group, setting
from megadit.models.shared.errors import UserError, not_written
from megadit.models.shared.files import MANIFEST_FILE, atomic_directory, check_replaceable, write_json, write_manifest
from megadit.models.shared.outside import check_own
from megadit.models.shared.resources import check_memory_fits
from megadit.models.storage.components import network_shapes
from megadit.models.text_encoders import NetworkTextEncoder, TextEncoder
from megadit.models.tokenizers import VideoTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    opset: int | None = setting(
        None,
        f"ONNX opset: {', '.join(map(str, to_onnx.OPSETS))} (default: {to_onnx.DEFAULT_OPSET}; int8 and fp8: "
        f"{to_onnx.EIGHT_BIT_OPSET})",
    )
    precision: str = setting(
        "fp32",
        f"precision of the denoiser: {', '.join(PRECISIONS)} (default: fp32)",
        choices=tuple(PRECISIONS),
        metavar="NAME",
    )
    """Precision of the denoiser's network; scalings, decoder and encoders are float32."""
    text_encoder: bool = setting(True, "do not export the text encoder: run it in torch")
    """Export it too, if it has a network and its files are on this machine."""
    calibration_prompts: tuple[str, ...] = ()
    """Prompts for sampling videos that calibrate int8 and fp8 ranges; empty: the prompt of the comparison."""
    profiles: tuple[str, ...] = setting(
        (),
        "sizes to export for, of batch, frames, height, width (of the video) or text (tokens); repeat for each",
        names=("--profile",),
        metavar="NAME=MIN,OPT,MAX",
        repeated=True,
    )
    adapter_rank: int | None = setting(
        None, "maximum total rank of a request's adapters, which are inputs of the denoiser (default: none)", low=1
    )
    adapter_targets: tuple[str, ...] = setting(
        (),
        "targets of these adapters, as in train.adapter.targets (default: attention and MLPs)",
        nargs="+",
        metavar="NAME",
    )
    defaults: DefaultOptions = group(DefaultOptions)
    video_steps: int = setting(10, "maximum sampling steps of the comparison video (default: {default})", low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        to_onnx.check_opset(self.graph_opset)
        if self.graph_opset < self._least_opset:
            raise UserError(f"precision {self.precision} needs opset {self._least_opset} or newer, not {self.opset}")
        if self.calibration_prompts and self.precision not in FORMATS:
            raise UserError(f"calibration prompts are for {' and '.join(FORMATS)}, not for {self.precision}")
        if self.adapter_targets and self.adapter_rank is None:
            raise UserError("--adapter_targets needs --adapter_rank")

    @property
    def graph_opset(self) -> int:
        return self._least_opset if self.opset is None else self.opset

    def adapter_inputs(self, config: NetworkConfig) -> AdapterInputs | None:
        """The adapter inputs of a network; None without them."""
        if self.adapter_rank is None:
            return None
        return AdapterInputs(config=config, rank=self.adapter_rank, targets=self.adapter_targets)

    def precision_of(self, network: str) -> str:
        """Precision of a network: float32 for decoders and encoders, which run once, not in every step."""
        return self.precision if network in DENOISERS else "fp32"

    @property
    def _least_opset(self) -> int:
        return to_onnx.EIGHT_BIT_OPSET if self.precision in FORMATS else to_onnx.DEFAULT_OPSET


def export_bundle(source: str | Path, out: str | Path, settings: ExportSettings | None = None) -> dict[str, Any]:
    """Writes `out`, whole or not at all, and returns the report of the comparison, which its megadit.json contains.
    Raises UserError if the source is no bundle, its network cannot be exported, sizes are unsupported or the disk is
    full; if an exported network differs from torch, with the layer."""
    settings = settings or ExportSettings()
    bundle, out = with_changed_defaults(open_any_bundle(source), settings.defaults.default), Path(out)
    _check_network(bundle, settings)
    _check_place(bundle, out)
    verify.check_runtime()
    tokenizer = bundle.load_tokenizer()
    profiles = _profiles(bundle, tokenizer, settings)
    specs = _specs(bundle, tokenizer, settings, profiles)
    if bundle.kind == "video":
        defaults, note = fitted_defaults(bundle, profiles)
        if note:
            _say(note)
        manifest = bundle.manifest | {"defaults": defaults.to_dict()}
        bundle = replace(bundle, defaults=compared_defaults(bundle, profiles, tokenizer), manifest=manifest)
    try:
        with atomic_directory(out) as directory:
            return _write(directory, bundle, tokenizer, specs, settings)
    except OSError as error:
        raise not_written(out, _first(error)) from error


def check_memory(source: str | Path, settings: ExportSettings) -> None:
    """Raises UserError for a network whose weights, in torch and as a graph, far exceed this machine's memory."""
    bundle = with_changed_defaults(open_any_bundle(source), settings.defaults.default)
    size = PRECISIONS[settings.precision].itemsize
    needed = 2 * size * sum(map(prod, network_shapes(bundle.config).values()))
    remedy = "export it where there is more, or with --precision fp16"
    check_memory_fits(needed, free_memory(torch.device("cpu")), f"the export of {source}", remedy)
    if bundle.kind == "video":
        tokenizer = bundle.load_tokenizer()
        profiles = _profiles(bundle, tokenizer, settings)
        check_compared(bundle, compared_defaults(bundle, profiles, tokenizer), tokenizer)


def _profiles(bundle: Bundle, tokenizer: VideoTokenizer, settings: ExportSettings) -> contract.Profiles:
    defaults = contract.default_profiles(bundle, tokenizer, bundle.load_text_encoder())
    return contract.parse_profiles(settings.profiles, defaults)


def _specs(
    bundle: Bundle, tokenizer: VideoTokenizer, settings: ExportSettings, profiles: contract.Profiles
) -> dict[str, NetworkSpec]:
    """Specifications of the networks to export."""
    text_encoder = bundle.load_text_encoder()
    if bundle.kind != "video":
        return contract.embedding_specs(profiles, bundle, tokenizer)
    exported, slots = _exported_text_encoder(text_encoder, settings), settings.adapter_inputs(bundle.config)
    denoisers = DENOISERS[: len(bundle.networks)]
    extra = {"conditionings": bundle.conditionings, "image_encoder": bundle.load_image_encoder()}
    return contract.specs(profiles, bundle.config, tokenizer, exported, **extra, slots=slots, denoisers=denoisers)


def _first(error: OSError) -> OSError:
    """The error itself; for a copied tree, that of its first file, from (from, to, "[Errno 28] what: ...")."""
    if not isinstance(error, shutil.Error):
        return error
    _, _, reason = error.args[0][0]
    number = reason.removeprefix("[Errno ").partition("]")[0]
    return OSError(int(number), os.strerror(int(number))) if number.isdecimal() else OSError(reason)


def _exported_text_encoder(text_encoder: TextEncoder, settings: ExportSettings) -> TextEncoder | None:
    if not (settings.text_encoder and isinstance(text_encoder, NetworkTextEncoder)):
        return None
    try:
        _say(f"the text encoder is that of {', '.join(map(str, text_encoder.directories))}")
    except UserError as error:
        _say(f"the text encoder is not exported: {error}")
        return None
    return text_encoder


def _check_network(bundle: Bundle, settings: ExportSettings) -> None:
    if settings.precision in FORMATS:
        check_transformer(bundle, f"{settings.precision} is for products of blocks; take fp16")
    if bundle.kind != "video" and (settings.precision != "fp32" or settings.adapter_rank is not None):
        raise UserError(f"a {bundle.kind} is exported in float32, without adapter inputs: leave out these options")


def _check_place(bundle: Bundle, out: Path) -> None:
    check_replaceable(out)
    if out.exists() and out.resolve() == bundle.path.resolve():
        raise UserError(f"{out} is the bundle to export: give another OUT")
    check_own(bundle.path)


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Names in a bundle that are written again, not copied."""
    return [name for name in names if name in (MANIFEST_FILE, *(runtime.folder for runtime in EXPORTED.values()))]


def _write(
    directory: Path, bundle: Bundle, tokenizer: VideoTokenizer, specs: dict[str, NetworkSpec], settings: ExportSettings
) -> dict[str, Any]:
    shutil.copytree(bundle.path, directory, ignore=_not_copied, dirs_exist_ok=True)
    onnx = directory / "onnx"
    onnx.mkdir()
    report: dict[str, Any] = {}
    for name, spec in specs.items():
        _say(f"{name}: exporting")
        report[name] = export_network(name, bundle, tokenizer, spec, onnx / f"{name}.onnx", settings)
        _say(f"{name}: {verify.summary(report[name])}")
        if note := where_it_runs(name, report[name].get("opened_by", {})):
            _say(note)
    write_json(onnx / SETTINGS_FILE, _onnx_settings(bundle, specs, settings))
    write_manifest(directory, bundle.manifest)
    if bundle.kind == "video":
        _say("comparing a whole video")
        written = replace(Bundle.open(directory), defaults=bundle.defaults)
        report["video"] = verify.compare_videos(written, settings.precision, settings.video_steps)
        _say(f"video: {report['video']['psnr']:.1f} dB")
    record = {"settings": asdict(settings), "report": report}
    write_manifest(directory, {**bundle.manifest, "export": {"onnx": record}})
    return report


def export_network(
    name: str, bundle: Bundle, tokenizer: VideoTokenizer, spec: NetworkSpec, path: Path, settings: ExportSettings
) -> dict[str, Any]:
    """Exports one network and compares it; torch's copy is freed before ONNX Runtime loads the graph."""
    inputs, precision = contract.sample_inputs(spec, contract.trace_sizes(spec)), settings.precision_of(name)
    slots = settings.adapter_inputs(bundle.config)
    network = build_network(name, bundle, tokenizer, PRECISIONS[precision], slots)
    about = {"megadit_version": metadata.version("megadit"), "source": weights_checksum(bundle)}
    to_onnx.export_onnx(network, spec, inputs, path, opset=settings.graph_opset, metadata=about)
    ranges, unrounded = {}, []
    if precision in FORMATS:
        _say(f"{name}: calibrating the ranges of its activations")
        ranges = calibrate(bundle, settings.calibration_prompts or (usual_prompt(bundle),), name)
        quantise(path, ranges, precision)
        unrounded = reference_cases(network, spec, bundle, slots)
    weights = weight_hashes(network)
    cases = reference_cases(comparable(network, precision, ranges), spec, bundle, slots)
    levels = verify.sampled_levels(name, bundle)
    rounding = verify.check_rounding(unrounded, cases, precision, levels) if ranges else {}
    del network
    to_onnx.collect_after(path)  # reference cycles of traced programs would keep weights mapped

    def rebuild():
        return comparable(build_network(name, bundle, tokenizer, PRECISIONS[precision], slots), precision, ranges)

    return verify.verify_network(path, spec, cases, bundle.config, precision, weights, rebuild, ranges) | rounding


def _onnx_settings(bundle: Bundle, specs: dict[str, NetworkSpec], settings: ExportSettings) -> dict[str, Any]:
    slots = settings.adapter_inputs(bundle.config)
    return {
        "format_version": SETTINGS_VERSION,
        "source": weights_checksum(bundle),
        "precision": settings.precision,
        "opset": settings.graph_opset,
        "torch": torch.__version__,
        "defaults": bundle.defaults.to_dict(),
        "text_encoder": bundle.manifest["components"]["text_encoder"],
        "networks": {name: spec.to_dict() for name, spec in specs.items()},
        "adapters": None if slots is None else slots.to_dict(),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
