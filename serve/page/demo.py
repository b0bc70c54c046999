"""`megadit serve demo`: a web page to try prompts, as a client of the service.

If no service runs, one is started on the bundle of `make demo`, and stopped with the page.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.addresses import check_free
from megadit.models.shared.cli.command import interrupt_at_ending_signals
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import port_setting, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_key
from megadit.serve.client import VideoClient
from megadit.serve.events import ServiceError, UnavailableError
from megadit.serve.gateway.client import GATEWAY, GatewayClient
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.page.studio import Client, Studio
from megadit.serve.repository.build import build_repository

DEMO_BUNDLE = "runs/demo/bundle"
"""Bundle of `make demo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    url: str | None = setting(
        None, "address of the service: grpc://HOST:PORT, http://HOST:PORT or HOST (default: localhost)"
    )
    bundle: str | None = setting(
        None, f"start a service on this bundle (default, if none runs: {DEMO_BUNDLE})", metavar="PATH"
    )
    student: tuple[str, ...] = setting(
        (), "a student of --bundle, as another variant; repeat for several", repeated=True, metavar="PATH"
    )
    key_file: Path | None = setting(
        None, f"file with the key of a gateway (--url, default: {GATEWAY}) for the page to use"
    )
    """Not the key itself, which would be visible in the process list."""
    host: str = setting("127.0.0.1", "address of the page (default: {default}; 0.0.0.0: all)")
    port: int = port_setting(7860, "port of the page (default: {default})")


@command(PageOptions, is_run=True, prog="megadit serve demo", description=__doc__)
def main(options: PageOptions) -> int:
    """Serves the page until a signal to end; returns the exit code."""
    check_free(options.host, options.port, "--port")
    interrupt_at_ending_signals()
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    with ExitStack() as stack:
        client = stack.enter_context(_client(options))
        from megadit.serve.page.layout import show  # gradio takes seconds to import: errors are reported first

        try:
            show(Studio(client), host=options.host, port=options.port)
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
        except ServiceError as error:
            raise UserError(str(error)) from error
    return 0


def _client(options: PageOptions) -> AbstractContextManager[Client]:
    """A client of a gateway if there is a key, else of a service."""
    key_file = options.key_file
    if options.student and options.bundle is None:
        raise UserError("--student needs its teacher: give that as --bundle")
    if key_file is None:
        return service(options.url, options.bundle, options.student)
    if options.bundle is not None:
        raise UserError("--key_file is for a gateway, and --bundle starts a service without one; give one of them")
    try:
        return nullcontext(GatewayClient(options.url or GATEWAY, read_key(key_file)))
    except UnavailableError as error:
        raise UserError(str(error)) from error


@contextmanager
def service(url: str | None, bundle: str | None, students: Sequence[str] = ()) -> Iterator[VideoClient]:
    """A client of the service at `url`; if that is None and none runs here, of a new one with `students`. Raises
    UserError if there is neither a service nor a bundle to start one on."""
    if bundle is None:
        try:
            yield VideoClient(url or "localhost")
            return
        except UnavailableError as error:
            if url is not None:
                raise UserError(str(error)) from error
    path = bundle or DEMO_BUNDLE
    if not Path(path).exists():
        raise UserError(
            f"no service runs here and {path} does not exist: `make demo` makes it, or give --bundle or --url"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megadit_demo_")))
        repository = build_repository(path, folder / "repository", students=students)
        print(f"starting a service on {path}", file=sys.stderr, flush=True)
        server = stack.enter_context(
            LocalServer(repository, is_private=True, log=folder / "triton.log", stop_seconds=5)
        )
        yield VideoClient(server.grpc_url)
