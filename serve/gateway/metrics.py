"""Metrics for Prometheus: the queue, the time of each stage, and the outcome of every video."""

import platform
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from megadit.models.shared.addresses import port_error
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.store.database import in_a_line

_NOBODYS = {("", "queued"): 0, ("", "in_progress"): 0}
"""Zero values that are reported without keys: autoscaling takes a missing metric for a fault."""
_ASKED_AT_ONCE = 8
"""Connections to the metrics; further ones are closed."""
_SECONDS_OF_A_SCRAPE = 30.0
"""Longest time of a connection to the metrics, however many bytes come meanwhile."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """Metrics in a separate registry, so that two gateways in one process do not conflict."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = counter("megadit_http_requests", "answered requests", ["method", "route", "status"])
        self.request_seconds = histogram(
            "megadit_http_request_seconds",
            "seconds from a request to the end of its answer (of /events, while its client reads)",
            ["method", "route"],
        )
        Info("megadit_build", "what runs", registry=self.registry).info(
            {"version": version("megadit"), "python": platform.python_version()}
        )
        self.videos = counter("megadit_videos", "videos that ended", ["key", "model", "outcome"])
        self.errors = counter("megadit_video_errors", "videos that failed", ["key", "code"])
        self.interruptions = counter(
            "megadit_interruptions", "runs that their server or gateway did not finish", ["server"]
        )
        self.refusals = counter("megadit_refusals", "requests over a limit", ["key", "code"])
        self.stages = histogram(
            "megadit_stage_seconds",
            "seconds that a video spends in the queue, at Triton, and being stored",
            ["stage", "key"],
        )
        self.webhooks = counter("megadit_webhooks", "webhooks sent", ["outcome"])
        self.webhook_attempts = counter("megadit_webhook_attempts", "calls of webhooks", ["result"])
        self.streams = Gauge("megadit_open_streams", "progress streams being read", registry=self.registry)

    def watch(
        self,
        counts: Callable[[], dict[tuple[str, str], int]],
        health: Callable[[], dict[str, bool]],
        has_space: Callable[[], bool],
    ) -> None:
        """Reads the queue, the servers' health and the free space at each scrape."""
        self.registry.register(_Queue(counts, health, has_space))


class _Queue(Collector):
    def __init__(
        self,
        counts: Callable[[], dict[tuple[str, str], int]],
        health: Callable[[], dict[str, bool]],
        has_space: Callable[[], bool],
    ) -> None:
        self._counts, self._health, self._has_space = counts, health, has_space

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("megadit_jobs", "videos that wait or run", labels=["key", "status"])
        try:
            for labels, count in (_NOBODYS | self._counts()).items():
                jobs.add_metric(labels, count)
        except SQLAlchemyError as error:  # other metrics are still reported
            log("store failed", reason=in_a_line(error))
        up = GaugeMetricFamily("megadit_server_up", "whether a Triton server takes work", labels=["server"])
        for url, is_healthy in self._health().items():
            up.add_metric([url], is_healthy)
        space = GaugeMetricFamily("megadit_has_space", "whether --min_free_bytes are free, so that videos are accepted")
        with suppress(OSError):  # the disk is gone
            space.add_metric([], self._has_space())
        return [jobs, up, space]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # avoids a query of the store when it is registered


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each connection, and few connections."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.Semaphore(_ASKED_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        over = threading.Timer(_SECONDS_OF_A_SCRAPE, _end, [request])
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._places.release()


def _end(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = 5
    """Seconds of silence."""

    def log_message(self, *_: Any) -> None:
        """Logs nothing: Prometheus scrapes every few seconds."""


def serve_metrics(metrics: Metrics, host: str, port: int) -> None:
    """Serves metrics in a thread until the process ends."""
    try:
        server = make_server(host, port, make_wsgi_app(metrics.registry), _Server, _Handler)
    except OSError as error:
        raise port_error(host, port, "--metrics_port", error, "metrics") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
