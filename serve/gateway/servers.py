"""The Triton servers behind the gateway: which are healthy, what they offer, and how to ask them."""

import threading
import time
from dataclasses import dataclass, field

from megadit.serve.client import VideoClient
from megadit.serve.contract import ServiceError, ServiceInfo


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """One Triton server."""

    url: str
    """As `VideoClient` takes it."""
    models: tuple[str, ...]
    slots: int
    """Jobs that it is given at once; Triton's batcher makes those of equal settings together."""
    infos: dict[str, ServiceInfo] = field(default_factory=dict)
    """What its models said last."""
    failing_since: float | None = field(default_factory=time.monotonic)
    """When it stopped answering (monotonic seconds); None while it is healthy."""
    free: threading.Semaphore = field(init=False)
    _clients: dict[str, VideoClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = threading.Semaphore(self.slots)

    @property
    def is_healthy(self) -> bool:
        return self.failing_since is None

    def probe(self) -> bool:
        """Asks whether all models are loaded and what they offer; notes the answer."""
        try:
            is_ready = all(self._probe(model) for model in self.models)
        except ServiceError:
            is_ready = False
        if is_ready:
            self.failing_since = None
        else:
            self.suspect()
        return is_ready

    def suspect(self) -> None:
        """Gives it no work until it answers a probe."""
        if self.failing_since is None:
            self.failing_since = time.monotonic()

    def seconds_failing(self) -> float:
        return 0.0 if self.failing_since is None else time.monotonic() - self.failing_since

    def client(self, model: str) -> VideoClient:
        """Raises:
        UnavailableError: if nothing answers.
        """
        if model not in self._clients:
            self._clients[model] = VideoClient(self.url, model=model)
        return self._clients[model]

    def _probe(self, model: str) -> bool:
        client = self.client(model)
        if not client.is_ready():
            return False
        self.infos[model] = client.info()
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """All of them; they serve the same models."""

    all: tuple[Server, ...]
    models: tuple[str, ...]

    @classmethod
    def of(cls, urls: tuple[str, ...], models: tuple[str, ...], *, slots: int) -> "Servers":
        return cls(all=tuple(Server(url=url, models=models, slots=slots) for url in urls), models=models)

    @property
    def num_healthy(self) -> int:
        return sum(server.is_healthy for server in self.all)

    def info(self, model: str) -> ServiceInfo | None:
        """What a model offers: as a healthy server says, else as any said last; None if none ever did."""
        ordered = sorted(self.all, key=lambda server: not server.is_healthy)
        return next((server.infos[model] for server in ordered if model in server.infos), None)
