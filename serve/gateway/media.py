"""Files of requests: parsed from JSON or a form, and stored with their job."""

import io
import re
import threading
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

from fastapi import Request
from pydantic import BeforeValidator, WithJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from megadit.models.diffusion.conditioning_settings import IMAGE_HEADS, MEDIA, from_base64, plain_bytes, split_keyframe
from megadit.models.shared.errors import UserError
from megadit.serve.forms import kind_of_form
from megadit.serve.gateway.errors import ApiError
from megadit.serve.gateway.store.keys import Key

REFERENCE = "input_reference"
MOST_FILES = 16
"""Most files of a form."""
_KEYFRAME = re.compile(r"keyframe\[([0-9]{1,9})\]")
"""Form field of a keyframe, with its frame number."""


def _file(value: Any) -> bytes:
    """The bytes of a file: raw in a form, base64 in JSON."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a file, or its bytes in base64")
    data = value.encode("ascii", errors="replace")
    return plain_bytes(data) if value.startswith("data:") else from_base64(data)


def _keyframe(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    number, file = split_keyframe(value) if isinstance(value, str) else (0, value)
    return b"%d:%b" % (number, _file(file))


_BASE64 = {"type": "string", "contentEncoding": "base64"}
File = Annotated[bytes, BeforeValidator(_file), WithJsonSchema(_BASE64)]
Keyframe = Annotated[
    bytes,
    BeforeValidator(_keyframe),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,9}:", "examples": ["24:"]}),
]


def form_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a form, from that of a JSON body: files are files."""
    properties = dict(schema["properties"])
    for name in (REFERENCE, *MEDIA):
        about = properties.pop(name)
        if name != "keyframe":
            properties[name] = {"type": "string", "format": "binary", "description": about.get("description", "")}
    described = "A frame by its number: files in the fields keyframe[0], keyframe[24], ..."
    return {
        **schema,
        "title": f"{schema['title']}Form",
        "properties": properties,
        "patternProperties": {r"^keyframe\[[0-9]+\]$": {"description": described}},
    }


class _Parser(MultiPartParser):
    """Starlette's parser, which would take a cut form for a whole one, bytes that are not UTF-8 for Latin-1, and base64
    for a text."""

    is_whole = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        coding = dict(self._current_part.item_headers).get(b"content-transfer-encoding", b"binary").lower()
        if coding not in (b"binary", b"7bit", b"8bit"):
            raise self._refusal("has a Content-Transfer-Encoding; send its bytes as they are")

    def on_part_end(self) -> None:
        try:
            self._current_part.data.decode()
        except UnicodeDecodeError:
            raise self._refusal("is not UTF-8; send a text in UTF-8, and a file with its name") from None
        super().on_part_end()

    def on_end(self) -> None:
        self.is_whole = True

    def _refusal(self, why: str) -> MultiPartException:
        return MultiPartException(f"{self._current_part.field_name[:64]!r} {why}")


@asynccontextmanager
async def form_of(request: Request, **most: int) -> AsyncIterator[FormData]:
    """The multipart form of a request, with limits of files and fields. Raises ApiError for texts in another encoding
    than UTF-8, and for a form that cannot be read to its end."""
    if not kind_of_form(request.headers.get("content-type"))[1]:
        raise ApiError(415, "unsupported_media_type", "send the form in UTF-8, without any other charset")
    parser = _Parser(request.headers, request.stream(), **most)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, "invalid_request", error.message) from None
    try:
        if not parser.is_whole:
            raise ApiError(400, "invalid_request", "the form was cut off: it lacks its last boundary")
        yield form
    finally:
        await form.close()


def check_once(names: Iterable[str]) -> None:
    """Raises ApiError for a field of a form that is given twice: which of them counts is not known."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ApiError(400, "invalid_request", f"{twice[:64]!r} is given twice; give it once", param=twice[:100])


async def values_of(form: FormData) -> dict[str, Any]:
    """The values of a form, files as their bytes. Raises ApiError for a file in a field for text, and for a field that
    is given twice."""
    check_once(name for name, _ in form.multi_items())
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        numbered = _KEYFRAME.fullmatch(name)
        if not isinstance(value, UploadFile):
            values[name] = value
        elif numbered:
            values.setdefault("keyframe", []).append(b"%s:%b" % (numbered[1].encode(), await value.read()))
        elif name in (REFERENCE, *MEDIA) and name != "keyframe":
            values[name] = await value.read()
        else:
            raise ApiError(400, "invalid_request", f"{name[:64]!r} must not be a file", param=name[:100])
    return values


def reference_as(data: bytes, settings: Mapping[str, Any], conditionings: tuple[str, ...]) -> str:
    """Return the field that `input_reference` means: the first frame for an image, else by the other fields. Raises
    UserError if that field is also given."""
    if data.startswith(IMAGE_HEADS):
        name = "image"
    elif settings.get("mask") or settings.get("instruction"):
        name = "video"
    elif settings.get("strength"):
        name = "input_video"
    else:
        name = "video" if "edit" in conditionings and not settings.get("keep_frames") else "continue_video"
    if settings.get(name):
        raise UserError(f"{REFERENCE} is the same as {name} here; give one of them")
    return name


def pack(media: Mapping[str, Any]) -> bytes:
    """Serialize all files of a request; `unpack` is the inverse."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, value in media.items():
            for number, data in enumerate(value if name == "keyframe" else [value]):
                archive.writestr(f"{name}/{number}", data)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    media: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for path in archive.namelist():
            name, file = path.partition("/")[0], archive.read(path)
            media[name] = (*media.get(name, ()), file) if name == "keyframe" else file
    return media


class Uploads:
    """Counts the bodies that are being read, with limits of large and other ones for each key."""

    def __init__(self, *, most_bytes: int, most_at_once: int, usual_bytes: int, most_usual: int) -> None:
        self._most_bytes, self._most_at_once, self._usual_bytes = most_bytes, most_at_once, usual_bytes
        self._most_usual = most_usual
        self._open: Counter[tuple[str, bool]] = Counter()
        """(key, whether they are larger) -> bodies."""
        self._lock = threading.Lock()

    @contextmanager
    def admitted(self, request: Request, key: Key) -> Iterator[None]:
        """Context while a body is read, if the limits of this key allow its Content-Length. Raises ApiError if they do
        not, or the body is compressed; nothing of it was read then."""
        if coding := request.headers.get("content-encoding", "").strip().lower().removeprefix("identity"):
            raise ApiError(
                415, "unsupported_media_type", f"send the body as it is, without Content-Encoding: {coding[:64]}"
            )
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 16 else 0
        if is_large := size > self._usual_bytes:
            most = min(self._most_bytes, key.limits.max_upload_bytes)
            if size > most:
                raise ApiError(413, "too_large", f"the body has {size:,} bytes; this key may send {most:,}")
        with self._lock:
            at_once = self._most_at_once if is_large else self._most_usual
            if self._open[key.id, is_large] >= at_once:
                message = f"this key may send {at_once} requests {'with files ' if is_large else ''}at once"
                raise ApiError(429, "too_many_uploads", message, retry_after=2)
            self._open[key.id, is_large] += 1
        if is_large:
            request.state.max_body_bytes = most
        try:
            yield
        finally:
            with self._lock:
                self._open[key.id, is_large] -= 1
                if not self._open[key.id, is_large]:
                    del self._open[key.id, is_large]
