"""Limits of uploads to the page: bytes of each visitor and in total, and a time limit.

Gradio stores the files of a request before the page is called, and visitors need no session for that.
"""

import time
from collections import Counter, deque
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megadit.serve.forms import IN_A_LINE, MULTIPART, kind_of_form

LIFETIME_SECONDS = 3600
"""Seconds that an uploaded file stays."""
SECONDS_BETWEEN_SWEEPS = 300
_OF_A_VISITOR, _OF_ALL = 8, 32
"""Most files of the largest size that a page stores at once."""
_OTHER_BYTES = 1 << 20
"""Most bytes of a request without files: files of a session are sent as paths."""
_READ_ONLY = ("GET", "HEAD", "OPTIONS")
_UNUSED = "/process_recording"
"""Gradio's route for uploads to other places, which this page does not use."""
_ALL = ""
"""Key of the total over all visitors."""


class _TooMuchError(Exception):
    pass


class UploadQuota:
    """Middleware that counts uploaded bytes of visitors, by their addresses."""

    def __init__(self, app: ASGIApp, *, folder: Path, largest: int) -> None:
        """`folder`: where gradio stores files; `largest`: most bytes of a file."""
        self._app, self._folder, self._largest = app, folder, largest
        self._sent: deque[tuple[float, str, int]] = deque()
        """(when, visitor, bytes), the oldest first."""
        self._num_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READ_ONLY:
            await self._app(scope, receive, send)
            return
        if scope["path"].rstrip("/").endswith(_UNUSED):
            await PlainTextResponse("not found", 404)(scope, receive, send)
            return
        kind, is_utf8 = kind_of_form(Headers(scope=scope).get("content-type"))
        is_upload = scope["path"].rstrip("/").endswith("/upload")
        if kind == IN_A_LINE or (kind == MULTIPART and not (is_upload and is_utf8)):
            await PlainTextResponse("send files as multipart/form-data in UTF-8, all else as JSON", 415)(
                scope, receive, send
            )
            return
        visitor = (scope.get("client") or ("?",))[0]
        has_begun, left = False, (self._largest if is_upload else 0) + _OTHER_BYTES
        if is_upload:
            self._sweep()

        async def receiving() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0 or (is_upload and not self._count(visitor, len(message.get("body", b"")))):
                raise _TooMuchError
            return message

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except _TooMuchError:
            if not has_begun:
                text = "this page stores no more files now: send smaller ones, or try again in an hour"
                await PlainTextResponse(text, 413)(scope, receive, send)

    def _count(self, visitor: str, size: int) -> bool:
        """Count `size` more bytes of a visitor; False if that exceeds a limit."""
        if size:
            self._sent.append((time.monotonic(), visitor, size))
            self._num_bytes.update({visitor: size, _ALL: size})
        most = {visitor: _OF_A_VISITOR, _ALL: _OF_ALL}
        return all(self._num_bytes[name] <= count * self._largest for name, count in most.items())

    def _sweep(self) -> None:
        """Drops counts of files that gradio has removed, and removes incomplete files that it does not know."""
        oldest = LIFETIME_SECONDS + SECONDS_BETWEEN_SWEEPS
        while self._sent and time.monotonic() - self._sent[0][0] > oldest:
            _, visitor, size = self._sent.popleft()
            self._num_bytes.subtract({visitor: size, _ALL: size})
            if not self._num_bytes[visitor]:
                del self._num_bytes[visitor]
        for path in self._folder.rglob("*"):
            if path.is_file() and time.time() - path.stat().st_mtime > oldest:
                path.unlink(missing_ok=True)
