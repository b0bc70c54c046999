"""Captions of clips without one, by an OpenAI-compatible server: `--caption_server`, `--caption_model`.

Each clip is a request to /v1/chat/completions with some of its frames as JPEGs. Responses are cached in
`prepare/captions.jsonl` as they come, so that none is requested twice.
"""

import base64
import io
import os
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
from PIL import Image

from megadit.models.shared.cli.setting import setting
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.train.data.ingest.clips.annotation_cache import AnnotationCache
from megadit.train.data.ingest.clips.encode import decoded_clips
from megadit.train.data.ingest.clips.select import divide
from megadit.train.data.ingest.lines import LongList
from megadit.train.data.ingest.plan import Clip, Notes, Settings, Skip, clip_from_json
from megadit.train.data.ingest.pool import Pool
from megadit.train.data.ingest.sources.http_retries import FailedError, ask, chunks, exchange_all

NOT_CAPTIONED = "not captioned: "
KEY = "MEGADIT_CAPTION_KEY"
"""Environment variable of the API key; it is specific to megadit, so that no other service's key is sent by mistake."""
MAX_BYTES = 1 << 20
MOST_LETTERS = 4000
LONGEST_SIDE = 512
"""Longest side of a frame as sent, in pixels."""
HOPELESS = 32
"""Failures without any caption, or consecutive ones caused by the server, after which captioning stops."""
OF_THE_SERVER = ("http 401", "http 403", "http 404", "no connection", "not http")
"""Failures caused by the server; others may concern a single clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionServer:
    """Caption server and sending of requests; contents of requests are in `Settings`."""

    caption_server: str | None = setting(
        None, "caption clips that have none with this OpenAI-compatible server", metavar="URL"
    )
    caption_requests: int = setting(8, "requests at once to --caption_server (default: {default})", low=1, high=1024)
    caption_seconds: float = setting(300.0, "seconds for a caption with all attempts (default: {default})", above=0)


def check_captions(settings: Settings, server: CaptionServer) -> None:
    """Raises UserError if server or model is missing, or the address is invalid."""
    if (server.caption_server is None) != (settings.caption_model is None):
        raise UserError("--caption_server URL and --caption_model NAME belong together; give both")
    if server.caption_server is not None and settings.default_caption:
        raise UserError(
            "--default_caption and --caption_server are two ways to caption clips without one; give one of them"
        )
    if server.caption_server is not None:
        _address(server.caption_server)
        _headers()


def caption_clips(
    clips: Sequence[Clip], settings: Settings, num_workers: int, server: CaptionServer, notes: Notes
) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """Caption clips, in order; those that the server did not describe are left out.

    Raises:
        UserError: if it describes none; for a source that has changed since it was scanned.
    """
    if settings.caption_model is None:
        return clips, []
    captions, asked = AnnotationCache(notes.captions), LongList(clip_from_json)
    asked.extend(clip for clip in clips if not clip.source.caption and captions.of(clip) is None)
    reasons = _ask(asked, captions, settings, num_workers, server)
    captioned = (
        replace(clip, source=replace(clip.source, caption=clip.source.caption or captions.of(clip) or ""))
        for clip in clips
    )
    return divide(
        captioned,
        ((NOT_CAPTIONED + reasons[clip.key], "") if clip.key in reasons else None for clip in clips),
    )


def _ask(
    clips: Sequence[Clip], captions: AnnotationCache, settings: Settings, num_workers: int, server: CaptionServer
) -> dict[str, str]:
    """Add to the captions; return reasons by the keys of clips that got none."""
    if not clips:
        return {}
    address, reasons, in_a_row = _address(server.caption_server), {}, 0

    def questions() -> Iterator[tuple[Clip, dict[str, Any]]]:
        with Pool(num_workers) as pool:
            for decoded in decoded_clips(clips, settings, pool):
                yield decoded.clip, question(decoded.frames_THWC, settings)

    async def exchange(http: httpx.AsyncClient, item: tuple[Clip, dict[str, Any]]) -> None:
        async with ask(http, "POST", address, json=item[1]) as answer:
            body = b"".join([chunk async for chunk in chunks(answer, MAX_BYTES)])
        captions.add(item[0], caption_of(body))

    with Progress(len(clips), "captioning", enabled=True) as bar:

        def note(item: tuple[Clip, dict[str, Any]], reason: str) -> None:
            nonlocal in_a_row
            bar.advance()
            in_a_row = in_a_row + 1 if reason in OF_THE_SERVER else 0
            if reason:
                reasons[item[0].key] = reason
            if not len(captions) and len(reasons) >= min(HOPELESS, len(clips)):
                raise UserError(f"--caption_server {address} returns no captions: {_counted(reasons)}")
            if in_a_row >= HOPELESS:
                raise UserError(
                    f"--caption_server {address} returns no captions any more: {_counted(reasons)}; {len(captions)} "
                    "captions are stored, repeat the command to continue"
                )

        # a response is silent while it is generated: only the deadline ends it
        at_once, seconds = min(server.caption_requests, len(clips)), server.caption_seconds
        exchange_all(questions(), exchange, note, at_once=at_once, seconds=seconds, timeout=None, headers=_headers())
    return reasons


def _counted(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{count} x {why}" for why, count in Counter(reasons.values()).most_common())


def question(frames_THWC: np.ndarray, settings: Settings) -> dict[str, Any]:
    """The request about a clip (uint8): the instruction, and `settings.caption_frames` evenly spaced frames."""
    count = min(settings.caption_frames, len(frames_THWC))
    places = np.linspace(0, len(frames_THWC) - 1, count).round().astype(int) if count > 1 else [len(frames_THWC) // 2]
    content: list[dict[str, Any]] = [{"type": "text", "text": settings.caption_prompt}]
    for place in places:
        content.append({"type": "image_url", "image_url": {"url": _jpeg(frames_THWC[place])}})
    return {"model": settings.caption_model, "messages": [{"role": "user", "content": content}]}


def caption_of(body: bytes) -> str:
    """The caption in a response, as one line.

    Raises:
        FailedError: if there is none, or it is cut off or too long.
    """
    try:
        choice = parse_json(body, "the answer")["choices"][0]
        text, ending = choice["message"]["content"], choice.get("finish_reason")
    except (UserError, LookupError, TypeError, AttributeError):
        raise FailedError("not an answer") from None
    if ending not in (None, "stop"):  # its tokens ran out, or a filter stopped it
        raise FailedError("not finished")
    if not isinstance(text, str):
        raise FailedError("not an answer")
    if len(text) > MOST_LETTERS:
        raise FailedError("too long")
    printable = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    if not (caption := " ".join(printable.split())):
        raise FailedError("empty")
    return caption


def _jpeg(picture_HWC: np.ndarray) -> str:
    image, buffer = Image.fromarray(picture_HWC), io.BytesIO()
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    image.save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _address(server: str) -> str:
    """URL of the completions; a server's address may end in /v1 or not."""
    try:
        url = httpx.URL(server)
        is_usable = (
            url.scheme in ("http", "https")
            and bool(url.host)
            and not url.query
            and not set(server) & set(string.whitespace)
        )
    except httpx.InvalidURL:
        is_usable = False
    if not is_usable:
        raise UserError(f"--caption_server {server}: write an address such as http://localhost:8000/v1")
    return f"{server.rstrip('/').removesuffix('/v1')}/v1/chat/completions"


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY} holds characters that no API key has; set it again")
    return {"Authorization": f"Bearer {key}"} if key else {}
