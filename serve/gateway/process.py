"""The gateway as a process of its own, for a supervisor to keep running."""

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from megadit.models.support import UserError
from megadit.serve.supervise import Ailment, Child

_START_SECONDS = 300
_PROBE_SECONDS = 3.0


class GatewayProcess:
    """A context manager that owns one `megadit serve gateway`."""

    name = "gateway"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        host: str,
        port: int,
        log: Path | None = None,
        stop_seconds: float,
        hang_seconds: float,
    ) -> None:
        """`arguments` are those of `megadit serve gateway`, without address and port."""
        self._arguments, self._host, self._port, self._log = arguments, host, port, log
        self._stop_seconds, self._hang_seconds = stop_seconds, hang_seconds
        self._child: Child | None = None

    @property
    def addresses(self) -> str:
        return f"http://{self._reachable_host()}:{self._port}"

    @property
    def killed_because(self) -> str | None:
        return self._child.killed_because if self._child else None

    def __enter__(self) -> "GatewayProcess":
        command = [sys.executable, "-m", "megadit.serve.cli", "serve", "gateway", *self._arguments]
        command += [f"--host={self._host}", f"--port={self._port}"]
        self._child = Child(command, environment=os.environ, log=self._log)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> int:
        """Waits until it ends, by itself or because it hangs; its exit code."""
        assert self._child is not None
        hangs = Ailment(reason="it answers nothing", patience=self._hang_seconds)
        return self._child.wait(lambda: None if self.is_alive() else hangs)

    def stop(self) -> int | None:
        """Lets it drain, then ends it; its exit code. May be called again."""
        return None if self._child is None else self._child.stop(self._stop_seconds)

    def is_alive(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.addresses}/health/live", timeout=_PROBE_SECONDS) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_alive():
            if not self._child.is_alive():
                raise UserError(f"the gateway ended with code {self._child.exit_code}; see its output")
            if time.monotonic() > deadline:
                raise UserError(f"the gateway did not answer within {_START_SECONDS} s; see its output")
            time.sleep(0.1)

    def _reachable_host(self) -> str:
        return "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
