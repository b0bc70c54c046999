"""A collector of traces (OTLP over HTTP) in this process: what it was sent, decoded."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True, kw_only=True)
class Received:
    """A span as it came."""

    service: str
    message: SpanMessage

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def id(self) -> str:
        return self.message.span_id.hex()

    @property
    def trace(self) -> str:
        return self.message.trace_id.hex()

    @property
    def parent(self) -> str:
        return self.message.parent_span_id.hex()

    @property
    def is_error(self) -> bool:
        return self.message.status.code == Status.STATUS_CODE_ERROR

    @property
    def links(self) -> set[str]:
        return {link.span_id.hex() for link in self.message.links}

    @property
    def seconds(self) -> float:
        return (self.message.end_time_unix_nano - self.message.start_time_unix_nano) / 1e9

    @property
    def attributes(self) -> dict[str, object]:
        return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in self.message.attributes}

    @property
    def steps(self) -> list[int]:
        return [event.attributes[0].value.int_value for event in self.message.events if event.name == "step"]


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self._received: list[Received] = []
        self.bodies: list[bytes] = []

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self._received += [Received(service=names["service.name"], message=span) for span in scope.spans]

    def trace(self, trace: str) -> list[Received]:
        """The spans of a trace so far, by the time they began."""
        found = [span for span in list(self._received) if span.trace == trace]
        return sorted(found, key=lambda span: span.message.start_time_unix_nano)

    def all(self) -> list[Received]:
        return list(self._received)

    def wait(self, is_there: Callable[[], bool], *, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < deadline, [(span.name, span.trace) for span in self._received]
            time.sleep(0.01)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
