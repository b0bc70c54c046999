"""`megadit serve ask`: sends a prompt to a running service and writes its videos."""

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megadit.models.diffusion.conditioning_settings import CONDITIONING, MEDIA, ConditioningOptions, split_keyframe
from megadit.models.shared.cli.options import command, with_rest
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, read_key, record_path, write_json
from megadit.models.shared.progress import Progress
from megadit.serve.client import Generation, VideoClient
from megadit.serve.contract import IMAGE_MODEL, MODEL, VideoRequest
from megadit.serve.events import InvalidRequestError, ServiceError, UnavailableError, VideoResult
from megadit.serve.gateway.client import GATEWAY, GatewayClient

_EXIT_CODE = 1
"""Exit code for a service failure; errors in the request end with 2, as in every command."""
_PAUSE = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AskOptions:
    """The options of the command."""

    output: Path = setting(Path("video"), "file to write (default: video.mp4)", names=("-o", "--output"))
    url: str | None = setting(
        None, "grpc://HOST:PORT, http://HOST:PORT, or a host: gRPC if it responds, else HTTP (default: localhost)"
    )
    key_file: Path | None = setting(
        None, f"file with the key of a gateway (--url, default: {GATEWAY}), to use instead of Triton"
    )
    model: str = setting(MODEL, f"{MODEL} or {IMAGE_MODEL} (default: {MODEL})")
    timeout: float | None = setting(None, "give up after this many seconds", metavar="S")
    patience: float = setting(
        300.0, "seconds to retry a service that became unreachable (default: {default})", low=0, metavar="S"
    )
    priority: int = setting(0, "priority of the request: 1 is served first, then 2 and 3", metavar="N")
    request: VideoRequest = group(VideoRequest)
    conditioning: ConditioningOptions = group(ConditioningOptions, "conditioning of the video")


_GROUPS = {
    "most used": ("output", "url", "model", "num_steps", "guidance", "seed", "num_videos"),
    "size and length": ("num_frames", "height", "width", "fps"),
    "sampling": ("sampler", "negative_prompt", "eta", "image_guidance", "adapters", "evaluate"),
    "conditioning: images and videos": tuple(CONDITIONING),
    "the request": ("timeout", "priority", "key_file", "patience"),
}
GROUPS = with_rest(_GROUPS, "sampling", VideoRequest)
EXAMPLES = (
    'megadit serve ask "a red seven moving left" --output seven.mp4',
    'megadit serve ask "waves" --url http://HOST:8000 --image first.png --num_videos 2',
)


@command(
    AskOptions,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit serve ask",
    description="Requests videos from a running service. Options left out take the service's defaults.",
)
def main(options: AskOptions) -> int:
    """Sends the request and writes the videos; the exit code is 1 if the service fails, 2 for an invalid request."""
    suffix = options.output.suffix
    if suffix.lower() not in ("", ".mp4", ".png"):
        raise UserError(f"--output={options.output}: the service makes mp4, and png of one frame; not {suffix}")
    request = replace(options.request, **conditioning_values(options.conditioning))
    if not (request.prompt or request.instruction):
        raise UserError('say what the video shows: megadit serve ask "a red seven"; or give a video and an instruction')
    try:
        videos = _videos(options, request)
    except InvalidRequestError as error:
        raise UserError(str(error)) from error
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_CODE
    for video, path in zip(videos, output_paths(options.output, videos), strict=True):
        with atomic_path(path) as temporary:
            temporary.write_bytes(video.data)
        scores = {} if video.scores is None else {"scores": video.scores}
        write_json(record_path(path), {"prompt": video.prompt, "seed": video.seed, **video.settings, **scores})
        print(path, *(f"{name}={score:g}" for name, score in (video.scores or {}).items()))
    return 0


def _videos(options: AskOptions, request: VideoRequest) -> list[VideoResult]:
    """Stream the videos of a gateway, or of Triton, which stores no jobs: if it becomes unreachable, ask again."""
    if options.key_file is not None:
        if options.timeout is not None or options.priority:
            raise UserError("--timeout and --priority are for requests to Triton; leave them out with --key_file")
        key = read_key(options.key_file)
        gateway = GatewayClient(options.url or GATEWAY, key, model=options.model, patience=options.patience)
        return _made(gateway, request, gateway.stream(request))
    client = VideoClient(options.url or "localhost", model=options.model)
    begun, gone_since = time.monotonic(), None
    ends = math.inf if options.timeout is None else begun + options.timeout
    while True:
        left = None if options.timeout is None else ends - time.monotonic()
        try:
            return _made(client, request, client.stream(request, timeout=left, priority=options.priority))
        except UnavailableError as error:
            if gone_since is None:
                gone_since = time.monotonic()
                print(f"{error}; asking again for {options.patience:g} s", file=sys.stderr, flush=True)
            if time.monotonic() + _PAUSE > min(ends, gone_since + options.patience):
                raise
        time.sleep(_PAUSE)


def conditioning_values(options: ConditioningOptions) -> dict[str, Any]:
    """Return the conditioning options as fields of a request: files as their bytes. Raises UserError for files that
    cannot be read."""
    values = {name: value for name, value in asdict(options).items() if value not in (None, "", ())}
    for name in values.keys() & set(MEDIA):
        values[name] = tuple(map(_keyframe, values[name])) if name == "keyframe" else _read(name, values[name])
    return values


def _keyframe(text: str) -> bytes:
    number, path = split_keyframe(text)
    return b"%d:%b" % (number, _read("keyframe", path))


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"--{name}={path} cannot be read: {error}") from error


def _made(client: VideoClient | GatewayClient, request: VideoRequest, generation: Generation) -> list[VideoResult]:
    """Return the videos, after a warning of what may be wrong with the request."""
    if warning := client.info().warning(request):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return _watch(generation)


def _watch(generation: Generation) -> list[VideoResult]:
    """The videos, with a progress bar meanwhile; Ctrl-C cancels the request."""
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


def output_paths(output: Path, videos: list[VideoResult]) -> list[Path]:
    """`output` itself, or numbered names next to it, with the suffix of the received type."""
    path = output.with_suffix(videos[0].suffix)
    if len(videos) == 1:
        return [path]
    return [path.with_name(f"{path.stem}_{video.index:04d}{path.suffix}") for video in videos]
