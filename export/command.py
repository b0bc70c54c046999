"""`megadit export`: a bundle to the same bundle with verified ONNX graphs or TensorRT engines."""

import sys

from megadit.export.build import PRECISIONS, ExportSettings, export_bundle
from megadit.export.to_onnx import DEFAULT_OPSET, OPSETS
from megadit.models.support import CommandParser, run_command


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit export`; returns its exit code."""
    return run_command(_export, sys.argv[1:] if argv is None else argv)


def _export(argv: list[str]) -> None:
    options = vars(_parser().parse_args(argv))
    bundle, out = options.pop("bundle"), options.pop("out")
    options["profiles"] = tuple(options.pop("profile"))
    export_bundle(bundle, out, ExportSettings(**options))
    print(out)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megadit export",
        description="Exports every network of a bundle, and compares each with torch. OUT is a bundle too.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle, or a training directory")
    parser.add_argument("out", metavar="OUT", help="the new bundle; nothing is left here if the export fails")
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
        "--opset", type=int, default=DEFAULT_OPSET, metavar="INT", help=f"{OPSETS[0]} to {OPSETS[-1]} (default: 18)"
    )
    parser.add_argument(
        "--video_steps", type=int, default=10, metavar="INT", help="most steps of the video that is compared"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
