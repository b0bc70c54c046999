"""The routes of the video API."""

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from megadit.models.diffusion.conditioning_settings import CONDITIONING
from megadit.models.shared.errors import UserError
from megadit.serve.events import AdapterNotFoundError, InvalidRequestError
from megadit.serve.gateway.errors import ApiError, not_found, of_job, of_validation, unavailable
from megadit.serve.gateway.http.content import Asked, content_of, picture_content_of, read_video
from megadit.serve.gateway.http.schemas import (
    ERRORS,
    CreateVideo,
    Model,
    ModelList,
    RemixVideo,
    Video,
    VideoDeleted,
    VideoPage,
    body_of,
    check,
    few_values,
)
from megadit.serve.gateway.http.streams import Streams
from megadit.serve.gateway.jobs.pictures import VARIANTS
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.media import MOST_FILES, check_once, form_of, pack, values_of
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.jobs import FAILED, QUEUED, Job, NewJob, new_id
from megadit.serve.gateway.store.keys import Key
from megadit.serve.gateway.store.quotas import QuotaExceededError, TooManyActiveError
from megadit.serve.gateway.store.results import SUFFIXES
from megadit.serve.gateway.store.store import IdempotencyMismatchError, KeyRevokedError
from megadit.serve.service_info import ServiceInfo
from megadit.serve.tracing import HERE

_Body, _Answer = TypeVar("_Body", bound=BaseModel), TypeVar("_Answer")
_CONTENTS = (*SUFFIXES, *(variant.media_type for variant in VARIANTS.values()))
_ID = re.compile(r"video_[0-9a-f]{32}")
_MOST_FIELDS = 64
"""Most fields of a form."""
_MOST_MARKS = 1 << 19
"""Most quotes, commas and brackets of a JSON body: parsing many values blocks other requests; base64 has none."""
_SMALL = 1 << 16
"""Bytes of a body that is parsed at once; larger ones take turns."""


def _content(*kinds: str, statuses: tuple[int, ...] = (200,)) -> dict[int | str, dict[str, Any]]:
    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds}
    return {status: {"content": content} for status in statuses}


_CREATE = body_of(json="CreateVideo", form="CreateVideoForm")
_MAKE = {"response_class": Response, "responses": _content(*SUFFIXES), "openapi_extra": _CREATE}
_IdempotencyKey = Annotated[str | None, Header(pattern=r"^[\x21-\x7e]{1,255}$")]


