"""`megadit serve ask`: prompts a running service and writes its videos."""

import sys
from dataclasses import fields
from pathlib import Path

from megadit.models.shared.command import CommandParser, run_command
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, write_json
from megadit.models.shared.progress import Progress
from megadit.serve.client import Generation, VideoClient
from megadit.serve.contract import IMAGE_MODEL, MODEL, InvalidRequestError, ServiceError, VideoRequest, VideoResult

_TYPES = {"seed": int, "guidance": float, "num_steps": int, "num_frames": int, "height": int, "width": int}
_TYPES |= {"fps": float, "num_videos": int}
_EXIT_CODE = 1
"""Of a service that failed; mistakes in the request end with 2, as in every command."""


def main(argv: list[str] | None = None) -> int:
    """Asks and writes; the exit code is 1 where the service fails, 2 where the request is wrong."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    suffix = Path(options.output).suffix
    if suffix.lower() not in ("", ".mp4", ".png"):
        raise UserError(f"--output={options.output}: the service makes mp4, and png of one frame; not {suffix}")
    names = [field.name for field in fields(VideoRequest)]
    request = VideoRequest(**{name: value for name, value in vars(options).items() if name in names})
    try:
        client = VideoClient(options.url, model=options.model)
        videos = _watch(client.stream(request, timeout=options.timeout, priority=options.priority))
    except InvalidRequestError as error:
        raise UserError(str(error)) from error
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_CODE
    for video, path in zip(videos, output_paths(options.output, videos), strict=True):
        with atomic_path(path) as temporary:
            temporary.write_bytes(video.data)
        write_json(path.with_suffix(".json"), {"prompt": video.prompt, "seed": video.seed, **video.settings})
        print(path)
    return 0


def _watch(generation: Generation) -> list[VideoResult]:
    """The videos, with a progress bar while they are made; Ctrl-C cancels the request."""
    videos: list[VideoResult] = []
    bar: Progress | None = None
    try:
        for event in generation:
            if isinstance(event, VideoResult):
                videos.append(event)
                continue
            if bar is None:
                bar = Progress(event.num_steps, "sampling").__enter__()
            bar.advance(event.step - bar.completed, sigma=event.sigma)
    finally:
        generation.close()
        if bar is not None:
            bar.__exit__()
    return sorted(videos, key=lambda video: video.index)


def output_paths(output: str, videos: list[VideoResult]) -> list[Path]:
    """`output` itself, or numbered names beside it, with the suffix that fits what was sent."""
    path = Path(output).with_suffix(videos[0].suffix)
    if len(videos) == 1:
        return [path]
    return [path.with_name(f"{path.stem}_{video.index:04d}{path.suffix}") for video in videos]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megadit serve ask",
        description="Asks a running service for videos. What is left out takes the service's default.",
    )
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("-o", "--output", default="video", metavar="PATH", help="file to write (default: video.mp4)")
    parser.add_argument(
        "--url",
        default="localhost",
        help="grpc://HOST:PORT, http://HOST:PORT, or a host: gRPC where it answers, else HTTP (default: localhost)",
    )
    parser.add_argument("--model", default=MODEL, help=f"{MODEL} or {IMAGE_MODEL} (default: {MODEL})")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="1 is served first, then 2 and 3")
    parser.add_argument("--negative_prompt", metavar="TEXT")
    parser.add_argument("--sampler", metavar="NAME")
    for name, kind in _TYPES.items():
        parser.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper())
    return parser
