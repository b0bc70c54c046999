"""The gateway as a process of its own, for a supervisor to keep running."""

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from megadit.serve.supervise import Ailment, OwnedProcess

_START_SECONDS = 300
_PROBE_SECONDS = 3.0


def gateway_process(
    arguments: Sequence[str],
    *,
    host: str,
    port: int,
    log: Path | None = None,
    stop_seconds: float,
    hang_seconds: float,
) -> OwnedProcess:
    """One `megadit serve gateway`; `arguments` are its own, without address and port."""
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    hangs = Ailment(reason="it answers nothing", patience=hang_seconds)
    command = [sys.executable, "-m", "megadit.serve.cli", "serve", "gateway", *arguments]
    return OwnedProcess(
        command=[*command, f"--host={host}", f"--port={port}"],
        name="gateway",
        addresses=url,
        is_ready=lambda: _answers(url),
        ailment=lambda: None if _answers(url) else hangs,
        start_seconds=_START_SECONDS,
        stop_seconds=stop_seconds,
        log=log,
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/live", timeout=_PROBE_SECONDS) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
