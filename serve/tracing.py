"""Traces of requests (OpenTelemetry): spans from the gateway to the denoiser's steps, sent by OTLP over HTTP.

Off, without importing OpenTelemetry's SDK, unless OpenTelemetry's variables name a collector
(`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`). Context is passed on as a W3C `traceparent`: in
a header, in the job store, as a parameter of a request to Triton. Spans hold names, numbers and codes, but no prompts,
files, keys or error messages, which could quote these.

Spans wait in a bounded queue for a thread that sends them; if the collector does not respond they are dropped.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal
from urllib.parse import urlsplit

from megadit.models.shared.errors import UserError

TRACEPARENT = "traceparent"
"""HTTP header, and parameter of a request to Triton."""
HERE: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The traceparent of the current HTTP request."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SECONDS_TO_FLUSH = 3.0
"""Seconds that the end of a process may wait for the last spans to be sent."""
_MOST_EVENTS = 1000
"""Most steps in a span, unless OTEL_SPAN_EVENT_COUNT_LIMIT says otherwise; OpenTelemetry's default is 128."""

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int | float | bool]


class Span:
    """A span, recorded when it ends. `NOTHING` and its children record nothing."""

    def __init__(self, tracing: "Tracing | None" = None, span: Any = None) -> None:
        """`span` is an OpenTelemetry span."""
        self._tracing, self._span = tracing, span

    @property
    def traceparent(self) -> str | None:
        """Trace context for its children; None if nothing is recorded."""
        return None if self._span is None else _traceparent(self._span)

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: Kind = "internal", links: Sequence["Span"] = ()
    ) -> "Span":
        """Begins a child span; `links` are spans of other requests that share the work."""
        if self._tracing is None:
            return self
        return self._tracing.begin(name, self.traceparent, attributes, kind=kind, links=links)

    def note(self, attributes: Attributes, *, name: str | None = None) -> None:
        """Adds attributes, and may change its name."""
        if self._span is not None:
            self._span.set_attributes(attributes)
            if name is not None:
                self._span.update_name(name)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._span is not None:
            self._span.add_event(name, attributes)

    def end(self, error: str | None = None, *, at: float | None = None) -> None:
        """Ends it, at a time (seconds since 1970) or now; `error` is a code. A second end changes nothing."""
        if self._span is None or not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(at))

    @property
    def _context(self) -> Any:
        return None if self._span is None else self._span.get_span_context()

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(None if kind is None else kind.__name__)


NOTHING = Span()


class Tracing:
    """Traces of the requests that a process serves."""

    def __init__(self, provider: Any = None) -> None:
        """`provider` is a private OpenTelemetry provider; None: nothing is recorded."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("megadit")

    @classmethod
    def of_environment(cls, service: str) -> "Tracing":
        """Set up traces by OpenTelemetry's variables; `service` is the default of OTEL_SERVICE_NAME. Raises UserError
        if they enable traces, and the libraries are missing or cannot send them there."""
        if not is_asked_for(os.environ):
            return cls()
        _check(os.environ)
        try:
            return cls(_provider(service))
        except ImportError:
            raise UserError(
                "traces (OTEL_EXPORTER_OTLP_ENDPOINT) need OpenTelemetry's SDK: pip install 'megadit[otel]'"
            ) from None

    def begin(
        self,
        name: str,
        parent: str | None,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        at: float | None = None,
        links: Sequence[Span] = (),
        may_be_root: bool = False,
    ) -> Span:
        """Begins a span of the trace of `parent` (a traceparent), at a time (seconds since 1970) or now.

        Without a parent, a trace begins if `may_be_root`; else nothing is recorded.
        """
        if self._tracer is None or not (parent or may_be_root):
            return NOTHING
        from opentelemetry.trace import Link, SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent} if parent else {})
        if not context and not may_be_root:
            return NOTHING  # the parent was not a valid traceparent
        linked = [Link(context) for context in (span._context for span in links) if context is not None]
        span = self._tracer.start_span(
            name, context, SpanKind[kind.upper()], attributes, linked, _nanoseconds(at), record_exception=False
        )
        return Span(self, span)

    def close(self) -> None:
        """Sends waiting spans, within a few seconds, and ends."""
        if self._provider is not None:
            # in a thread, because the exporter's own timeout may be longer
            thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            thread.start()
            thread.join(_SECONDS_TO_FLUSH)


@contextmanager
def shared(spans: Sequence[Span], name: str, attributes: Attributes | None = None) -> Iterator[list[Span]]:
    """Begins a child of each span around work shared by all, each linked to the other spans."""
    children = [span.child(name, attributes, links=[other for other in spans if other is not span]) for span in spans]
    error = None
    try:
        yield children
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        for child in children:
            child.end(error)


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables enable traces."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none"
    return not is_off and any(environment.get(name, "").strip() for name in _ENDPOINTS)


def _check(environment: Mapping[str, str]) -> None:
    """Raises UserError for invalid variables, without quoting values: an address may hold a password."""
    name = next(name for name in _ENDPOINTS if environment.get(name, "").strip())
    try:
        parts = urlsplit(environment[name])
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address:
        raise UserError(f"{name} is not the address of a collector; use http://HOST:4318")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name, "").strip()), "http/protobuf")
    if protocol.strip() != "http/protobuf":
        raise UserError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: traces are sent only as http/protobuf, to port 4318 of most "
            "collectors"
        )


def _provider(service: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if resource.attributes.get("service.name", "unknown_service").startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    limits = SpanLimits() if "OTEL_SPAN_EVENT_COUNT_LIMIT" in os.environ else SpanLimits(max_events=_MOST_EVENTS)
    provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
