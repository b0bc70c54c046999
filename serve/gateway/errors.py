"""Errors of the HTTP API, all of one shape."""

from collections.abc import Collection

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from megadit.models.shared.errors import did_you_mean
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.store.database import in_a_line
from megadit.serve.gateway.store.jobs import Job

_RETRY_SECONDS = 2
_STATUSES = {"invalid_request": 400, "adapter_not_found": 400, "guardrail": 400, "timed_out": 504}
"""Error code of a job -> HTTP status of failures that are not the service's fault or timeouts; others are 500."""
_METHODS = ("GET", "HEAD", "POST", "DELETE")
IN_WORDS = {
    "size": "give WIDTHxHEIGHT in pixels, such as 512x288",
    "idempotency-key": "give 1 to 255 characters of ASCII, none of them a space",
}
"""Field with a pattern -> message instead of the regular expression."""


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


def not_found(video_id: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no video {video_id[:64]!r}", param="video_id")


def unavailable(code: str, message: str) -> ApiError:
    return ApiError(503, code, message, retry_after=_RETRY_SECONDS)


def of_validation(error: ValidationError | RequestValidationError, fields: Collection[str] = ()) -> ApiError:
    """The first validation error, with its field; `fields` are the known ones."""
    first = error.errors()[0]
    param = ".".join(str(part)[:100] for part in first["loc"] if part not in ("body", "query", "path", "header"))[:100]
    said = first["msg"].removeprefix("Value error, ")  # pydantic's own word for one of ours
    said = IN_WORDS.get(param, said) if first["type"] == "string_pattern_mismatch" else said
    if first["type"] == "extra_forbidden":
        said = f"there is no such field{did_you_mean(param, fields)}"
    return ApiError(400, "invalid_request", f"{param or 'the body'}: {said}"[:500], param=param or None)


def of_job(job: Job | None, video_id: str) -> ApiError:
    """The error of a video that a client waited for."""
    if job is None:
        return ApiError(404, "deleted", f"{video_id} was deleted")
    code = job.error_code or "server_failed"
    return ApiError(_STATUSES.get(code, 500), code, f"{job.error_message} ({video_id})")


def install(app: FastAPI) -> None:
    """Give every error the same shape, and log the gateway's own errors."""

    @app.exception_handler(ApiError)
    def error_response(request: Request, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(of_validation(error))

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers if error.status_code != 405 else {"allow": ", ".join(_allowed(app, request))}
        return answer(ApiError(error.status_code, "invalid_request", str(error.detail)), headers)

    @app.exception_handler(SQLAlchemyError)
    def store_failed(request: Request, error: SQLAlchemyError) -> JSONResponse:
        log("store failed", reason=in_a_line(error))
        return answer(unavailable("store_unavailable", "the job store cannot be used at the moment"))


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """The methods that the path of a request supports, over all routes."""

    def is_taken(method: str) -> bool:
        asked = {**request.scope, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in app.router.routes)

    return [method for method in _METHODS if is_taken("GET" if method == "HEAD" else method)]


def answer(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "server_error"
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)
