"""Schemas of the HTTP API: a video, its progress, and the settings of this service as fields."""

import codecs
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from megadit.models.diffusion.conditioning_settings import CONDITIONING, MEDIA
from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.cli.setting import Setting, other_names, under_own_names
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.gateway.media import MOST_FILES, File, Keyframe, form_schema, reference_as
from megadit.serve.gateway.store.jobs import COMPLETED, FAILED, Job
from megadit.serve.service_info import ServiceInfo

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_SCHEMAS = "#/components/schemas/"

_MOST = {str: 100_000, int: _INT32, float: 1e6}
"""Largest number, or length of a text, for a setting without an upper bound."""
_LONGEST_NAME = 200
_MOST_ADAPTERS = 64
"""Most adapters in a body; the model's limit is lower."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MOST_VALUES = 1000
"""Most values of a body, including those within its lists and objects."""


def _field(about: Setting) -> tuple[Any, Any]:
    """(annotation, field) of pydantic for an optional setting."""
    others = ", ".join(f"`{name}`" for name in other_names({about.name: about}))
    described = f"{about.help} (or {others})" if others else about.help
    if about.type is str:
        bounds: dict[str, Any] = {"max_length": _LONGEST_NAME if about.metavar == "NAME" else _MOST[str]}
    else:
        least = {"gt": about.above} if about.low is None else {"ge": about.low}
        bounds = least | {"le": _MOST[about.type] if about.high is None else about.high}
    if about.type is int and about.low is None:
        bounds = bounds | {"ge": bounds.pop("gt") + 1}
    return about.type | None, Field(None, description=described, **bounds)


class ScaledAdapter(BaseModel):
    """An adapter, and its scale for a video."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(
        max_length=155,
        description="One of `GET /v1/adapters`; high=NAME or low=NAME for the high-noise or low-noise expert alone",
    )
    scale: float = Field(1.0, ge=-1e6, le=1e6, description="1: as trained; 0: no effect")


def few_values(text: str | bytes) -> Any:
    """Parse a JSON text of a limited number of values: validating a hundred thousand would block other requests. Raises
    ValueError for too many values, a name that an object has twice, and for invalid JSON."""
    text = (text.encode() if isinstance(text, str) else text).removeprefix(codecs.BOM_UTF8)
    value = from_json(text, allow_inf_nan=False)
    waiting, count, names = [value], 0, 0
    while waiting:
        holder = waiting.pop()
        inner = holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()
        count += len(inner)
        names += len(inner) if isinstance(holder, dict) else 0
        if count > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES:,} values")
        waiting += inner
    if names < _STRING.sub(b"", text).count(b":"):
        raise ValueError("an object has a name twice; give it once")
    return value


def _of_form(value: Any) -> Any:
    """A list, which is JSON text in a form."""
    return few_values(value) if isinstance(value, str) else value


class _VideoBody(BaseModel):
    """A video to generate. Fields left out take the model's defaults."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_bytes="base64", title="CreateVideo")

    prompt: str | None = Field(
        None,
        max_length=_MOST[str],
        description="What the video shows; required unless there is an `instruction`",
        examples=["a red seven moving left"],
    )
    model: str | None = Field(None, max_length=200, description="One of `GET /v1/models` (default: first)")
    seconds: float | None = Field(None, gt=0, le=3600, description="Length; `num_frames` is exact")
    size: str | None = Field(None, pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", description="WIDTHxHEIGHT in pixels")
    seed: int | None = Field(
        None, ge=-_INT64 - 1, le=_INT64, description="The same request and seed give the same video"
    )
    preview_every: int = Field(
        0, ge=0, le=_INT32, description="Previews in the events: at the first step and then every `preview_every` steps"
    )
    evaluate: bool = Field(False, description="Also return `scores` by a scorer, if the model has one")
    priority: int = Field(2, ge=1, le=3, description="Order among the videos of the same key: 1 is first")
    adapters: Annotated[tuple[ScaledAdapter, ...], BeforeValidator(_of_form)] = Field(
        (), max_length=_MOST_ADAPTERS, description="Adapters and their scales; JSON text in a form"
    )
    input_reference: File | None = Field(
        None, description="An image: the first frame. A video: to edit or continue, by the other fields"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_own_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if "size" not in body and {"width", "height"} <= set(body):  # as vLLM-Omni's clients send them
            rest = {name: value for name, value in body.items() if name not in ("width", "height")}
            body = rest | {"size": f"{body['width']}x{body['height']}"}
        body = under_own_names(body, SERVED)
        for name, value in body.items():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name} must not be {str(value).lower()}")  # a number: pydantic would take it for 1
        return body

    def request(self, info: ServiceInfo) -> VideoRequest:
        """The request of this body; fields left out are None. Raises InvalidRequestError if the settings contradict
        each other."""
        values = {
            name: getattr(self, name) for name in ("seed", "preview_every", "evaluate", *_SETTINGS, *_CONDITIONING)
        }
        if not (self.prompt or "").strip() and not self.instruction:
            raise InvalidRequestError("prompt: say what the video shows")
        values["prompt"] = self.prompt or ""
        if self.input_reference is not None:
            values[reference_as(self.input_reference, values, info.conditionings)] = self.input_reference
        if self.size is not None:
            values["width"], values["height"] = map(int, self.size.split("x"))
        if self.seconds is not None:
            if self.num_frames is not None:
                raise InvalidRequestError("seconds and num_frames both say how long the video is; give one of them")
            values["num_frames"] = max(1, round(self.seconds * (self.fps or info.defaults["fps"])))
        if self.adapters:
            values["adapters"] = tuple(f"{adapter.name}:{adapter.scale!r}" for adapter in self.adapters)
        return VideoRequest(**values)


_SETTINGS = {name: _field(about) for name, about in SERVED.items() if name not in ("width", "height")}


def _conditioning_field(name: str) -> tuple[Any, Any]:
    """(annotation, field) of pydantic for a conditioning option."""
    if name not in MEDIA:
        return _field(CONDITIONING[name])
    if CONDITIONING[name].count is None:
        return File | None, Field(None, description=CONDITIONING[name].help)
    about = "Frames by their numbers, from 0: a number, a colon, and the file in base64"
    return tuple[Keyframe, ...] | None, Field(None, description=about, max_length=MOST_FILES)


_CONDITIONING = {name: _conditioning_field(name) for name in CONDITIONING}
CreateVideo = create_model("CreateVideo", __base__=_VideoBody, __doc__=_VideoBody.__doc__, **_SETTINGS, **_CONDITIONING)
"""The body of `POST /v1/videos`: every setting, with `size` instead of width and height, and every file."""


class RemixVideo(BaseModel):
    """Changes to a finished video."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1, max_length=_MOST[str], examples=["make it red"])


