"""`plan/`: the engines of a bundle whose graphs were exported, built on this machine and compared with torch."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megadit.export import verify
from megadit.export.networks import PRECISIONS, build_network
from megadit.export.quantize import FORMATS, round_linears
from megadit.export.to_tensorrt import EngineSettings, Libraries, build_engine, engine_record, load_libraries
from megadit.infer.runtimes.load import open_exported
from megadit.infer.runtimes.network_spec import SETTINGS_FILE, ExportedNetworks
from megadit.models.bundle import Bundle, write_manifest
from megadit.models.support import UserError, atomic_directory, write_json


def add_engines(path: Path, settings: EngineSettings) -> dict[str, Any]:
    """Gives the bundle at `path`, which has `onnx/`, a `plan/`, whole or not at all; gives the report.

    Raises:
        UserError: without TensorRT or a GPU; for a graph that TensorRT does not read; for an engine that differs.
    """
    libraries = load_libraries()
    if not torch.cuda.is_available():
        raise UserError("engines are built and measured on a GPU, and torch sees none")
    bundle = Bundle.open(path)
    graphs = open_exported(bundle, "onnx")
    with atomic_directory(path / "plan") as plan:
        write_engines(graphs, plan, settings, libraries)
    try:
        report = _compare(bundle, open_exported(bundle, "tensorrt"))
    except BaseException:
        shutil.rmtree(path / "plan")  # or engines that differ would be taken for verified ones
        raise
    record = {"settings": graphs.settings["precision"], "report": report}
    write_manifest(path, {**bundle.manifest, "export": {**bundle.manifest["export"], "tensorrt": record}})
    return report


def write_engines(graphs: ExportedNetworks, plan: Path, settings: EngineSettings, libraries: Libraries) -> None:
    """Builds every engine into `plan`, with all that a server needs to know beside them."""
    for name in graphs.settings["networks"]:
        graph = graphs.directory / f"{name}.onnx"
        build_engine(graph, graphs.network(name), settings, plan / f"{name}.plan", libraries)
    gpu = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    engine = engine_record(settings, libraries, gpu)
    write_json(plan / SETTINGS_FILE, {**graphs.settings, "engine": engine})


def _compare(bundle: Bundle, engines: ExportedNetworks) -> dict[str, Any]:
    from megadit.infer.runtimes.tensorrt import open_engines

    opened, tokenizer = open_engines(engines, torch.device("cuda")), bundle.load_tokenizer()
    precision, graphs = engines.settings["precision"], bundle.manifest["export"]["onnx"]
    report = {}
    for name in engines.settings["networks"]:
        of_network = precision if name == "denoiser" else "fp32"
        network, spec = build_network(name, bundle, tokenizer, PRECISIONS[of_network]), engines.network(name)
        if of_network in FORMATS:
            round_linears(network.denoiser.dit, graphs["report"][name]["ranges"], of_network)
        cases = verify.reference_cases(network, spec, bundle)
        report[name] = verify.verify_runtime(opened[name], spec, cases, bundle.config, of_network)
    report["video"] = verify.compare_videos(bundle, precision, graphs["settings"]["video_steps"], "tensorrt")
    return report
