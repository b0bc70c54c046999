"""Response with a finished video or a picture of it: whole, a byte range, or not modified (RFC 9110)."""

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Annotated

from fastapi import Header, Response
from fastapi.responses import StreamingResponse

from megadit.infer.media.signing import Marker
from megadit.serve.gateway.errors import ApiError, answer, unavailable
from megadit.serve.gateway.jobs.pictures import VARIANTS, picture_of
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.store.jobs import COMPLETED, Job
from megadit.serve.gateway.store.results import SUFFIXES, Results

_RANGE = re.compile(r"bytes=[ \t]*(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))[ \t]*", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """Content of a response, and its file name."""

    file: IO[bytes]
    name: str
    media_type: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Headers of a request that choose bytes or a cached copy."""

    range: Annotated[str | None, Header()] = None
    if_range: Annotated[str | None, Header()] = None
    if_none_match: Annotated[str | None, Header()] = None

    def is_unchanged(self, etag: str) -> bool:
        """Whether the client has the same bytes (RFC 9110, 13.1.2: weak comparison)."""
        known = [each.strip().removeprefix("W/") for each in (self.if_none_match or "").split(",")]
        return etag in known or known == ["*"]


def content_of(results: Results, job: Job, asked: Asked = Asked()) -> Response:
    """The response with the video. Raises ApiError if there is no video."""
    content = _Content(
        file=open_video(results, job),
        name=f"{job.id}{SUFFIXES[job.media_type]}",
        media_type=job.media_type,
        num_bytes=job.num_bytes,
        sha256=job.sha256,
    )
    return _answer(content, asked)


def picture_content_of(results: Results, job: Job, variant: str, asked: Asked, *, mark: Marker | None) -> Response:
    """The response with one of the `VARIANTS` of a video, which `mark` signs. Raises ApiError if there is no video, or
    it cannot be decoded."""
    data, about = read_video(results, job), VARIANTS[variant]
    try:
        picture = picture_of(data, job.media_type, about)
    except Exception as error:  # decoders raise any exception
        log("no picture of a result", error=error, job=job.id)
        raise ApiError(404, "unreadable", "the video holds no picture that can be read", param="variant") from None
    picture = picture if mark is None else mark(picture, about.suffix)
    content = _Content(
        file=io.BytesIO(picture),
        name=f"{job.id}_{variant}{about.suffix}",
        media_type=about.media_type,
        num_bytes=len(picture),
        sha256=hashlib.sha256(picture).hexdigest(),
    )
    return _answer(content, asked)


def _answer(content: _Content, asked: Asked) -> Response:
    etag, size = f'"{content.sha256}"', content.num_bytes
    headers = {"cache-control": "private, no-store", "etag": etag}
    if asked.is_unchanged(etag):
        content.file.close()
        return Response(status_code=304, headers=headers)
    headers |= {
        "accept-ranges": "bytes",
        "content-disposition": f'attachment; filename="{content.name}"',
        "x-content-type-options": "nosniff",
    }
    part = asked_range(asked.range, size) if asked.if_range in (None, etag) else None
    if part is None:
        part, status = range(size), 200
    elif part:
        status = 206
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    else:
        content.file.close()
        refusal = ApiError(416, "range_not_satisfiable", f"{content.name} has {size:,} bytes", param="range")
        return answer(refusal, {"content-range": f"bytes */{size}"})
    headers["content-length"] = str(len(part))
    return StreamingResponse(_chunks(content.file, part), status, headers, content.media_type)


def asked_range(asked: str | None, size: int) -> range | None:
    """The range of a `Range` header in a content of `size` bytes; empty if it is outside.

    None means the whole content: for a header that is malformed, has another unit than bytes, or several ranges. The
    RFC allows ignoring these.
    """
    match = _RANGE.fullmatch(asked or "")
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        return range(max(0, size - int(suffix)), size)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


def open_video(results: Results, job: Job) -> IO[bytes]:
    """Open the video, so that its removal does not break the response. Raises ApiError if there is no video."""
    if job.status != COMPLETED:
        raise ApiError(404, "not_completed", f"the video is {job.status.replace('_', ' ')}")
    if job.num_bytes is None:
        raise ApiError(404, "expired", "the video has expired")
    with _storage_errors(job):
        file = results.open(job)
    if file is None:
        raise ApiError(404, "lost", "the video is not there any more")
    return file


def read_video(results: Results, job: Job) -> bytes:
    """The whole video. Raises ApiError as `open_video`."""
    with open_video(results, job) as file, _storage_errors(job):
        return file.read()


@contextmanager
def _storage_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # fsspec's file systems raise any exception
        log("result not read", error=error, job=job.id)
        raise unavailable("storage_unavailable", "the place of the videos does not answer at the moment") from None


def _chunks(file: IO[bytes], part: range) -> Iterator[bytes]:
    with file:
        file.seek(part.start)
        left = len(part)
        while left and (span := file.read(min(left, _CHUNK_BYTES))):
            left -= len(span)
            yield span
