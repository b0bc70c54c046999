"""The FastAPI application of a gateway: `create_app`. Only health routes work without a key."""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from html import escape
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware.cors import CORSMiddleware

from megadit.serve.gateway import errors
from megadit.serve.gateway.http.adapter_routes import adapter_routes
from megadit.serve.gateway.http.middleware import Surroundings, key_text
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
_STRANGERS_AT_ONCE = 2
"""Most keys that are looked up at once, of those that were never valid: anybody can make up any number."""
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
    admit = _admission(gateway)

    async def authenticate(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Key:
        return await admit(request, credentials.credentials if credentials else "")

    app.include_router(video_routes(gateway, authenticate))
    app.include_router(adapter_routes(gateway, authenticate))
    _add_health(app, gateway)
    _add_documentation(app, admit)

    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(_FRONT)

    app.add_middleware(
        Surroundings, metrics=gateway.metrics, tracing=gateway.tracing, max_body_bytes=gateway.settings.max_body_bytes
    )
    if gateway.settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=gateway.settings.cors_origins, **_CORS)
    return app


_Admit = Callable[[Request, str], Awaitable[Key]]


def _admission(gateway: Gateway) -> _Admit:
    known: set[bytes] = set()
    strangers = CapacityLimiter(_STRANGERS_AT_ONCE)

    async def admit(request: Request, text: str) -> Key:
        """The key of a request, if its rate limit allows the request."""
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        key = await to_thread.run_sync(check, request, text, limiter=None if digest in known else strangers)
        known.add(digest)
        return key

    def check(request: Request, text: str) -> Key:
        key = gateway.keys.check(text)
        if key is None:
            raise errors.ApiError(401, "invalid_api_key", "give a valid key: `Authorization: Bearer KEY`")
        request.state.key_id = key.id
        seconds = gateway.rates.take(key.id, key.limits.requests_per_minute)
        if seconds:
            gateway.metrics.refusals.labels(key.id, "rate_limit_exceeded").inc()
            message = f"this key may ask {key.limits.requests_per_minute} times a minute"
            raise errors.ApiError(429, "rate_limit_exceeded", message, retry_after=seconds)
        return key

    return admit


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


def _add_documentation(app: FastAPI, admit: _Admit) -> None:
    """The OpenAPI page, also for browsers by basic authentication: the password is the key."""
    described = app.openapi

    def with_bodies() -> dict[str, Any]:
        schema = described()
        schema["components"]["schemas"] |= BODIES
        return schema

    app.openapi = with_bodies

    async def refusal(request: Request) -> Response | None:
        try:
            await admit(request, key_text(request.headers.get("authorization", "")))
        except errors.ApiError as error:
            if error.status != 401:
                raise
            return Response("a key is needed, as the password", 401, {"WWW-Authenticate": 'Basic realm="megadit"'})
        return None

    @app.get("/openapi.json", include_in_schema=False)
    async def description(request: Request) -> Response:
        return await refusal(request) or await to_thread.run_sync(lambda: JSONResponse(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def page(request: Request) -> Response:
        def of_all() -> Response:
            return HTMLResponse(docs_page(app.openapi()), headers=HEADERS)

        return await refusal(request) or await to_thread.run_sync(of_all)


# Documentation of the API as one page, without scripts or external resources, so that it works offline.

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0; overflow-wrap: anywhere }
summary b { display: inline-block; min-width: 4.5rem }
details { border-top: 1px solid #8884 } details > div { padding: 0 0 1rem 1rem }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .6rem .2rem 0; vertical-align: top }
pre { overflow-x: auto; background: #8882; padding: .6rem } :root { color-scheme: light dark }"""


def docs_page(described: Mapping[str, Any]) -> str:
    """The page of an OpenAPI description."""
    info = described["info"]
    parts = "".join(_operations(described))
    about = escape(info["description"]).replace("\n", " ")
    return (
        f'<!doctype html><html lang=en><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{escape(info["title"])}</h1>'
        f'<p>{about}<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.{parts}'
    )


def _operations(described: Mapping[str, Any]) -> Iterator[str]:
    group = None
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != group:
                group = operation["tags"][0]
                yield f"<h2>{escape(group)}</h2>"
            description = escape(operation.get("description", "")).replace("\n\n", "<p>")
            rows = "".join(_rows(operation, described["components"]["schemas"]))
            yield (
                f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary><div><p>{description}"
                f"<table>{rows}</table><pre>{escape(_example(method, path, operation))}</pre></div></details>"
            )


def _rows(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """A line of the table for each parameter, and each field of the body."""
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], parameter["in"], parameter["schema"], parameter.get("description", ""))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content["schema"], schemas)
        yield f"<tr><td colspan=3><b>{escape(kind)}</b>"
        for name, about in schema.get("properties", {}).items():
            yield _row(name, _type(_resolved(about, schemas)), about, about.get("description", ""))


def _row(name: str, kind: str, schema: Mapping[str, Any], description: str) -> str:
    choices = ", ".join(map(str, schema.get("enum", ())))
    return f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(description or choices)}"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _type(schema: Mapping[str, Any]) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    return ", ".join(str(each.get("format", each["type"])) for each in kinds if each.get("type", "null") != "null")


def _example(method: str, path: str, operation: Mapping[str, Any]) -> str:
    words = ["curl", *(["-X", method.upper()] if method != "get" else []), f"http://HOST:8080{path}"]
    if not path.startswith("/health/"):
        words += ["-H 'Authorization: Bearer KEY'"]
    kinds = operation.get("requestBody", {}).get("content", {})
    if "application/json" in kinds:
        words += ['--json \'{"prompt": "a red seven moving left"}\'']
    elif kinds:
        words += ["-F name=NAME -F file=@FILE"]
    return " ".join(words)
