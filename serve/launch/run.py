"""`megadit serve run`: runs a Triton server on a model repository, on this machine or in a container."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadit.models.shared.cli.command import interrupt_at_ending_signals
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import port_setting, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.serve.launch.local_server import (
    OTHERS_HELP,
    LocalServer,
    Ports,
    check_memory,
    check_repository,
    control_secret,
)
from megadit.serve.repository.model_config import PATHS, parameter_in
from megadit.serve.supervise import keep_running, print_on_stderr

IMAGE = "megadit-serve"
"""The image that serve/Dockerfile builds: NVIDIA's container with megadit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    repository: str = setting(
        help="model repository of `megadit serve build-repository`", positional=True, metavar="REPOSITORY"
    )
    models: tuple[str, ...] = setting(
        (), "load only this model; may be repeated", names=("--model",), metavar="NAME", repeated=True
    )
    host: str = setting("127.0.0.1", "address to listen on (default: {default}; 0.0.0.0: all)")
    http_port: int = port_setting(8000, "HTTP port of Triton (default: {default})")
    grpc_port: int = port_setting(8001, "gRPC port of Triton (default: {default})")
    metrics_port: int = port_setting(8002, "port of Triton's metrics (default: {default})")
    control_secret: Path | None = setting(
        None, "allow models to be replaced at run time with the secret in this file, made if missing (default: never)"
    )
    even_if_others_see_it: bool = setting(False, OTHERS_HELP)
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    docker: Literal["print", "run"] | None = setting(
        None, "print, or run, the command of the production container instead"
    )
    image: str = setting(IMAGE, "image for --docker; serve/Dockerfile builds it (default: {default})")
    gpus: str = setting("all", "GPUs for --docker: all, none, or a list (default: {default})")


@command(RunOptions, is_run=True, prog="megadit serve run", description=__doc__)
def main(options: RunOptions) -> int:
    """Runs the server until a signal to end; returns the exit code."""
    ports = Ports(http=options.http_port, grpc=options.grpc_port, metrics=options.metrics_port)
    models = options.models or ("*",)
    if options.docker:
        if options.control_secret is not None:
            raise UserError(
                "--control_secret is for a server on this machine; with --docker add it to the container's own command"
            )
        command = docker_command(
            options.repository, ports, host=options.host, models=models, image=options.image, gpus=options.gpus
        )
        print(shlex.join(command), flush=True)
        if options.docker == "run":
            os.execvp(command[0], command)
        return 0
    if not options.even_if_too_large:
        check_memory(options.repository, models)
    secret = control_secret(options.control_secret, even_if_others_see_it=options.even_if_others_see_it)
    server = LocalServer(options.repository, host=options.host, ports=ports, models=models, control_secret=secret)
    interrupt_at_ending_signals()
    try:
        return keep_running(server.process, report=print_on_stderr)
    except KeyboardInterrupt:
        return 0  # a signal is the normal end of a server


def docker_command(
    repository: str | Path,
    ports: Ports,
    *,
    host: str = "127.0.0.1",
    models: tuple[str, ...] = ("*",),
    image: str = IMAGE,
    gpus: str = "all",
) -> list[str]:
    """The production command: NVIDIA's container, with shared memory for videos, and a restart policy.

    `host` is the address of this machine on which its ports are published.

    Raises:
        UserError: if `repository` is not a directory.
    """
    path = Path(repository).absolute()
    check_repository(path)
    inside = Ports()
    published = [f"{host}:{getattr(ports, name)}:{getattr(inside, name)}" for name in ("http", "grpc", "metrics")]
    return [
        *("docker", "run", "--detach", "--restart=on-failure", "--init"),
        *(["--gpus", gpus] if gpus != "none" else []),
        "--shm-size=1g",  # the default of 64 MB is soon full, and never shrinks
        *(word for port in published for word in ("--publish", port)),
        *("--volume", f"{path}:/models:ro"),
        *(word for other in _others(path) for word in ("--volume", f"{other}:{other}:ro")),
        image,
        *("megadit", "serve", "run", "/models", "--host", "0.0.0.0"),
        *(f"--model={name}" for name in models if name != "*"),
    ]


def _others(repository: Path) -> list[str]:
    """Files and folders outside of a repository from which its models read."""
    configs = [config.read_text(encoding="utf-8") for config in sorted(repository.glob("*/config.pbtxt"))]
    found = (parameter_in(config, key) for config in configs for key in PATHS)
    return [path for path in dict.fromkeys(found) if path]
