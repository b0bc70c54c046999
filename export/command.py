"""`megadit export`: a bundle to the same bundle with verified ONNX graphs or TensorRT engines."""

import sys
from dataclasses import fields
from pathlib import Path

from megadit.export.build import ExportSettings, export_bundle
from megadit.export.engines import add_engines, find_refittable
from megadit.export.networks import PRECISIONS
from megadit.export.to_onnx import DEFAULT_OPSET, EIGHT_BIT_OPSET, OPSETS
from megadit.export.to_tensorrt import EngineSettings
from megadit.models.shared.command import CommandParser, run_command
from megadit.models.shared.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit export`; returns its exit code."""
    return run_command(_export, sys.argv[1:] if argv is None else argv)


def _export(argv: list[str]) -> None:
    options = vars(_parser().parse_args(argv))
    bundle, out = options.pop("bundle"), options.pop("out")
    options["profiles"] = tuple(options.pop("profile"))
    options["calibration_prompts"] = _read_prompts(options["calibration_prompts"])
    options["text_encoder"] = not options.pop("no_text_encoder")
    wanted = options.pop("format")
    engines = EngineSettings(**{field.name: options.pop(field.name) for field in fields(EngineSettings)})
    refit = options.pop("refit")
    if refit is not None and (wanted != "tensorrt" or engines != EngineSettings()):
        raise UserError("--refit takes engines as they were built: give --format tensorrt and no other engine options")
    before = None if refit is None else find_refittable(refit)
    export_bundle(bundle, out, ExportSettings(**options))
    if wanted == "tensorrt":
        try:
            add_engines(Path(out), engines, before)
        except UserError as error:
            raise UserError(f"{out} has its ONNX graphs, but no engines: {error}") from error
    print(out)


def _read_prompts(path: str | None) -> tuple[str, ...]:
    """The lines of a file that hold something."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibration_prompts {path} cannot be read: {error}") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"--calibration_prompts {path} holds no prompt")
    return tuple(line.strip() for line in lines if line.strip())


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megadit export",
        description="Exports every network of a bundle, and compares each with torch. OUT is a bundle too.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle, or a training directory")
    parser.add_argument("out", metavar="OUT", help="the new bundle; nothing is left here if the export fails")
    parser.add_argument(
        "--format", choices=("onnx", "tensorrt"), default="onnx", help="tensorrt adds engines (default: onnx)"
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar="NAME",
        help=f"of the denoiser: {', '.join(PRECISIONS)} (default: fp32)",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="NAME=MIN,OPT,MAX",
        help="sizes to export for, of batch, frames, height, width (of the video) or text (tokens); repeat for each",
    )
    parser.add_argument(
        "--opset",
        type=int,
        metavar="INT",
        help=f"{', '.join(map(str, OPSETS))} (default: {DEFAULT_OPSET}, and {EIGHT_BIT_OPSET} for 8 bits)",
    )
    parser.add_argument(
        "--calibration_prompts", metavar="FILE", help="one prompt a line, sampled to learn the ranges of int8 and fp8"
    )
    parser.add_argument("--no_text_encoder", action="store_true", help="leave the text encoder in torch")
    parser.add_argument(
        "--video_steps", type=int, default=10, metavar="INT", help="most steps of the video that is compared"
    )
    engine = parser.add_argument_group("engines (--format tensorrt)")
    engine.add_argument("--workspace_gb", type=float, metavar="NUMBER", help="memory that one layer may use")
    engine.add_argument(
        "--optimization_level", type=int, default=3, metavar="INT", help="0, built quickly, to 5, running fast"
    )
    engine.add_argument("--timing_cache", metavar="PATH", help="measurements to build faster with the next time")
    engine.add_argument("--refittable", action="store_true", help="weights can be exchanged without a new build")
    engine.add_argument(
        "--refit", metavar="BUNDLE", help="an earlier OUT of the same shapes: takes its engines, with the new weights"
    )
    engine.add_argument("--version_compatible", action="store_true", help="newer versions of TensorRT load them")
    engine.add_argument("--hardware_compatible", action="store_true", help="other GPUs, Ampere and newer, load them")
    engine.add_argument("--weight_streaming", action="store_true", help="weights may stay in the host's memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
