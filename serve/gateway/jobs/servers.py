"""The Triton servers behind the gateway: their health, models and clients."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megadit.models.shared.errors import UserError
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError, ServiceError
from megadit.serve.service_info import ServiceInfo
from megadit.serve.transports import check_address

_PROOF_SECONDS = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """One Triton server."""

    url: str
    """Address for `VideoClient`."""
    models: tuple[str, ...]
    slots: int
    """Most jobs at once; Triton's batcher groups those of equal settings."""
    infos: dict[str, ServiceInfo] = field(default_factory=dict)
    """Latest description of each of its models."""
    silent_since: float | None = field(default_factory=time.monotonic)
    """When it stopped responding (monotonic seconds); None while it responds."""
    is_proven: bool = False
    """Whether its model has responded since its last failure: a Triton whose stub died still reports ready."""
    complaint: str | None = None
    """Why the last probe failed, if known."""
    free: threading.Semaphore = field(init=False)
    _clients: dict[str, VideoClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = threading.Semaphore(self.slots)

    @property
    def is_healthy(self) -> bool:
        return self.silent_since is None and self.is_proven

    def probe(self) -> bool:
        """Checks that all models are loaded and reads their descriptions; returns whether it is healthy."""
        return self._note(self._probe)

    def is_responding(self) -> bool:
        """Whether all models are loaded; faster than `probe`, since each job waits for it."""
        return self._note(lambda model: self.client(model).is_ready())

    def _note(self, is_loaded: Callable[[str], bool]) -> bool:
        self.complaint, is_ready = None, False
        try:
            is_ready = all(is_loaded(model) for model in self.models)
            self.is_proven = is_ready and (self.is_proven or all(self._prove(model) for model in self.models))
        except Exception as error:  # the server may be something else than Triton
            self.complaint = str(error).partition("\n")[0][:300]
        if is_ready:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since, self.is_proven = time.monotonic(), False
        return self.is_healthy

    def suspect(self) -> None:
        """Gives it no work until its model has responded to a request."""
        self.is_proven = False

    def seconds_silent(self) -> float:
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def client(self, model: str) -> VideoClient:
        """Raises UnavailableError if there is no response."""
        if model not in self._clients:
            self._clients[model] = VideoClient(self.url, model=model)
        return self._clients[model]

    def _probe(self, model: str) -> bool:
        client = self.client(model)
        if not client.is_ready():
            return False
        self.infos[model] = client.info()
        return True

    def _prove(self, model: str) -> bool:
        """Whether the model refuses an invalid request, which needs a living stub and no work."""
        try:
            self.client(model).generate(VideoRequest(prompt="", num_steps=-1), timeout=_PROOF_SECONDS)
        except InvalidRequestError:
            return True
        except ServiceError:
            pass
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """All Triton servers behind the gateway; they serve the same models."""

    all: tuple[Server, ...]
    models: tuple[str, ...]

    @classmethod
    def of(cls, urls: tuple[str, ...], models: tuple[str, ...], *, slots: int) -> "Servers":
        """Raises UserError for an invalid address, and for HTTP, over which a hanging request cannot be cancelled."""
        for url in urls:
            if check_address(url).scheme not in ("", "grpc", "unix"):
                raise UserError(f"{url!r} is an HTTP address; a gateway needs gRPC: grpc://HOST:PORT")
        return cls(all=tuple(Server(url=url, models=models, slots=slots) for url in urls), models=models)

    @property
    def num_healthy(self) -> int:
        return sum(server.is_healthy for server in self.all)

    def info(self, model: str) -> ServiceInfo | None:
        """Return a healthy server's description of a model, else the latest of any server; None if there is none."""
        ordered = sorted(self.all, key=lambda server: not server.is_healthy)
        return next((server.infos[model] for server in ordered if model in server.infos), None)
