"""`megadit export`: copies a bundle, with verified ONNX graphs or TensorRT engines."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megadit.export.build import ExportSettings, check_memory, export_bundle
from megadit.export.engines import add_engines, add_report, find_refittable, prepared_for_engines
from megadit.export.to_tensorrt import EngineSettings
from megadit.infer.runtimes.openvino import load_openvino
from megadit.models.machine import enough_memory
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import remove_leftovers
from megadit.models.shared.folder_lock import FolderLock
from megadit.models.shared.resources import ANYWAY_HELP


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    bundle: str = setting(help="bundle, or training directory", positional=True, metavar="BUNDLE")
    out: str = setting(help="new bundle; not written if the export fails", positional=True, metavar="OUT")
    format: Literal["onnx", "openvino", "tensorrt"] = setting(
        "onnx", "onnx: graphs; openvino: also compared in OpenVINO; tensorrt: also engines (default: onnx)"
    )
    export: ExportSettings = group(ExportSettings)
    calibration_prompts: str | None = setting(
        None, "one prompt a line, sampled to calibrate the ranges of int8 and fp8", metavar="FILE"
    )
    refit: str | None = setting(
        None, "earlier OUT of the same shapes, whose engines are refitted with the new weights", metavar="BUNDLE"
    )
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    engines: EngineSettings = group(EngineSettings, "engines (--format tensorrt)")


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("format", "precision", "profiles", "default", "adapter_rank", "adapter_targets"),
    "graphs": ("opset", "text_encoder", "calibration_prompts", "video_steps", "even_if_too_large"),
    "engines (--format tensorrt)": (
        *("refit", "workspace_gb", "optimization_level", "timing_cache", "refittable"),
        *("version_compatible", "hardware_compatible", "weight_streaming"),
    ),
}
EXAMPLES = (
    "megadit export runs/demo/bundle exported",
    "megadit export bundle exported --precision fp16 --profile frames=1,17,33",
    "megadit export bundle engines --format tensorrt --precision fp16",
)


@command(
    ExportOptions,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit export",
    description="Exports every network of a bundle, and compares each with torch. OUT is a bundle too.",
)
@enough_memory("export for smaller sizes (--profile), or with more memory: it takes twice the network's weights")
def main(options: ExportOptions) -> None:
    """Runs `megadit export`; returns its exit code."""
    settings = replace(options.export, calibration_prompts=_read_prompts(options.calibration_prompts))
    wants_engines, out = options.format == "tensorrt", Path(os.path.realpath(options.out))
    if options.refit is not None and (not wants_engines or options.engines != EngineSettings()):
        raise UserError("--refit keeps the options of the engines: give --format tensorrt and no other engine options")
    before = None if options.refit is None else find_refittable(options.refit)
    if wants_engines:
        settings = prepared_for_engines(settings, options.engines, before)
    if options.format == "openvino":
        load_openvino()
    if not options.even_if_too_large:
        check_memory(options.bundle, settings)
    with FolderLock(options.out, "exports", path=out.with_name(f".{out.name}.lock")):
        remove_leftovers(out)
        export_bundle(options.bundle, options.out, settings)
        try:
            if wants_engines:
                add_engines(Path(options.out), options.engines, before)
            elif options.format == "openvino":
                add_report(Path(options.out), "openvino")
        except UserError as error:
            lacks = "no engines" if wants_engines else "none for OpenVINO"
            raise UserError(f"{options.out} has its ONNX graphs, but {lacks}: {error}") from error
    print(options.out)


def _read_prompts(path: str | None) -> tuple[str, ...]:
    """The lines of a file that are not blank."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibration_prompts {path} cannot be read: {error}") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"--calibration_prompts {path} holds no prompt")
    return tuple(line.strip() for line in lines if line.strip())
