"""The gateway as a supervised process."""

from collections.abc import Sequence
from pathlib import Path

from megadit.models.shared.cli.signals import python_module
from megadit.serve.supervise import Ailment, OwnedProcess, reachable, responds

_START_SECONDS = 300


def gateway_process(
    arguments: Sequence[str],
    *,
    host: str,
    port: int,
    log: Path | None = None,
    stop_seconds: float,
    hang_seconds: float,
) -> OwnedProcess:
    """One `megadit serve gateway`; `arguments` are its options, without address and port."""
    url = f"http://{reachable(host)}:{port}"
    hangs = Ailment(reason="it answers nothing", patience=hang_seconds)
    command = python_module("megadit.models.shared.cli.verbs", "serve", "gateway", *arguments)

    def is_alive() -> bool:
        return responds(f"{url}/health/live")

    return OwnedProcess(
        command=[*command, f"--host={host}", f"--port={port}"],
        name="gateway",
        addresses=url,
        ready="answers, and makes videos once tritonserver is ready",
        is_ready=is_alive,
        ailment=lambda: None if is_alive() else hangs,
        start_seconds=_START_SECONDS,
        stop_seconds=stop_seconds,
        log=log,
    )