def video_routes(gateway: Gateway, authenticate: Callable[..., Key]) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["videos"], responses=ERRORS)
    Authenticated = Annotated[Key, Depends(authenticate)]
    streams = Streams(gateway)

    async def counted(key: Authenticated) -> AsyncIterator[None]:
        """Counts a request as one of its key's streams until its response has been read."""
        with streams.of(key):
            yield

    is_read = {"dependencies": [Depends(counted)]}

    @router.post("/videos", response_model=Video, openapi_extra=_CREATE)
    async def create_video(request: Request, key: Authenticated, idempotency_key: _IdempotencyKey = None) -> Video:
        """Creates a video and returns at once. A repetition with the same `Idempotency-Key` creates no second one.

        Files (`input_reference`, `image`, `video`, ...) are sent in a form, or in JSON as base64; URLs are not fetched.
        """
        return await _accepted(gateway, key, request, idempotency_key)

    @router.post("/videos/generations", operation_id="generate_video", **is_read, **_MAKE)
    @router.post("/videos/sync", **is_read, **_MAKE)
    async def make_video(request: Request, key: Authenticated, idempotency_key: _IdempotencyKey = None) -> Response:
        """Creates a video, waits, and responds with the video itself; `x-video-id` is its id.

        Disconnecting cancels the video, unless the request has an `Idempotency-Key`, with which it can be repeated.
        """
        video = await _accepted(gateway, key, request, idempotency_key)
        try:
            job = await streams.end_of(key, video.id, request)
        except ClientDisconnect:
            if idempotency_key is None:
                await run_in_threadpool(_delete, gateway, key, video.id)
            raise
        if job is None or job.status == FAILED:
            raise of_job(job, video.id)
        answer = await run_in_threadpool(content_of, gateway.results, job)
        answer.headers["x-video-id"] = job.id
        return answer

    @router.post("/videos/{video_id}/remix", response_model=Video, openapi_extra=body_of(json="RemixVideo"))
    async def remix_video(
        request: Request, key: Authenticated, video_id: str, idempotency_key: _IdempotencyKey = None
    ) -> Video:
        """Creates a video by editing a finished one by the prompt. For models with edit conditioning."""
        with gateway.uploads.admitted(request, key):
            body = await _read(gateway, key, request, RemixVideo)
            new = await run_in_threadpool(_new_remix, gateway, key, video_id, body, idempotency_key)
            return await _taken(gateway, key, new)

    @router.get("/videos", response_model=VideoPage)
    def list_videos(
        key: Authenticated,
        after: Annotated[str | None, Query(max_length=100)] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> VideoPage:
        """The videos of this key, the newest first."""
        if after is not None and not _ID.fullmatch(after):
            raise not_found(after)
        page = gateway.store.page(key.id, after=after, limit=limit, newest_first=order == "desc")
        if page is None:
            raise not_found(after)
        videos = [Video.of(job) for job in page[0]]
        first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
        return VideoPage(data=videos, first_id=first, last_id=last, has_more=page[1])

    @router.get("/videos/{video_id}", response_model=Video)
    def get_video(key: Authenticated, video_id: str) -> Video:
        """Progress of a video."""
        return Video.of(_find(gateway, key, video_id))

    @router.get(
        "/videos/{video_id}/events",
        response_class=StreamingResponse,
        responses=_content("text/event-stream"),
        **is_read,
    )
    async def follow_video(key: Authenticated, video_id: str) -> StreamingResponse:
        """Progress of a video until it has ended, and previews if requested.

        Server-sent events: `video.queued`, `video.in_progress`, `video.preview`; in the end `video.completed`,
        `video.failed` or `video.deleted`.
        """
        await streams.look(_find, gateway, key, video_id)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(streams.events(key, video_id), headers=headers, media_type="text/event-stream")

    @router.get(
        "/videos/{video_id}/content",
        response_class=Response,
        responses=_content(*_CONTENTS, statuses=(200, 206)),
        **is_read,
    )
    async def get_content(
        key: Authenticated,
        video_id: str,
        asked: Annotated[Asked, Depends()],
        variant: Literal["video", "thumbnail", "spritesheet"] = "video",
    ) -> Response:
        """The finished video itself, or one range of its bytes.

        Its `thumbnail` is a webp of the first frame, its `spritesheet` a jpg of up to 16 frames in rows of four.
        """
        job = await run_in_threadpool(_find, gateway, key, video_id)
        if variant == "video":
            return await run_in_threadpool(content_of, gateway.results, job, asked)
        make = partial(picture_content_of, gateway.results, job, variant, asked, mark=gateway.mark)
        async with gateway.picturing.of(key.id):
            return await run_in_threadpool(make)

    @router.delete("/videos/{video_id}", response_model=VideoDeleted)
    def delete_video(key: Authenticated, video_id: str) -> VideoDeleted:
        """Deletes a video. A running one is cancelled after its current step."""
        return _delete(gateway, key, video_id)

    @router.get("/models", response_model=ModelList)
    def list_models(key: Authenticated) -> ModelList:
        return ModelList(data=[_model(gateway, name) for name in gateway.servers.models])

    @router.get("/models/{model_id}", response_model=Model)
    def get_model(key: Authenticated, model_id: str) -> Model:
        return _model(gateway, _model_of(gateway, model_id))

    return router


def _find(gateway: Gateway, key: Key, video_id: str) -> Job:
    job = gateway.store.get(key.id, video_id) if _ID.fullmatch(video_id) else None
    if job is None:
        raise not_found(video_id)
    return job


def _delete(gateway: Gateway, key: Key, video_id: str) -> VideoDeleted:
    job = gateway.store.delete(key.id, video_id) if _ID.fullmatch(video_id) else None
    if job is None:
        raise not_found(video_id)
    gateway.runner.cancel(video_id)
    if job.status == QUEUED:  # a running job is counted by its runner
        gateway.metrics.videos.labels(key.id, job.model, "cancelled").inc()
    try:
        gateway.results.remove(job.result_name)
    except Exception as error:  # file systems raise any exception; the next start removes the video
        log("result not removed", error=error, job=video_id)
    return VideoDeleted(id=video_id)


async def _accepted(gateway: Gateway, key: Key, request: Request, idempotency_key: str | None) -> Video:
    with gateway.uploads.admitted(request, key):
        if "max_body_bytes" in request.scope["state"]:  # a key over its quota need not send the body
            await run_in_threadpool(_within_quota, gateway, key, gateway.store.check_quotas)
        body = await _read(gateway, key, request, CreateVideo)
        return await _taken(gateway, key, await run_in_threadpool(_new_video, gateway, key, body, idempotency_key))


async def _read(gateway: Gateway, key: Key, request: Request, model: type[_Body]) -> _Body:
    """Read the body: JSON, or a form, which may have files if it is multipart."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if read := _WHOLE.get(kind):
            text = await request.body()
            async with nullcontext() if len(text) <= _SMALL else gateway.reading.of(key.id):
                return await run_in_threadpool(lambda: model.model_validate(read(text)))
        if kind == "multipart/form-data":
            async with form_of(request, max_files=MOST_FILES, max_fields=_MOST_FIELDS) as form:
                values = await values_of(form)
                return await run_in_threadpool(model.model_validate, values)
    except ValidationError as error:
        raise of_validation(error, model.model_fields) from None
    except ValueError as error:  # invalid JSON, or nested too deeply
        raise ApiError(400, "invalid_request", f"the body cannot be read: {error}"[:500]) from None
    raise ApiError(415, "unsupported_media_type", "send application/json or multipart/form-data")


def _of_json(text: bytes) -> Any:
    """Parse a JSON body; its number of values is limited, since only base64 files may make it large."""
    if sum(map(text.count, (b'"', b",", b"[", b"{"))) > _MOST_MARKS:
        raise ApiError(400, "invalid_request", "the body holds too many values")
    return few_values(text)


def _of_line(text: bytes) -> dict[str, str]:
    """Parse a urlencoded form; fields are counted first, since a megabyte can hold a million."""
    fields = parse_qsl(text.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    check_once(name for name, _ in fields)
    return dict(fields)


_WHOLE: dict[str, Callable[[bytes], Any]] = {
    "application/json": _of_json,
    "application/x-www-form-urlencoded": _of_line,
}
"""Content type -> parser of a body that is read as a whole."""


_Asked = tuple[NewJob, ServiceInfo]
"""A job, and the description of its model."""


def _new_video(gateway: Gateway, key: Key, body: CreateVideo, idempotency_key: str | None) -> _Asked:
    model = _model_of(gateway, body.model or gateway.servers.models[0])
    info = _info(gateway, model)
    try:
        # by Triton's names: a key's own adapter may have the name of a student of the service
        request = info.filled(gateway.adapters.resolved(key, body.request(info), info.adapters))
    except AdapterNotFoundError as error:
        raise ApiError(400, error.code, str(error)[:500], param="adapters") from None
    except (UserError, InvalidRequestError) as error:
        raise ApiError(400, "invalid_request", str(error)[:500]) from None
    new = NewJob(
        model=model,
        request=request,
        priority=body.priority,
        idempotency_key=idempotency_key,
        fingerprint=hashlib.sha256(body.model_dump_json(exclude={"preview_every"}).encode()).hexdigest(),
    )
    return new, info


def _new_remix(gateway: Gateway, key: Key, video_id: str, body: RemixVideo, idempotency_key: str | None) -> _Asked:
    source = _find(gateway, key, video_id)
    info = _info(gateway, _model_of(gateway, source.model))
    if "edit" not in info.conditionings:
        raise ApiError(400, "unsupported", f"the model {source.model} was not trained to edit videos", param="video_id")
    video = read_video(gateway.results, source)
    nothing = dict.fromkeys(CONDITIONING)
    request = replace(source.request, **nothing | {"prompt": "", "instruction": body.prompt, "video": video})
    new = NewJob(
        model=source.model,
        request=info.filled(request),
        remixed_from=source.id,
        idempotency_key=idempotency_key,
        fingerprint=hashlib.sha256(f"{source.id} {body.prompt}".encode(errors="replace")).hexdigest(),
    )
    return new, info


def _info(gateway: Gateway, model: str) -> ServiceInfo:
    info = gateway.servers.info(model)
    if info is None:
        raise unavailable("not_ready", "no server has been seen yet")
    return info


async def _taken(gateway: Gateway, key: Key, asked: _Asked) -> Video:
    """Checks a job, including its files, and stores it."""
    new, info = asked
    try:
        check(new.request, info)
        if new.request.media():
            async with gateway.decoding.of(key.id):
                await run_in_threadpool(gateway.check_media, new.request, info.limits)
    except (UserError, InvalidRequestError) as error:
        raise ApiError(400, "invalid_request", str(error)[:500]) from None
    except TimeoutError as error:
        raise unavailable("busy", str(error)) from None
    video = await run_in_threadpool(_take, gateway, key, new)
    return video.model_copy(update={"warning": info.warning(new.request)})


def _take(gateway: Gateway, key: Key, new: NewJob) -> Video:
    if gateway.runner.is_draining:
        raise unavailable("draining", "this gateway is shutting down; try again")
    if not gateway.has_space():
        raise unavailable("storage_full", "there is no free space for more videos at the moment")
    job = _stored(gateway, key, replace(new, traceparent=HERE.get()))
    gateway.runner.notify()
    return Video.of(job)


def _stored(gateway: Gateway, key: Key, new: NewJob) -> Job:
    """Store the job, and the files of its request until it has ended."""
    media = new.request.media()
    if not media:
        return _within_quota(gateway, key, lambda key: gateway.store.create(key, new)[0])
    new = replace(new, id=new_id())
    try:
        conditioning = gateway.results.put_conditioning(new.id, pack(media))
    except Exception as error:  # fsspec's file systems raise any exception
        log("files of a job not stored", error=error, job=new.id)
        raise unavailable("storage_unavailable", "the place of the videos does not answer at the moment") from None
    try:
        new = replace(new, conditioning=conditioning)
        job = _within_quota(gateway, key, lambda key: gateway.store.create(key, new)[0])
    except SQLAlchemyError:  # it may have been created nevertheless
        gateway.undecided.append((new.id, conditioning.name))
        raise
    except Exception:
        gateway.results.remove(conditioning.name)
        raise
    if job.id != new.id:  # created by an earlier request
        gateway.results.remove(conditioning.name)
    return job


def _within_quota(gateway: Gateway, key: Key, ask: Callable[[Key], _Answer]) -> _Answer:
    """Return the store's result; refusals are counted, and become errors of the API."""
    try:
        return ask(key)
    except IdempotencyMismatchError as error:
        raise ApiError(422, "idempotency_mismatch", str(error)) from None
    except KeyRevokedError as error:
        raise ApiError(401, "invalid_api_key", str(error)) from None
    except TooManyActiveError as error:
        code, seconds, message = "too_many_active", 5.0, str(error)
    except QuotaExceededError as error:
        code, seconds, message = "insufficient_quota", 3600.0, str(error)
    gateway.metrics.refusals.labels(key.id, code).inc()
    raise ApiError(429, code, message, retry_after=seconds)


def _model_of(gateway: Gateway, model: str) -> str:
    if model not in gateway.servers.models:
        message = f"there is no model {model[:64]!r}; `GET /v1/models` lists them"
        raise ApiError(404, "model_not_found", message, param="model")
    return model


def _model(gateway: Gateway, name: str) -> Model:
    info = gateway.servers.info(name)
    return Model(id=name, service=None if info is None else info.to_dict())
