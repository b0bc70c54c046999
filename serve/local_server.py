"""A tritonserver of our own: started, watched and stopped so that nothing of it is left behind."""

import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megadit.models.support import UserError
from megadit.serve.supervise import Ailment, Child
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
_PROBE_SECONDS = 3.0
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
    """A context manager that owns one tritonserver, its stubs, its ports and its shared memory.

    The server runs in a process group of its own, is stopped when the thread that entered ends for whatever reason
    (so enter it in a thread that stays), and every region of shared memory carries a prefix of its own, by which what a
    crash left is removed.
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
        self._models, self._log, self._arguments = models, log, arguments
        self._stop_seconds, self._hang_seconds = stop_seconds, hang_seconds
        self._triton = find_triton()
        self._prefix = f"megadit_{os.getpid()}_{secrets.token_hex(4)}_"
        self._child: Child | None = None

    name = "tritonserver"

    @property
    def addresses(self) -> str:
        return f"http {self.http_url}, grpc {self.grpc_url}"

    @property
    def killed_because(self) -> str | None:
        return self._child.killed_because if self._child else None

    @property
    def http_url(self) -> str:
        return f"{self._reachable_host()}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable_host()}:{self.ports.grpc}"

    @property
    def process_group(self) -> int:
        assert self._child is not None
        return self._child.pid

    def __enter__(self) -> "LocalServer":
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process; see `wait_until_ready`.

        Raises:
            UserError: if a port is taken.
        """
        self.ports.check_free(self.host)
        self._child = Child(self.command(self._triton), environment=self._triton.environment, log=self._log)

    def command(self, triton: TritonBinary) -> list[str]:
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

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def is_ready(self) -> bool:
        """Whether the server answers and every model that was asked for is loaded."""
        return self._answers("/v2/health/ready")

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}{path}", timeout=_PROBE_SECONDS) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_until_ready(self, timeout: float = START_SECONDS) -> None:
        """Raises:
        UserError: if the server ends first (tells its last complaint), or is not ready in time.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if not self.is_alive():
                raise UserError(f"tritonserver ended with code {self._child.exit_code}: {self._last_complaint()}")
            if time.monotonic() > deadline:
                raise UserError(f"tritonserver was not ready within {timeout:.0f} s: {self._last_complaint()}")
            time.sleep(0.05)

    def wait(self) -> int:
        """Waits until the server ends, by itself or because it hangs or lost a stub; its exit code."""
        assert self._child is not None
        return self._child.wait(self._ailment)

    def _ailment(self) -> Ailment | None:
        states = _states_of_stubs(self.process_group)
        if "Z" in states:
            return Ailment(reason="a stub of its Python backend died", patience=_DEAD_STUB_SECONDS)
        if "T" in states:
            return Ailment(reason="a stub of its Python backend stands still", patience=self._hang_seconds)
        if not self._answers("/v2/health/live"):
            return Ailment(reason="it answers nothing", patience=self._hang_seconds)
        return None

    def stop(self) -> int | None:
        """Lets requests in progress finish, then ends everything; the server's exit code. May be called again."""
        if self._child is None:
            return None
        try:
            return self._child.stop(self._stop_seconds + 5)  # after a crash of a stub it can outlive its own time limit
        finally:
            self._remove_shared_memory()

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

    def _reachable_host(self) -> str:
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host


def _states_of_stubs(group: int) -> set[str]:
    """States of the Python backend's processes in a process group, as /proc/PID/stat has them."""
    states = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, values = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has just ended
        state, _, process_group = values.split()[:3]
        if int(process_group) == group and name.startswith("triton_python"):
            states.add(state)
    return states
