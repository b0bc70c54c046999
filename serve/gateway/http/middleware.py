"""Middleware for every request: an id, a log line, metrics, and limits of the body's size and time."""

import asyncio
import base64
import binascii
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megadit.serve.gateway.errors import ApiError, answer
from megadit.serve.gateway.logs import REQUEST_ID, log
from megadit.serve.gateway.media import check_once
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.store.patience import patient
from megadit.serve.gateway.turns import Turns
from megadit.serve.tracing import HERE, TRACEPARENT, Span, Tracing

_PLAIN = re.compile(rb"[0-9A-Za-z._-]{1,64}")
"""Client's request ids that are safe to repeat in a header and in the log."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
"""Methods that have their own label in metrics; clients may send arbitrary others."""
_CLIENT_LEFT = 499
"""Status of a request whose client disconnects before the response, as in nginx; not an error of the service."""
_SECONDS_OF_A_BODY = 30.0
"""Seconds for a whole body, in addition to the time of its bytes at `_SLOWEST_UPLOAD`."""
_SLOWEST_UPLOAD = 1 << 18
"""Lowest speed of a large body, in bytes a second."""
_LOOKS_AT_ONCE = 2
"""Most requests without a body of one key at once, so that a thousand of them do not delay others."""
_LOOKS = ("GET", "HEAD", "DELETE")
_ONCE = (b"authorization", b"content-encoding", b"content-type", b"idempotency-key", b"x-request-id")
"""Headers of which a proxy could read another one than the gateway does."""
_CONTENT = "/content"
"""Path suffix of pictures, which are made one at a time; they do not count against a caller's other requests."""


class _BodyTooLargeError(Exception):
    def __init__(self, most: int) -> None:
        super().__init__(f"the body is larger than {most:,} bytes")


class _BodyTooSlowError(Exception):
    pass


class _HeadIsAllError(OSError):
    """The response to HEAD is complete; an OSError ends a stream like a disconnected client."""


class Surroundings:
    """Plain ASGI middleware, so that streams are not buffered. HEAD is GET without the body of the response."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracing: Tracing, max_body_bytes: int) -> None:
        self._tracing = tracing
        self._app, self._metrics, self._max_body_bytes = app, metrics, max_body_bytes
        self._looks = Turns(of_a_key=_LOOKS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, method = time.monotonic(), 0, scope["method"]
        if method == "HEAD":
            scope = scope | {"method": "GET"}
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        token, span = REQUEST_ID.set(request_id), self._span(scope["method"], headers, request_id)
        place = HERE.set(span.traceparent)
        state = scope.setdefault("state", {})
        caller = key_text(headers.get(b"authorization", b"").decode("latin-1"))
        turn = AsyncExitStack()
        """Span until the response begins."""

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                await turn.aclose()
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            elif method == "HEAD":
                await send({"type": "http.response.body"})
                raise _HeadIsAllError
            await send(message)

        try:
            check_once(name.decode() for name, _ in scope["headers"] if name in _ONCE)
            if caller and method in _LOOKS and not scope["path"].endswith(_CONTENT):
                await turn.enter_async_context(self._looks.of(caller))
            with patient():
                await self._app(scope, self._limited(receive, state), sending)
        except (ClientDisconnect, _HeadIsAllError):  # during its request, or after the head of the response
            status = status or _CLIENT_LEFT
        except Exception as error:
            if not isinstance(error, (_BodyTooLargeError, _BodyTooSlowError, ApiError)):
                log("request failed", error=error)
            if not status:
                with suppress(_HeadIsAllError):
                    await answer(self._as_api_error(error))(scope, receive, sending)
        finally:
            await turn.aclose()
            self._note(scope | {"method": method}, status, time.monotonic() - began, span)
            REQUEST_ID.reset(token)
            HERE.reset(place)

    def _span(self, method: str, headers: Mapping[bytes, bytes], request_id: str) -> Span:
        """Span of a request that its caller traces, or that is not a poll, of which there are many."""
        parent = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
        is_read = method not in ("POST", "DELETE")
        attributes = {"http.request.method": method if method in _METHODS else "_OTHER"}
        attributes["megadit.request_id"] = request_id
        return self._tracing.begin(
            attributes["http.request.method"], parent, attributes, kind="server", may_be_root=not is_read
        )

    def _limited(self, receive: Receive, state: dict[str, Any]) -> Receive:
        """Wrap `receive` with the limits; `state` may hold a larger limit of the body, for a request with a key."""
        received, deadline = 0, asyncio.get_running_loop().time() + _SECONDS_OF_A_BODY

        async def receiving() -> Message:
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooSlowError from None
            if not message.get("more_body", False):
                deadline = None  # later messages only report a disconnection
            received += len(message.get("body", b""))
            most = state.get("max_body_bytes", self._max_body_bytes)
            if received > most:
                raise _BodyTooLargeError(most)
            if deadline is not None:
                deadline += len(message.get("body", b"")) / _SLOWEST_UPLOAD
            return message

        return receiving

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, _BodyTooLargeError):
            return ApiError(413, "too_large", str(error))
        if isinstance(error, _BodyTooSlowError):
            return ApiError(408, "too_slow", f"the body did not arrive within {_SECONDS_OF_A_BODY:g} s")
        return ApiError(500, "internal_error", "the gateway failed; see its log")

    def _note(self, scope: Scope, status: int, seconds: float, span: Span) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.request_seconds.labels(method, route).observe(seconds)
        key: Any = scope.get("state", {}).get("key_id")
        attributes = {"http.route": route, "http.response.status_code": status} | ({"megadit.key": key} if key else {})
        span.note(attributes, name=f"{method} {route}")
        span.end(str(status) if status >= 500 or not status else None)
        if status == 200 and route.startswith("/health/"):
            return  # polled every few seconds; only failures are logged
        level = logging.ERROR if status >= 500 or not status else logging.INFO
        log("request", level=level, method=method, route=route, status=status, key=key, seconds=round(seconds, 4))


def key_text(authorization: str) -> str:
    """The key in an Authorization header: that of a program, or the password that a person gave to a browser."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() != "basic":
        return value.strip()
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    value = headers.get(b"x-request-id", b"")
    return value.decode() if _PLAIN.fullmatch(value) else f"req_{secrets.token_hex(12)}"