def _bodies() -> dict[str, Any]:
    asked = [(model, "validation") for model in (CreateVideo, RemixVideo)]
    schemas = models_json_schema(asked, ref_template=f"{_SCHEMAS}{{model}}")[1]["$defs"]
    return schemas | {"CreateVideoForm": form_schema(schemas["CreateVideo"])}


BODIES = _bodies()
"""Name -> schema of the bodies that routes parse themselves; FastAPI describes all others."""


def body_of(**kinds: str) -> dict[str, Any]:
    """OpenAPI description of a route with one of these bodies: `json` and `form` name its schema."""
    types = {"json": "application/json", "form": "multipart/form-data"}
    content = {types[kind]: {"schema": {"$ref": f"{_SCHEMAS}{name}"}} for kind, name in kinds.items()}
    return {"requestBody": {"required": True, "content": content}}


class VideoError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    """A video, from its request to its end."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(description="Percent")
    created_at: int = Field(description="Seconds since 1970")
    completed_at: int | None = None
    expires_at: int | None = Field(None, description="When the video itself is removed")
    error: VideoError | None = None
    prompt: str
    seconds: str
    size: str
    remixed_from_video_id: str | None = None
    media_type: str | None = None
    sha256: str | None = None
    scores: dict[str, float] | None = Field(None, description="Scores by a scorer, if requested; empty if it failed")
    step: int
    settings: dict[str, Any] = Field(description="All settings of the video")
    warning: str | None = Field(None, description="When created: what may be wrong with the prompt")

    @classmethod
    def of(cls, job: Job) -> "Video":
        request = job.request
        is_there = job.status == COMPLETED and job.num_bytes is not None
        return cls(
            id=job.id,
            model=job.model,
            status=job.status,
            progress=job.progress,
            created_at=int(job.created_at),
            completed_at=None if job.completed_at is None else int(job.completed_at),
            expires_at=int(job.expires_at) if is_there and job.expires_at is not None else None,
            error=VideoError(code=job.error_code, message=job.error_message) if job.status == FAILED else None,
            prompt=request.text,
            seconds=f"{request.num_frames / request.fps:g}" if request.fps else "0",
            size=f"{request.width}x{request.height}",
            remixed_from_video_id=job.remixed_from,
            media_type=job.media_type,
            sha256=job.sha256,
            scores=job.scores,
            step=job.step,
            settings={name: getattr(request, name) for name in ("seed", *SERVED)}
            | {name: value for name, value in request.sent().items() if value is not None}
            | request.shown_adapters(),
        )


class VideoPreview(BaseModel):
    """Preview of a video that is not finished."""

    id: str
    object: Literal["video.preview"] = "video.preview"
    step: int
    media_type: Literal["image/jpeg"] = "image/jpeg"
    data: str = Field(description="Base64")


class VideoPage(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "megadit"
    service: dict[str, Any] | None = Field(description="Defaults, limits and samplers; null until a server was seen")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
"""Not `default`, which generated clients take for the success response of routes that return a video."""


class Health(BaseModel):
    status: Literal["ok", "not ready", "not idle"]


def check(request: VideoRequest, info: ServiceInfo) -> None:
    """Check what can be checked without the model; Triton checks everything again.

    Raises:
        UserError: if the request cannot be served.
        InvalidRequestError: likewise.
    """
    info.limits.check_texts(request)
    info.check_adapters(request)
    info.check_evaluate(request)
    info.check_guidance(request)
    request.check_conditioning(info.conditionings, info.limits)
    if request.sampler not in info.samplers:
        raise InvalidRequestError(f"sampler={request.sampler!r} is unknown; choose one of {', '.join(info.samplers)}")
    for name in ("height", "width"):
        size = getattr(request, name)
        if size < info.size_multiple or size % info.size_multiple:
            raise InvalidRequestError(f"{name}={size} is not a multiple of {info.size_multiple}")
    sizes = ("num_videos", "num_frames", "height", "width", "fps", "num_steps")
    info.limits.check_size(**{name: getattr(request, name) for name in sizes})
