"""How much faster many downloads at once are than one after the other, from a slow server on this machine.

    python tests/benchmarks/downloads.py [--files 240] [--seconds 0.3] [--requests 64]

Every file is 20 kB and comes after so many seconds; both ways leave the same bytes.
"""

import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.train.data.ingest.sources.download import Downloads, download_all

NUM_BYTES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    files: int = setting(240, "to download (default: {default})", low=1)
    seconds: float = setting(0.3, "that the server takes for each (default: {default})", low=0)
    requests: int = setting(64, "at once, beside one after the other (default: {default})", low=1)


class AnnotationCache(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(self.server.seconds)
        content = self.path.encode().ljust(NUM_BYTES, b".")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    seconds = 0.0


def fetch(url: str, folder: Path, files: int, requests: int) -> float:
    """Seconds until all are there."""
    wanted = {folder / f"{number:04d}": f"{url}/{number}" for number in range(files)}
    folder.mkdir()
    start = time.perf_counter()
    reasons = download_all(wanted, Downloads(requests=requests, private_addresses=True))
    seconds = time.perf_counter() - start
    assert not reasons, reasons
    return seconds


def _run(argv: list[str]) -> None:
    options = read_options(Options, argv, prog="downloads.py", description=__doc__.partition("\n")[0])
    with Server(("127.0.0.1", 0), AnnotationCache) as server, tempfile.TemporaryDirectory() as root:
        server.seconds = options.seconds
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, folders = f"http://127.0.0.1:{server.server_port}", [Path(root) / "many", Path(root) / "one"]
        many, one = (
            fetch(url, folder, options.files, n) for folder, n in zip(folders, (options.requests, 1), strict=True)
        )
        contents = [[path.read_bytes() for path in sorted(folder.iterdir())] for folder in folders]
        assert contents[0] == contents[1] and len(contents[0]) == options.files
        server.shutdown()
    print(f"{options.files} files of {options.seconds} s: one after the other {one:.2f} s, {options.requests} at once "
          f"{many:.2f} s: {one / many:.1f} times faster")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run_command(_run, sys.argv[1:]))
