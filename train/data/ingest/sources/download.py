"""Concurrent downloads from untrusted http(s) addresses, with deadlines, size limits, and reasons of failures.

Bytes are streamed to the disk; a file gets its name only when it is complete.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from megadit.models.shared.addresses import guard, is_public
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.files import atomic_path
from megadit.train.data.ingest.sources.http_retries import FailedError, ask, chunks, exchange_all

MAX_BYTES = 1 << 28
SILENCE = 30.0
"""Seconds without a byte after which an attempt is given up."""
MAX_REDIRECTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """Limits of downloads of addresses in tables; none changes the contents of a complete download."""

    requests: int = setting(
        64, "downloads of a rank at once (default: {default})", low=1, high=1024, names=("--downloads",)
    )
    seconds: float = setting(
        300.0, "seconds for a file with all attempts (default: {default})", above=0, names=("--download_seconds",)
    )
    private_addresses: bool = setting(False, "allow downloads from this machine and private networks")


def download_all(
    addresses: Mapping[Path, str], downloads: Downloads, done: Callable[[], object] = lambda: None
) -> dict[Path, str]:
    """Download each address to its file, `downloads.requests` at once, and call `done` after each.

    Returns:
        Reason for each failed file: "timed out", "http 404", "private address", ...
    """
    reasons: dict[Path, str] = {}

    async def download(http: httpx.AsyncClient, item: tuple[Path, str]) -> None:
        path, url = item
        private = FailedError("private address")
        stay_public = {"trace": guard(lambda address: not is_public(address), private)}
        extensions = {} if downloads.private_addresses else stay_public
        async with ask(http, "GET", url, extensions=extensions) as answer:
            with atomic_path(path) as temporary, open(temporary, "wb") as file:
                async for chunk in chunks(answer, MAX_BYTES):
                    file.write(chunk)

    def note(item: tuple[Path, str], reason: str) -> None:
        if reason:
            reasons[item[0]] = reason
        done()

    exchange_all(
        addresses.items(),
        download,
        note,
        at_once=min(downloads.requests, max(1, len(addresses))),
        seconds=downloads.seconds,
        timeout=SILENCE,
        follow_redirects=True,
        max_redirects=MAX_REDIRECTS,
    )
    return dict(sorted(reasons.items()))
