"""A local tritonserver: started, watched and stopped without leaving anything behind.

Triton has no authentication. Its protocols beyond inference need a secret: loading models (which may contain code),
shared memory, and files of traces and logs. Every user of the machine can read a process's arguments: unless models are
to be replaced at run time, the secret is one that no request can contain. Shared memory of Triton and its stubs is
readable only by their user; a private server listens on a socket in a folder of that user.
"""

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.addresses import check_free, free_ports
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_bundle
from megadit.models.shared.resources import check_memory_fits, host_memory
from megadit.serve.launch.triton_binary import TritonBinary, find_triton
from megadit.serve.repository.model_config import parameter_in
from megadit.serve.supervise import SECONDS_TO_ANSWER, Ailment, OwnedProcess, reachable, responds

PORT_FLAGS = {
    "http": "--http_port",
    "grpc": "--grpc_port",
    "metrics": "--metrics_port (of `serve up` --triton_metrics_port)",
}
SHARED_MEMORY = Path("/dev/shm")
NVIDIA = Path("/dev/nvidiactl")
"""Device file of machines with NVIDIA GPUs."""
STOP_SECONDS = 30
"""Seconds for running requests to finish when the server stops.

A Triton that has refused requests because of a full queue takes all of it: it keeps a reference to their model.
"""
START_SECONDS = 600
"""Timeout of loading the models; engines of large networks take minutes."""
HANG_SECONDS = 12.0
"""Seconds without a response after which a server counts as hanging."""
SECRET_HEADER = "megadit-secret"
"""Header of the secret over HTTP; over gRPC the metadata is `triton-grpc-protocol-` and this."""
_RESTRICTED = "model-repository,shared-memory,trace,logging"
"""Triton's names of the protocols that need the secret."""
_NOBODY_S = " No\nbody= \r\n "
"""A header and value that neither HTTP nor gRPC can transmit."""
_SOCKET, _SOCKET_PORT = "grpc", 1
"""Name and port of a private server's socket: Triton appends the port to the address, and compares it with gRPC's,
which is 1 for every Unix socket."""
_LONGEST_SOCKET = 100
"""Most characters of a socket's path."""
OTHERS_HELP = "take --control_secret though other people of this machine could read it in the process list"
_PEOPLE = range(1000, 65_534)
"""User ids of people, not of daemons, by Linux convention."""
_LEAST_SECRET = 32
"""Least characters of a secret."""
_RESPONSES_IN_MEMORY = 256
"""Most waiting responses of a stream; if its client does not read them, the model waits."""
_DEAD_STUB_SECONDS = 2.0
"""Seconds that a stub may be dead: Triton reaps stubs that it ends itself, and fails once one died on its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls) -> "Ports":
        """Three ports that are free at this moment."""
        http, grpc, metrics = free_ports(3)
        return cls(http=http, grpc=grpc, metrics=metrics)

    def check_free(self, host: str, names: Iterable[str] = tuple(PORT_FLAGS)) -> None:
        """Raises UserError if one of them is in use."""
        for name in names:
            check_free(host, getattr(self, name), PORT_FLAGS[name], name)


def check_repository(path: Path) -> None:
    """Raises UserError unless this is a model repository; for a bundle, with the command that builds one."""
    if is_bundle(path):
        raise UserError(
            f"{path} is a bundle; make a model repository of it: `megadit serve build-repository {path} OUT`"
        )
    if not any(path.glob("*/config.pbtxt")):
        what = "is not a model repository" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; `megadit serve build-repository` makes one")


def check_memory(path: str | os.PathLike, models: tuple[str, ...]) -> None:
    """Raises UserError if the weights of the chosen models are far too large for the memory of a machine without
    GPUs."""
    if not NVIDIA.exists():
        needed = sum(map(_weight_bytes, _configs(Path(path), models)))
        check_memory_fits(
            needed, host_memory(), f"what {path} serves", "choose one with --model, or serve fewer --instances"
        )


def _configs(repository: Path, models: tuple[str, ...]) -> list[Path]:
    return [each for each in repository.glob("*/config.pbtxt") if "*" in models or each.parent.name in models]


def _weight_bytes(config: Path) -> float:
    """Bytes that all instances of the model with this config.pbtxt load, from the files of its runtime."""
    text = config.read_text(encoding="utf-8")
    names = {"torch": "*.safetensors", "onnx": "*.onnx*", "openvino": "*.onnx*"}.get(parameter_in(text, "runtime"))
    instances = re.search(r"instance_group \[ \{ count: (\d+)", text)
    stored = sum(file.stat().st_size for file in config.parent.rglob(names)) if names else 0
    is_half = parameter_in(text, "dtype") in ("bfloat16", "float16")  # weights are mostly stored in float32
    return stored * int(instances[1] if instances else 1) / (2 if is_half else 1)


class LocalServer:
    """A context manager that owns one tritonserver (`process`), its stubs, its ports and its shared memory.

    All its regions of shared memory have a unique prefix, by which leftovers of a crash are removed.
    """

    def __init__(
        self,
        repository: str | os.PathLike,
        *,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        models: tuple[str, ...] = ("*",),
        control_secret: str | None = None,
        is_private: bool = False,
        log: Path | None = None,
        stop_seconds: int = STOP_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """Prepare a server; entering the context starts it.

        Args:
            models: loaded at start (an empty tuple: none).
            log: file for the server's output (None: the output of this process).
            control_secret: allows its holder to load and unload models at run time; None: not possible.
            is_private: listens on a Unix socket instead of ports, except for metrics: only processes of the same user
                reach it, over gRPC.
            arguments: passed to tritonserver unchanged.

        Raises:
            UserError: if `repository` is not a directory, lacks one of the models, a port is in use, or there is no
                tritonserver.
        """
        self.repository = Path(repository).absolute()
        check_repository(self.repository)
        self.host = host
        self.ports = ports or Ports.free()
        self._opened = ("metrics",) if is_private else tuple(PORT_FLAGS)
        # before Triton's environment is prepared, which takes a while the first time
        self.ports.check_free(host, self._opened)
        for name in models:
            if name != "*" and not (self.repository / name).is_dir():
                have = ", ".join(sorted(folder.name for folder in self.repository.iterdir()))
                raise UserError(f"{repository} has no model {name!r}, only {have}")
        self._models, self._control_secret, self._arguments = models, control_secret, arguments
        self._log, self._stop_seconds, self._hang_seconds = log, stop_seconds, hang_seconds
        self._prefix = f"megadit_{os.getpid()}_{secrets.token_hex(4)}_"
        self._folder = _short_folder() / self._prefix if is_private else None
        """Folder of a private server's socket."""
        triton = find_triton()
        self.process = OwnedProcess(
            command=self._command(triton),
            name="tritonserver",
            addresses=f"{f'grpc {self.grpc_url}' if is_private else f'http {self.http_url}, grpc {self.grpc_url}'}; "
            f"models: {', '.join(self._model_names())}",
            is_ready=self._is_ready,
            ailment=self._ailment,
            start_seconds=START_SECONDS,
            stop_seconds=stop_seconds + 5,  # after a crash of a stub it can outlive its own time limit
            environment=triton.environment,
            folder="/",  # stubs import from their current folder first, which may hold somebody else's json.py
            log=log,
            prepare=self._prepare,
            clean_up=self._clean_up,
            complaint=self._last_complaint,
        )

    @property
    def http_url(self) -> str:
        return f"{reachable(self.host)}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        if self._folder is not None:
            return f"unix:{self._folder / _SOCKET}:{_SOCKET_PORT}"
        return f"{reachable(self.host)}:{self.ports.grpc}"

    def __enter__(self) -> "LocalServer":
        """Raises UserError if a port is in use, or the server ends (with its last error) or is not ready in time."""
        self.process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def _model_names(self) -> list[str]:
        """Names of the models that are loaded at start."""
        return sorted(path.parent.name for path in _configs(self.repository, self._models))

    def _command(self, triton: TritonBinary) -> list[str]:
        """The command line of the server."""
        secret = _NOBODY_S if self._control_secret is None else f"{SECRET_HEADER}={self._control_secret}"
        python_backend = {"shm-region-prefix-name": self._prefix, "stub-timeout-seconds": START_SECONDS}
        return [
            str(triton.path),
            *triton.arguments,
            *self._model_arguments(),
            f"--http-restricted-api={_RESTRICTED}:{secret}",
            f"--grpc-restricted-protocol={_RESTRICTED}:{secret}",
            *triton.with_its_path(f"--grpc-max-response-pool-size={_RESPONSES_IN_MEMORY}"),
            "--disable-auto-complete-config",
            *self._addresses(),
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self._stop_seconds}",
            *(f"--backend-config=python,{name}={value}" for name, value in python_backend.items()),
            *self._arguments,
        ]

    def _addresses(self) -> list[str]:
        if self._folder is not None:
            return [
                "--allow-http=false",
                f"--grpc-address=unix:{self._folder / _SOCKET}",
                f"--grpc-port={_SOCKET_PORT}",
            ]
        return [
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
        ]

    def _model_arguments(self) -> list[str]:
        if self._control_secret is not None:
            loaded = [f"--load-model={name}" for name in self._models]
            return [f"--model-repository={self.repository}", "--model-control-mode=explicit", *loaded]
        return [f"--model-repository={self._chosen_models or self.repository}", "--model-control-mode=none"]

    @property
    def _chosen_models(self) -> Path | None:
        """A repository of only the chosen models, if some are chosen and none is loaded later."""
        if "*" in self._models or self._control_secret is not None:
            return None
        return Path(tempfile.gettempdir()) / f"{self._prefix}models"

    def _prepare(self) -> None:
        self.ports.check_free(self.host, self._opened)
        self._clean_up()  # after a start that failed
        if self._folder is not None:
            self._folder.mkdir(mode=0o700)
        if self._chosen_models is not None:
            self._chosen_models.mkdir(mode=0o700)
            for name in self._models:
                (self._chosen_models / name).symlink_to(self.repository / name)

    def _is_ready(self) -> bool:
        """Whether the server responds and every requested model is loaded."""
        return self._says("ready")

    def _ailment(self) -> Ailment | None:
        states = _states_of_stubs(self.process.pid)
        if "Z" in states:
            return Ailment(reason="a stub of its Python backend died", patience=_DEAD_STUB_SECONDS)
        if "T" in states:
            return Ailment(reason="a stub of its Python backend stands still", patience=self._hang_seconds)
        if not self._says("live"):
            return Ailment(reason="it answers nothing", patience=self._hang_seconds)
        return None

    def _says(self, state: str) -> bool:
        """Whether it reports that it is `live`, or `ready`, within a short timeout."""
        if self._folder is None:
            return responds(f"http://{self.http_url}/v2/health/{state}")
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        try:
            with InferenceServerClient(self.grpc_url) as client:
                ask = client.is_server_ready if state == "ready" else client.is_server_live
                return ask(client_timeout=SECONDS_TO_ANSWER)
        except InferenceServerException:
            return False

    def _clean_up(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._chosen_models is not None:
            shutil.rmtree(self._chosen_models, ignore_errors=True)
        for region in SHARED_MEMORY.glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)

    def _last_complaint(self) -> str:
        if self._log is None:
            return "see its output above"
        lines = self._log.read_text(errors="replace").splitlines()
        # the error of a model is the cause, later errors of the server are consequences
        signs = ("Poll failed", "failed to load '", "error: ")
        complaint = next((line for sign in signs for line in lines if sign in line), "it said nothing useful")
        message = complaint.partition("\\n\\nAt:")[0].partition("] ")[2] or complaint
        return f"{message.strip()[:500]} (all of it: {self._log})"


