"""Other runtimes for the graphs of an exported bundle: TensorRT engines (`plan/`), and OpenVINO; each is compared with
torch."""

import shutil
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megadit.export import verify
from megadit.export.build import ExportSettings
from megadit.export.networks import PRECISIONS, build_network
from megadit.export.operators import reads_attention
from megadit.export.quantize import FORMATS, round_linears
from megadit.export.references import reference_cases
from megadit.export.to_onnx import ATTENTION_OPSET
from megadit.export.to_tensorrt import (
    EngineSettings,
    Libraries,
    build_engine,
    check_refittable,
    engine_record,
    load_libraries,
    refit_engine,
)
from megadit.infer.runtimes.exported import Networks
from megadit.infer.runtimes.load import EXPORTED, adapter_inputs, open_exported
from megadit.infer.runtimes.network_spec import SETTINGS_FILE, ExportedNetworks
from megadit.infer.runtimes.tensorrt import check_engine, open_engines
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, write_json, write_manifest


def find_refittable(path: str | Path) -> ExportedNetworks:
    """The refittable engines of an earlier export. Raises UserError if there are none."""
    before = open_exported(open_bundle(path), "tensorrt")
    if not before.settings["engine"]["refittable"]:
        raise UserError(f"the engines of {path} cannot be refitted: they were built without --refittable")
    return before


def prepared_for_engines(
    settings: ExportSettings, engines: EngineSettings, before: ExportedNetworks | None
) -> ExportSettings:
    """The settings of graphs for this machine's TensorRT. If they leave the opset open, it is that of the engines to be
    refitted, or the one with an attention operator if TensorRT reads that. Raises UserError for engines that TensorRT
    would build incorrectly, before anything is exported."""
    try:
        version = metadata.version("tensorrt")
    except metadata.PackageNotFoundError:  # reported after the graphs are written, which another machine can use
        return settings
    check_refittable(engines, version)
    if settings.opset is not None:
        return settings
    if before is not None:
        return replace(settings, opset=before.settings["opset"])
    is_eight_bits = settings.precision in FORMATS
    return replace(settings, opset=ATTENTION_OPSET) if reads_attention(version) and not is_eight_bits else settings


def add_engines(path: Path, settings: EngineSettings, before: ExportedNetworks | None = None) -> dict[str, Any]:
    """Adds `plan/` to the bundle at `path`, which has `onnx/`, whole or not at all, and returns the report.

    Engines are built as `settings` say, or are those of `before` with this bundle's weights.

    Raises:
        UserError: without TensorRT or a GPU; if TensorRT does not read a graph; if an engine differs from torch.
    """
    bundle, libraries = Bundle.open(path), load_libraries()
    if not torch.cuda.is_available():
        raise UserError("engines are built and measured on a GPU, and torch sees none")
    graphs = open_exported(bundle, "onnx")
    with atomic_directory(path / "plan") as plan:
        if before is None:
            write_engines(graphs, plan, settings, libraries)
        else:
            refit_engines(graphs, plan, before, libraries)
    record: dict[str, Any] = {"settings": graphs.settings["precision"]}
    manifest = {**bundle.manifest, "export": {**bundle.manifest["export"], "tensorrt": record}}
    compared = replace(bundle, manifest=manifest)  # engines on disk without a report are not opened
    try:
        opened = open_engines(open_exported(compared, "tensorrt"), torch.device("cuda"))
        record["report"] = compare_under("tensorrt", compared, opened)
    except BaseException:
        shutil.rmtree(path / "plan")
        raise
    write_manifest(path, manifest)
    return record["report"]


def write_engines(graphs: ExportedNetworks, plan: Path, settings: EngineSettings, libraries: Libraries) -> None:
    """Builds every engine into `plan`, with the files that a server needs."""
    for name in graphs.settings["networks"]:
        graph = graphs.directory / f"{name}.onnx"
        build_engine(graph, graphs.network(name), settings, plan / f"{name}.plan", libraries)
    engine = engine_record(settings, libraries, _gpu())
    write_json(plan / SETTINGS_FILE, {**graphs.settings, "engine": engine})


def refit_engines(graphs: ExportedNetworks, plan: Path, before: ExportedNetworks, libraries: Libraries) -> None:
    """Writes the engines of an earlier export into `plan`, with the weights of these graphs. Raises UserError if they
    are for another machine, or for other networks, sizes or number types."""
    check_engine(before, libraries.trt.__version__, *_gpu())
    for what in ("precision", "opset", "networks", "adapters"):
        if before.settings.get(what) != graphs.settings.get(what):
            raise UserError(
                f"the engines of {before.directory} are of other {what}: export with their options, or without --refit"
            )
    record = before.settings["engine"]
    for name in graphs.settings["networks"]:
        files = (before.directory / f"{name}.plan", graphs.directory / f"{name}.onnx", plan / f"{name}.plan")
        refit_engine(*files, libraries.trt, host_code=record["version_compatible"])
    write_json(plan / SETTINGS_FILE, {**graphs.settings, "engine": record})


def _gpu() -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def compare_under(runtime: str, bundle: Bundle, opened: Networks) -> dict[str, Any]:
    """The report of the networks that `runtime` opened, and of a whole video. Raises UserError if one differs from
    torch's by more than its precision allows."""
    exported, tokenizer = open_exported(bundle, runtime), bundle.load_tokenizer()
    graphs = bundle.manifest["export"]["onnx"]
    precision, slots = exported.settings["precision"], adapter_inputs(bundle, runtime)
    report, compared = {}, graphs["report"].get("video", {})
    size = {name: compared[name] for name in ("num_frames", "height", "width") if name in compared}
    bundle = replace(bundle, defaults=replace(bundle.defaults, **size))
    for name in exported.settings["networks"]:
        spec = exported.network(name)
        of_network = precision if spec.is_denoiser else "fp32"
        network = build_network(name, bundle, tokenizer, PRECISIONS[of_network], slots)
        if of_network in FORMATS:
            round_linears(network.denoiser.dit, graphs["report"][name]["ranges"], of_network)
        cases = reference_cases(network, spec, bundle, slots)
        report[name] = verify.verify_runtime(runtime, opened[name], spec, cases, bundle.config, of_network)
        print(f"{name} under {runtime}: {verify.summary(report[name])}", file=sys.stderr, flush=True)
    if bundle.kind == "video":
        report["video"] = verify.compare_videos(bundle, precision, graphs["settings"]["video_steps"], runtime)
    return report


def add_report(path: Path, runtime: str) -> None:
    """Compares the graphs of the bundle at `path` under `runtime` on the CPU, and adds the report to its megadit.json.
    Raises UserError if `runtime` is missing, does not read a graph, or differs from torch."""
    bundle, record = Bundle.open(path), {}
    compared = replace(bundle, manifest={**bundle.manifest, "export": {**bundle.manifest["export"], runtime: record}})
    opened = EXPORTED[runtime].open(open_exported(compared, runtime), torch.device("cpu"))
    record["report"] = compare_under(runtime, compared, opened)
    write_manifest(path, compared.manifest)
