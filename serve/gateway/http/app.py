"""The FastAPI application of a gateway: `create_app`. Only health routes work without a key."""

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware.cors import CORSMiddleware

from megadit.serve.gateway import errors
from megadit.serve.gateway.http.adapter_routes import adapter_routes
from megadit.serve.gateway.http.docs_page import HEADERS, docs_page
from megadit.serve.gateway.http.middleware import Surroundings
from megadit.serve.gateway.http.routes import video_routes
from megadit.serve.gateway.http.schemas import BODIES, Health
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.keys import Key

_DESCRIPTION = """Videos from text. `POST /v1/videos` creates a video, `GET /v1/videos/{id}` returns its progress (or
`/events`, as a stream), and `GET /v1/videos/{id}/content` returns the video. `GET /v1/models`
has the models with their defaults and limits."""
_CORS = {
    "allow_methods": ["GET", "HEAD", "POST", "DELETE"],
    "allow_headers": ["authorization", "content-type", "idempotency-key", "if-none-match", "if-range", "range"],
    "expose_headers": ["content-disposition", "content-range", "etag", "retry-after", "x-request-id", "x-video-id"],
}
"""Pages send their key as a header, never as a cookie."""
_bearer = HTTPBearer(auto_error=False, description="A key made by `megadit serve keys add`")


def create_app(gateway: Gateway) -> FastAPI:
    app = FastAPI(
        title="megadit",
        version="1",
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # redirects would use the host that the client names
        generate_unique_id_function=lambda route: route.name,  # a generated client's `create_video`
    )
    errors.install(app)
    authenticate = _authentication(gateway)
    app.include_router(video_routes(gateway, authenticate))
    app.include_router(adapter_routes(gateway, authenticate))
    _add_health(app, gateway)
    _add_documentation(app, gateway)
    _add_front(app)
    app.add_middleware(
        Surroundings,
        metrics=gateway.metrics,
        tracing=gateway.tracing,
        max_body_bytes=gateway.settings.max_body_bytes,
    )
    if gateway.settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=gateway.settings.cors_origins, **_CORS)
    return app


def _authentication(gateway: Gateway) -> Callable[..., Key]:
    def authenticate(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Key:
        """The key of a request, if its rate limit allows the request."""
        key = gateway.keys.check(credentials.credentials if credentials else "")
        if key is None:
            raise errors.ApiError(401, "invalid_api_key", "give a valid key: `Authorization: Bearer KEY`")
        request.state.key_id = key.id
        seconds = gateway.rates.take(key.id, key.limits.requests_per_minute)
        if seconds:
            gateway.metrics.refusals.labels(key.id, "rate_limit_exceeded").inc()
            message = f"this key may ask {key.limits.requests_per_minute} times a minute"
            raise errors.ApiError(429, "rate_limit_exceeded", message, retry_after=seconds)
        return key

    return authenticate


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health/live", tags=["health"], response_model=Health)
    async def live() -> Health:
        """Whether this process responds."""
        return Health(status="ok")

    @app.get("/health/ready", tags=["health"], response_model=Health, responses={503: {"model": Health}})
    async def ready(response: Response) -> Health:
        """Whether videos can be generated: the store responds, a server is healthy, this gateway is not ending."""
        if await gateway.is_ready():
            return Health(status="ok")
        response.status_code = 503
        return Health(status="not ready")

    @app.get("/health/idle", tags=["health"], response_model=Health, responses={503: {"model": Health}})
    async def idle(response: Response) -> Health:
        """Whether this gateway is paused (SIGUSR1; SIGUSR2 resumes), and no job runs on a server."""
        if gateway.runner.is_idle:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="not idle")


_FRONT = """<!doctype html><html lang=en><meta charset="utf-8"><title>megadit</title>
<style>body { font: 16px/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }</style>
<h1>megadit: videos from text</h1><p>This address is the HTTP API of a service.
<ul><li><a href="/docs">/docs</a> describes it (any name, and your key as the password);
<li><code>POST /v1/videos</code> makes a video, with the header <code>Authorization: Bearer KEY</code>;
<li><a href="/health/ready">/health/ready</a> says whether the model is loaded.</ul>
<p>Keys are made by <code>megadit serve keys add NAME</code>; a page to try prompts on is started by
<code>megadit serve demo --url ADDRESS --key_file FILE</code>."""


def _add_front(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(_FRONT)


def _add_documentation(app: FastAPI, gateway: Gateway) -> None:
    """The OpenAPI page, also for browsers by basic authentication: the password is the key."""
    described = app.openapi

    def with_bodies() -> dict[str, Any]:
        schema = described()
        schema["components"]["schemas"] |= BODIES
        return schema

    app.openapi = with_bodies

    def is_unchanged(request: Request) -> bool:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                value = ""
        return gateway.keys.check(value) is not None

    def refusal() -> Response:
        return Response("a key is needed, as the password", 401, {"WWW-Authenticate": 'Basic realm="megadit"'})

    @app.get("/openapi.json", include_in_schema=False)
    def description(request: Request) -> Response:
        return JSONResponse(app.openapi()) if is_unchanged(request) else refusal()

    @app.get("/docs", include_in_schema=False)
    def page(request: Request) -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=HEADERS) if is_unchanged(request) else refusal()
