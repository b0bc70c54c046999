"""Around every request: an id, a line in the log, a count, and a limit of the body's size."""

import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megadit.serve.gateway.errors import ApiError, answer
from megadit.serve.gateway.logs import REQUEST_ID, log
from megadit.serve.gateway.metrics import Metrics

_PLAIN = re.compile(rb"[0-9A-Za-z._-]{1,64}")
"""A request id of a client's that may be repeated in a header and in the log."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
"""What is counted under its name; clients can make up any number of others."""


class _BodyTooLargeError(Exception):
    pass


class Surroundings:
    """Plain ASGI, so that streams pass through as they come."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_body_bytes: int) -> None:
        self._app, self._metrics, self._max_body_bytes = app, metrics, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)
        token = REQUEST_ID.set(request_id)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, self._limited(receive), sending)
        except Exception as error:
            if not isinstance(error, _BodyTooLargeError):
                log("request failed", error=error)
            if not status:
                await answer(self._told(error))(scope, receive, sending)
        finally:
            self._note(scope, status, time.monotonic() - began)
            REQUEST_ID.reset(token)

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise _BodyTooLargeError
            return message

        return receiving

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, _BodyTooLargeError):
            return ApiError(413, "too_large", f"the body is larger than {self._max_body_bytes:,} bytes")
        return ApiError(500, "internal_error", "the gateway failed; its log says how")

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, str(status)).inc()
        key: Any = scope.get("state", {}).get("key_id")
        log("request", method=method, route=route, status=status, key=key, seconds=round(seconds, 4))


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _PLAIN.fullmatch(given) else f"req_{secrets.token_hex(12)}"
