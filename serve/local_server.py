"""A tritonserver of our own: started, watched and stopped so that nothing of it is left behind."""

import os
import secrets
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.serve.supervise import Ailment, OwnedProcess, answers, reachable
from megadit.serve.triton_binary import TritonBinary, find_triton

SHARED_MEMORY = Path("/dev/shm")
STOP_SECONDS = 30
"""How long requests in progress may take to finish when the server is told to stop.

A Triton that has turned requests away for a full queue takes all of it: it keeps a hold on their model.
"""
START_SECONDS = 600
"""How long loading the models may take; engines of large networks take minutes."""
HANG_SECONDS = 12.0
"""How long a server may answer nothing before it counts as hanging."""
_DEAD_STUB_SECONDS = 2.0
"""How long a stub may be dead: Triton buries those that it ends itself, and serves no more once one died on its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls) -> "Ports":
        """Three ports that nobody listens on at this moment."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            http, grpc, metrics = (each.getsockname()[1] for each in sockets)
        return cls(http=http, grpc=grpc, metrics=metrics)

    def check_free(self, host: str) -> None:
        """Raises:
        UserError: if somebody listens on one of them.
        """
        for name in ("http", "grpc", "metrics"):
            port = getattr(self, name)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise UserError(f"{host}:{port} ({name}) cannot be used: {error.strerror}") from error


class LocalServer:
    """A context manager that owns one tritonserver, its stubs, its ports and its shared memory: `process` is its life.

    Every region of shared memory carries a prefix of its own, by which what a crash left is removed.
    """

    def __init__(
        self,
        repository: str | os.PathLike,
        *,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        models: tuple[str, ...] = ("*",),
        log: Path | None = None,
        stop_seconds: int = STOP_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """`models` are loaded at start (none: an empty tuple); `log` takes the server's output (None: our own).

        `arguments` are passed to tritonserver as they are.

        Raises:
            UserError: if `repository` is no directory or there is no tritonserver.
        """
        self.repository = Path(repository).absolute()
        if not self.repository.is_dir():
            raise UserError(f"{repository} is not a model repository; `megadit serve build-repository` makes one")
        self.host = host
        self.ports = ports or Ports.free()
        self._models, self._arguments = models, arguments
        self._log, self._stop_seconds, self._hang_seconds = log, stop_seconds, hang_seconds
        self._prefix = f"megadit_{os.getpid()}_{secrets.token_hex(4)}_"
        triton = find_triton()
        self.process = OwnedProcess(
            command=self._command(triton),
            name="tritonserver",
            addresses=f"http {self.http_url}, grpc {self.grpc_url}",
            is_ready=self._is_ready,
            ailment=self._ailment,
            start_seconds=START_SECONDS,
            stop_seconds=stop_seconds + 5,  # after a crash of a stub it can outlive its own time limit
            environment=triton.environment,
            log=log,
            prepare=lambda: self.ports.check_free(self.host),
            clean_up=self._remove_shared_memory,
            complaint=self._last_complaint,
        )

    @property
    def http_url(self) -> str:
        return f"{reachable(self.host)}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{reachable(self.host)}:{self.ports.grpc}"

    def __enter__(self) -> "LocalServer":
        """Raises:
        UserError: if a port is taken, or the server ends first (tells its last complaint) or is not ready in time.
        """
        self.process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def _command(self, triton: TritonBinary) -> list[str]:
        """The command line of the server."""
        python_backend = {"shm-region-prefix-name": self._prefix, "stub-timeout-seconds": START_SECONDS}
        return [
            str(triton.path),
            *triton.arguments,
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self._models),
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self._stop_seconds}",
            *(f"--backend-config=python,{name}={value}" for name, value in python_backend.items()),
            *self._arguments,
        ]

    def _is_ready(self) -> bool:
        """Whether the server answers and every model that was asked for is loaded."""
        return answers(f"http://{self.http_url}/v2/health/ready")

    def _ailment(self) -> Ailment | None:
        states = _states_of_stubs(self.process.pid)
        if "Z" in states:
            return Ailment(reason="a stub of its Python backend died", patience=_DEAD_STUB_SECONDS)
        if "T" in states:
            return Ailment(reason="a stub of its Python backend stands still", patience=self._hang_seconds)
        if not answers(f"http://{self.http_url}/v2/health/live"):
            return Ailment(reason="it answers nothing", patience=self._hang_seconds)
        return None

    def _remove_shared_memory(self) -> None:
        for region in SHARED_MEMORY.glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)

    def _last_complaint(self) -> str:
        if self._log is None:
            return "see its output above"
        lines = self._log.read_text(errors="replace").splitlines()
        # a model that fails is the cause, what the server says when it ends is the consequence
        for sign in ("Poll failed", "failed to load '", "error: "):
            told = [line for line in lines if sign in line]
            if told:
                break
        message = told[0].partition("\\n\\nAt:")[0].partition("] ")[2] or told[0] if told else "it said nothing useful"
        return f"{message.strip()[:500]} (all of it: {self._log})"


def _states_of_stubs(group: int) -> set[str]:
    """States of the Python backend's processes in a process group, as /proc/PID/stat has them."""
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
