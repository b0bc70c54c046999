"""Exchanges with servers, which are strangers: many at once, each with a deadline, second attempts where these may
help, and a reason for what failed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

ATTEMPTS = 3
FIRST_PAUSE = 1.0
"""Seconds of the first pause; each is twice the one before, or what the server asks for."""
LONGEST_PAUSE = 30.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers that another attempt may change."""

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
    """Makes an exchange of each item, `at_once` of them at a time, within `seconds` with all attempts, and calls `done`
    after each: with "", or why it failed ("timed out", "http 404", ...).

    Items are taken as there is room for them, in a thread of their own: to make one may take a while. What `done` and
    `items` raise ends all. `client` is said to httpx.
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
    async with httpx.AsyncClient(headers=headers, limits=httpx.Limits(max_connections=at_once), **client) as http:
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
    """The answer, which is 200 and whose body is still to come.

    Raises:
        FailedError: for any other answer, or none; within the block too.
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
    """The body as it comes.

    Raises:
        FailedError: "too large", before a piece beyond `most_bytes` is given.
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
