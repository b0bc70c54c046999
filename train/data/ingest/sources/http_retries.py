"""Concurrent HTTP requests to untrusted servers, with deadlines, retries, and reasons of failures."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from megadit.models.shared.addresses import tls_context

ATTEMPTS = 3
FIRST_PAUSE = 1.0
"""Seconds of the first pause; each is twice the previous one, or as the server requests."""
LONGEST_PAUSE = 30.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""

Item = TypeVar("Item")


class FailedError(Exception):
    """`reason`: a few words to count by."""

    def __init__(self, reason: str, *, again: bool = False, pause: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        """Whether another attempt may help."""
        self.pause = pause


def exchange_all(
    items: Iterable[Item],
    exchange: Callable[[httpx.AsyncClient, Item], Awaitable[object]],
    done: Callable[[Item, str], object],
    *,
    at_once: int,
    seconds: float,
    **client: Any,
) -> None:
    """Call `exchange` for each item, `at_once` at a time, within `seconds` for all attempts, and then `done`: with "",
    or the reason of failure ("timed out", "http 404", ...).

    Items are drawn in a separate thread, as capacity allows. Exceptions of `done` and `items` end everything. `client`:
    options of httpx.
    """
    asyncio.run(_exchange_all(iter(items), exchange, done, at_once, seconds, client))


async def _exchange_all(items, exchange, done, at_once, seconds, client) -> None:
    # names are looked up in threads, of which there are otherwise a few for each core; one more takes items
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once + 1))
    one_at_a_time, end = asyncio.Lock(), object()

    async def work(http: httpx.AsyncClient) -> None:
        while True:
            async with one_at_a_time:
                item = await asyncio.to_thread(next, items, end)
            if item is end:
                return
            reason = ""
            try:
                async with asyncio.timeout(seconds):
                    await _attempts(http, exchange, item)
            except TimeoutError:
                reason = "timed out"
            except FailedError as error:
                reason = error.reason
            done(item, reason)

    headers = {"User-Agent": "megadit", "Accept-Encoding": "identity"} | client.pop("headers", {})
    async with httpx.AsyncClient(
        headers=headers, limits=httpx.Limits(max_connections=at_once), verify=tls_context(), **client
    ) as http:
        await asyncio.gather(*(work(http) for _ in range(at_once)))


async def _attempts(http: httpx.AsyncClient, exchange, item) -> None:
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await exchange(http, item)
            return
        except FailedError as error:
            if attempt == ATTEMPTS or not error.again:
                raise
            await asyncio.sleep(min(LONGEST_PAUSE, pause if error.pause is None else error.pause))
            pause *= 2


@asynccontextmanager
async def ask(http: httpx.AsyncClient, method: str, url: str, **request: Any) -> AsyncIterator[httpx.Response]:
    """A response with status 200, whose body is yet to be read.

    Raises:
        FailedError: for any other response, or none; within the block too.
    """
    has_begun = False
    try:
        async with http.stream(method, url, **request) as answer:
            has_begun = True
            if answer.status_code != 200:
                again = answer.status_code in BUSY
                raise FailedError(f"http {answer.status_code}", again=again, pause=_asked_pause(answer))
            yield answer
    except httpx.TimeoutException:
        raise FailedError("timed out", again=True) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError):
        raise FailedError("not an address") from None
    except httpx.TooManyRedirects:
        raise FailedError("redirected in circles") from None
    except httpx.ConnectError:
        raise FailedError("no connection", again=True) from None
    except (httpx.HTTPError, httpx.StreamError):
        raise FailedError("cut short" if has_begun else "not http", again=True) from None


async def chunks(answer: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body in chunks.

    Raises:
        FailedError: "too large", before a chunk beyond `most_bytes` is yielded.
    """
    announced = answer.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise FailedError("too large")
    num_bytes = 0
    async for span in answer.aiter_raw():
        num_bytes += len(span)
        if num_bytes > most_bytes:
            raise FailedError("too large")
        yield span


def _asked_pause(answer: httpx.Response) -> float | None:
    seconds = answer.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else None