def _short_folder() -> Path:
    """Return a folder with a path short enough for a socket."""
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) + len("megadit_0000000_00000000_/grpc:1") < _LONGEST_SOCKET else Path("/tmp")


def control_secret(path: Path | None, *, even_if_others_see_it: bool) -> str | None:
    """The secret of a server that loads models at run time, from a file as `secret_in`; None without a file. Raises
    UserError as `secret_in`, and if other people use this machine, who could read it in the process list."""
    if path is None:
        return None
    others = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            others.add(process.stat().st_uid)
    others = sorted(uid for uid in others - {os.getuid()} if uid in _PEOPLE)
    if others and not even_if_others_see_it:
        raise UserError(
            f"other users of this machine (uid {', '.join(map(str, others[:5]))}) could read the secret in "
            "tritonserver's command line, and run code with it: serve in a container, replace models with "
            "`megadit serve up --drain` instead of --control_secret, or say --even_if_others_see_it"
        )
    return secret_in(path)


def secret_in(path: str | os.PathLike) -> str:
    """The secret in a file; a missing file is created with a new secret, readable only by its owner. Raises UserError
    if the file cannot be read or written, or holds too short a text."""
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{secrets.token_hex(_LEAST_SECRET)}\n")
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot hold a secret: {error}") from error
    if len(text) < _LEAST_SECRET or not text.isalnum():
        raise UserError(
            f"{path} holds no secret of at least {_LEAST_SECRET} letters and digits; remove it for a new one"
        )
    return text


def _states_of_stubs(group: int) -> set[str]:
    """States of the Python backend's processes in a process group, from /proc/PID/stat."""
    states = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, values = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has just ended
        state, _, process_group = values.split()[:3]
        if int(process_group) == group and name.startswith("triton_python"):
            states.add(state)
    return states
