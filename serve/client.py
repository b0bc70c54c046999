"""Client of the service: a stream of progress, previews and results, over gRPC or HTTP.

    client = VideoClient("localhost")
    for video in client.generate(VideoRequest(prompt="a red seven moving left", seed=7), on_progress=print):
        Path(f"{video.index}{video.suffix}").write_bytes(video.data)

`stream` yields the events as they come, and can be cancelled from any thread.
"""

import json
import threading
from collections.abc import Callable, Iterator

from megadit.models.shared.errors import UserError
from megadit.serve.contract import MODEL, VideoRequest
from megadit.serve.events import Event, InvalidRequestError, ServiceError, StepDone, VideoResult
from megadit.serve.service_info import ServiceInfo
from megadit.serve.transports import connect


class Generation:
    """The events of one request, to iterate over once.

    Leaving the iteration early cancels the request, and so does `cancel`, from any thread: the iteration then raises
    `CancelledError`, and the service stops within a denoising step.
    """

    def __init__(self, events: Callable[[threading.Event], Iterator[Event]]) -> None:
        self._cancelled = threading.Event()
        self._events = events(self._cancelled)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        """Cancels the request if it is still running."""
        self._cancelled.set()
        self._events.close()


class VideoClient:
    """Client of one service.

    `url` is `grpc://host:port`, `http://host:port` (or https), or a host alone, which means gRPC on its default port
    or, if that does not respond, HTTP on its default port.

    Raises:
        UserError: for a malformed URL.
        UnavailableError: if there is no response.
    """

    def __init__(self, url: str = "localhost", *, model: str = MODEL) -> None:
        self.model = model
        self._transport = connect(url)
        self._info: ServiceInfo | None = None

    @property
    def url(self) -> str:
        return self._transport.url

    def is_ready(self) -> bool:
        """Whether the model is loaded and takes requests."""
        return self._transport.is_ready(self.model)

    def info(self) -> ServiceInfo:
        """Defaults, limits and samplers of the service. Raises ServiceError if the model is missing, or is not a model
        of megadit."""
        try:
            parameters = self._transport.config(self.model)["parameters"]
            return ServiceInfo.from_json(parameters["service"]["string_value"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ServiceError(f"{self.model} at {self.url} is not a model of megadit") from error

    def with_model(self, model: str) -> "VideoClient":
        """A client for another model of the same server."""
        return VideoClient(self.url, model=model)

    def adapters(self) -> list[str]:
        """Names of adapters that a request may use, when the service was built."""
        info = self.info().adapters
        return [] if info is None else list(info.names)

    def stream(
        self, request: VideoRequest, *, timeout: float | None = None, priority: int = 0, traceparent: str | None = None
    ) -> Generation:
        """StepDone and videos as they come; the request is sent when the iteration begins.

        `timeout` is in seconds, including the time in the queue. `priority`: 1 is served first, 0 is the service's
        default. `traceparent` (W3C) is the parent span of the request's, if the service records traces.
        The iteration raises `ServiceError` or its subclasses.
        """

        def events(cancelled: threading.Event) -> Iterator[Event]:
            self._info = self._info or self.info()
            # Triton batches only requests with the same inputs, so every request sends all of them.
            try:
                inputs = self._info.filled(request).to_inputs()
            except UserError as error:
                raise InvalidRequestError(str(error)) from error
            yield from self._transport.events(
                self.model, inputs, timeout=timeout, priority=priority, traceparent=traceparent, cancelled=cancelled
            )

        return Generation(events)

    def generate(
        self,
        request: VideoRequest,
        *,
        on_progress: Callable[[StepDone], None] | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> list[VideoResult]:
        """The videos of a request, in order; `on_progress` is called for every step.

        Raises:
            ServiceError: or the subclass that says more.
        """
        videos = []
        for event in self.stream(request, timeout=timeout, priority=priority):
            if isinstance(event, VideoResult):
                videos.append(event)
            elif on_progress is not None:
                on_progress(event)
        return sorted(videos, key=lambda video: video.index)
