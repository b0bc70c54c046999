"""What the service adds to `generate`: the same videos, both ways, in turn.

    python tests/benchmarks/service.py runs/demo/bundle

Two measures: the extra time until the client holds the encoded video, beside generating and encoding it in a process
of its own; and videos a second of many clients at once, beside one after the other.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SERVED, SamplingSettings
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    bundle: str = setting(positional=True, metavar="BUNDLE")
    rounds: int = setting(15, "of each measurement (default: {default})", metavar="N")


def _run(argv: list[str]) -> None:
    prog = "python tests/benchmarks/service.py"
    options = read_options(ServiceOptions, argv, prog=prog, description=__doc__.partition("\n")[0])
    requests = _requests(Bundle.open(options.bundle).defaults)
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(options.bundle, Path(folder) / "models", scheduling=Scheduling(device="cpu"))
        with LocalServer(repository, log=Path(folder) / "log") as server:
            urls = {"gRPC": f"grpc://{server.grpc_url}", "HTTP": f"http://{server.http_url}"}
            clients = {name: VideoClient(url) for name, url in urls.items()}
            print("| video | generate | " + " | ".join(f"{name}, extra" for name in clients) + " |")
            print("|---" * (2 + len(clients)) + "|")
            with get_context("spawn").Pool(1, _load, [options.bundle]) as generator:
                for name, request in requests.items():
                    _compare(name, request, generator, clients, options.rounds)
            _many(clients["gRPC"], requests["default"])


def _requests(defaults: SamplingSettings) -> dict[str, VideoRequest]:
    default = VideoRequest(prompt="a red seven moving left").filled(defaults.to_dict())
    return {
        "default": default,
        "50 steps": replace(default, num_steps=50),
        "33 frames, 50 steps": replace(default, num_frames=33, num_steps=50),
    }


def _load(bundle: str) -> None:
    """Prepares the process that generates without a service."""
    global _pipeline
    _pipeline = TextToVideo.from_pretrained(bundle, device="cpu")


def _generate(request: VideoRequest) -> float:
    """Seconds until the encoded video is there, in that process."""
    began = time.perf_counter()
    settings = {setting: getattr(request, setting) for setting in SERVED}
    (video,) = _pipeline([request.prompt], seeds=request.seed, **settings)
    encode_mp4(video.video, video.settings.fps)
    return time.perf_counter() - began


def _ask(client: VideoClient, request: VideoRequest) -> float:
    """Seconds until a client holds it."""
    began = time.perf_counter()
    client.generate(request)
    return time.perf_counter() - began


def _compare(name: str, request: VideoRequest, generator: Pool, clients: dict[str, VideoClient], rounds: int) -> None:
    """Prints the least seconds that each way takes; they alternate, and other work on the machine only adds to them."""
    variants: dict[str, Callable[[], float]] = {"generate": lambda: generator.apply(_generate, [request])}
    variants |= {variant: lambda client=client: _ask(client, request) for variant, client in clients.items()}
    seconds = [{variant: measure() for variant, measure in variants.items()} for _ in range(rounds + 1)]
    least = {
        variant: 1000 * min(each[variant] for each in seconds[1:]) for variant in variants
    }  # the first round warms up
    extra = [f"{least[variant] - least['generate']:+.0f} ms" for variant in clients]
    print(f"| {name} | {least['generate']:.0f} ms | {' | '.join(extra)} |", flush=True)


def _many(client: VideoClient, request: VideoRequest, count: int = 40) -> None:
    requests = [replace(request, seed=seed) for seed in range(count)]
    for clients in (1, 8):
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            videos = list(threads.map(client.generate, requests))
        seconds = time.perf_counter() - began
        shared = statistics.mean(video.batch_size for (video,) in videos)
        print(f"\n{clients} at once: {count / seconds:.1f} videos/s, batches of {shared:.1f} on average")


if __name__ == "__main__":
    raise SystemExit(main())
