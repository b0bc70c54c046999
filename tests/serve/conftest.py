import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megadit.models.shared.errors import UserError
from tests.bundles import DEFAULTS, write_able_bundle, write_tiny_bundle
from tests.infer.conftest import make_adapter


@pytest.fixture(scope="session")
def bundle_dir(tmp_path_factory):
    """A tiny random bundle: latents of 4x4x4 pixels, tokens of 2x2 latents; every tensor random."""
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    return write_tiny_bundle(path, defaults=replace(DEFAULTS, num_steps=4), training={"step": 7}).path


@pytest.fixture(scope="session")
def pipeline(bundle_dir):
    from megadit.infer.pipeline.pipeline import TextToVideo

    return TextToVideo.from_pretrained(bundle_dir, device="cpu")


@pytest.fixture(scope="session")
def able_dir(bundle_dir, tmp_path_factory):
    """The tiny bundle as if it had been trained to be given parts of every kind."""
    out = tmp_path_factory.mktemp("able") / "bundle"
    write_able_bundle(bundle_dir, out)
    return out


@pytest.fixture(scope="session")
def able(able_dir):
    from megadit.infer.pipeline.pipeline import TextToVideo

    return TextToVideo.from_pretrained(able_dir, device="cpu")


@pytest.fixture(scope="session")
def able_server(tritonserver, able_dir, tmp_path_factory):
    """One tritonserver of that bundle, under torch."""
    from megadit.serve.launch.local_server import LocalServer
    from megadit.serve.repository.build import build_repository
    from megadit.serve.repository.model_config import Scheduling

    folder = tmp_path_factory.mktemp("able_models")
    repository = build_repository(able_dir, folder / "repository", scheduling=Scheduling(device="cpu"))
    with LocalServer(repository, log=folder / "triton.log", stop_seconds=3) as running:
        yield running


@pytest.fixture(scope="session")
def tritonserver():
    """Skips, with the reason, where no tritonserver can be started; nothing is tested against a stand-in."""
    from megadit.serve.launch.triton_binary import find_triton

    if shutil.which("tritonserver") is None and importlib.util.find_spec("pytriton") is None:
        pytest.skip("no tritonserver: neither the vendor's nor nvidia-pytriton's")
    try:
        find_triton()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def adapter_dir(bundle_dir, tmp_path_factory):
    """A folder of a service: one adapter as a folder, two as files."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", bundle_dir, 1)
    make_adapter(folder / "two.safetensors", bundle_dir, 2, kind="dora", rank=3)
    make_adapter(folder / "three.safetensors", bundle_dir, 3, patterns=("blocks.*self_attention.[qkv]",))
    return folder


@pytest.fixture(scope="session")
def repository(bundle_dir, adapter_dir, tmp_path_factory):
    """A repository with room for requests that take a while."""
    from megadit.serve.repository.build import build_repository
    from megadit.serve.repository.model_config import Scheduling

    return build_repository(
        bundle_dir,
        tmp_path_factory.mktemp("models") / "repository",
        scheduling=Scheduling(device="cpu", max_queue_size=48),
        with_images=True,
        limits={"max_work": 16 * 24 * 5 * 5000},
        adapters=adapter_dir,
    )


@pytest.fixture(scope="session")
def kept_running():
    """`with kept_running(server)`: a server that is started again when it dies, as `serve run` does it.

    Triton 2.51 may crash when a client leaves while it is answered, or when it continues after a stop.
    """
    from megadit.serve.supervise import keep_running

    @contextlib.contextmanager
    def keep(server):
        is_ready, stopping = threading.Event(), threading.Event()

        def report(message: str) -> None:
            print(message)
            if "is ready" in message:
                is_ready.set()
            else:
                is_ready.clear()

        def wait_until_ready() -> None:
            while not (is_ready.wait(0.1) and server.process.is_alive()):
                assert thread.is_alive(), "it did not start"

        thread = threading.Thread(
            target=keep_running, args=[server.process], kwargs={"report": report, "stopping": stopping}
        )
        thread.start()
        try:
            wait_until_ready()
            _KEPT[server] = wait_until_ready
            yield server
        finally:
            _KEPT.pop(server, None)
            stopping.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGCONT)
            while thread.is_alive():
                server.process.stop()
                thread.join(0.1)

    return keep


_SECONDS_TO_CRASH = 2.0
"""Its connections break so long before it ends."""
_KEPT: dict = {}
"""For each running server of `kept_running` what waits until it serves."""


@pytest.fixture(autouse=True)
def kept_servers_are_ready():
    """A crash in one test fails no other."""
    for wait_until_ready in _KEPT.values():
        wait_until_ready()


def once_more_after_a_crash(test):
    """Repeats a test that failed because Triton, its fixture `server`, crashed: 2.51 may when a client leaves."""

    @functools.wraps(test)
    def repeated(*, server, **fixtures):
        for _ in range(3):
            process = server.process.pid
            try:
                return test(server=server, **fixtures)
            except Exception:
                if not _has_ended(server, process):
                    raise
                _KEPT[server]()
        return test(server=server, **fixtures)

    return repeated


def _has_ended(server, process: int) -> bool:
    """Whether a server's process is another one, or ends within a moment."""
    deadline = time.monotonic() + _SECONDS_TO_CRASH
    while server.process.pid == process and server.process.is_alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="session")
def traces():
    """A collector, to which `server` sends what it records of traced requests."""
    from .collector import collecting

    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(tritonserver, repository, kept_running, traces, tmp_path_factory):
    """One tritonserver for every test that does not stop it."""
    from megadit.serve.launch.local_server import LocalServer

    log = tmp_path_factory.mktemp("log") / "triton.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        local_server = LocalServer(repository, log=log, stop_seconds=3, hang_seconds=1e6)
    with kept_running(local_server) as running:
        yield running


@pytest.fixture(scope="session")
def in_group():
    """in_group(number): the processes of a process group."""

    def members(group: int) -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                    found.append(int(stat.parent.name))
        return found

    return members


@pytest.fixture(scope="module")
def chromium():
    """A browser; not for longer, because its event loop leaves no room for others in this thread."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
