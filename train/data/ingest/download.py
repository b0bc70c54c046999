"""Files at http(s) addresses, which are strangers': many at once, each with a deadline, a limit and a reason for what
cannot be had. Bytes go from the network to the disk; a file bears its name only when it is whole.
"""

import asyncio
import ipaddress
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megadit.models.shared.files import atomic_path
from megadit.models.shared.setting import setting

MAX_BYTES = 1 << 28
ATTEMPTS = 3
FIRST_PAUSE = 1.0
"""Seconds; each pause is twice the one before, or what the server asks for."""
LONGEST_PAUSE = 30.0
SILENCE = 30.0
"""Seconds without a byte after which an attempt is given up."""
MAX_REDIRECTS = 5
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers that another attempt may change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """How addresses in tables are fetched; none of it changes what a whole download holds."""

    requests: int = setting(64, "of a rank at once (default: {default})", low=1, high=1024, names=("--downloads",))
    seconds: float = setting(
        300.0, "for a file with all attempts (default: {default})", above=0, names=("--download_seconds",)
    )
    private_addresses: bool = setting(False, "downloads may lead to this machine and its network")


class _NotFetchedError(Exception):
    """`reason`: a few words to count by."""

    def __init__(self, reason: str, *, again: bool = False, pause: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        """Whether another attempt may help."""
        self.pause = pause


def download_all(
    addresses: Mapping[Path, str], downloads: Downloads, done: Callable[[], object] = lambda: None
) -> dict[Path, str]:
    """Fetches each address into its file, `downloads.requests` at once, and calls `done` after each.

    Returns:
        Why, for each file that is not there: "timed out", "http 404", "private address", ...
    """
    return asyncio.run(_download_all(addresses, downloads, done))


async def _download_all(
    addresses: Mapping[Path, str], downloads: Downloads, done: Callable[[], object]
) -> dict[Path, str]:
    # names are looked up in threads, of which there are otherwise a few for each core
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(downloads.requests))
    reasons: dict[Path, str] = {}
    waiting = iter(addresses.items())

    async def work(client: httpx.AsyncClient) -> None:
        for path, url in waiting:  # shared: each address is taken once
            try:
                async with asyncio.timeout(downloads.seconds):
                    await _download(client, url, path, downloads)
            except TimeoutError:
                reasons[path] = "timed out"
            except _NotFetchedError as error:
                reasons[path] = error.reason
            done()

    async with httpx.AsyncClient(
        headers={"User-Agent": "megadit", "Accept-Encoding": "identity"},
        timeout=SILENCE,
        limits=httpx.Limits(max_connections=downloads.requests),
        follow_redirects=True,
        max_redirects=MAX_REDIRECTS,
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(min(downloads.requests, len(addresses)))))
    return dict(sorted(reasons.items()))


async def _download(client: httpx.AsyncClient, url: str, path: Path, downloads: Downloads) -> None:
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await _attempt(client, url, path, downloads)
        except _NotFetchedError as error:
            if attempt == ATTEMPTS or not error.again:
                raise
            await asyncio.sleep(min(LONGEST_PAUSE, pause if error.pause is None else error.pause))
            pause *= 2


async def _attempt(client: httpx.AsyncClient, url: str, path: Path, downloads: Downloads) -> None:
    has_begun = False
    extensions = {} if downloads.private_addresses or urllib.request.getproxies() else {"trace": _stay_public}
    try:
        async with client.stream("GET", url, extensions=extensions) as answer:
            has_begun = True
            if answer.status_code != 200:
                raise _NotFetchedError(
                    f"http {answer.status_code}", again=answer.status_code in BUSY, pause=_asked_pause(answer)
                )
            await _keep(answer, path)
    except httpx.TimeoutException:
        raise _NotFetchedError("timed out", again=True) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError):
        raise _NotFetchedError("not an address") from None
    except httpx.TooManyRedirects:
        raise _NotFetchedError("redirected in circles") from None
    except httpx.ConnectError:
        raise _NotFetchedError("no connection", again=True) from None
    except (httpx.HTTPError, httpx.StreamError):
        raise _NotFetchedError("cut short" if has_begun else "not http", again=True) from None


async def _keep(answer: httpx.Response, path: Path) -> None:
    announced = answer.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced) > MAX_BYTES:
        raise _NotFetchedError("too large")
    num_bytes = 0
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        async for piece in answer.aiter_raw():
            num_bytes += len(piece)
            if num_bytes > MAX_BYTES:
                raise _NotFetchedError("too large")
            file.write(piece)


def _asked_pause(answer: httpx.Response) -> float | None:
    seconds = answer.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else None


async def _stay_public(event: str, info: Mapping[str, Any]) -> None:
    """Closes a connection into a private network before a byte is sent over it (an extension of httpx that hears of
    every connection, after redirects and look-ups of names)."""
    if event == "connection.connect_tcp.complete":
        stream = info["return_value"]
        if not is_public(stream.get_extra_info("server_addr")[0]):
            await stream.aclose()
            raise _NotFetchedError("private address")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, not of this machine or its network."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_global
