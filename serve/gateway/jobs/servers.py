"""The Triton servers behind the gateway: which are healthy, what they offer, and how to ask them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megadit.models.shared.errors import UserError
from megadit.serve.client import VideoClient
from megadit.serve.contract import ServiceInfo, VideoRequest
from megadit.serve.events import InvalidRequestError, ServiceError
from megadit.serve.transports import check_address

_PROOF_SECONDS = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """One Triton server."""

    url: str
    """Address for `VideoClient`."""
    models: tuple[str, ...]
    slots: int
    """Jobs that it is given at once; Triton's batcher makes those of equal settings together."""
    infos: dict[str, ServiceInfo] = field(default_factory=dict)
    """Latest description of each of its models."""
    silent_since: float | None = field(default_factory=time.monotonic)
    """When it stopped answering (monotonic seconds); None while it answers."""
    is_proven: bool = False
    """Whether its model has answered a request since it last failed: a Triton whose stub died says that it is ready."""
    complaint: str | None = None
    """Why the last probe failed, as far as that was told."""
    free: threading.Semaphore = field(init=False)
    _clients: dict[str, VideoClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = threading.Semaphore(self.slots)

    @property
    def is_healthy(self) -> bool:
        return self.silent_since is None and self.is_proven

    def probe(self) -> bool:
        """Asks whether all models are loaded and what they offer; notes whether it is healthy, and says so."""
        return self._note(self._probe)

    def is_responding(self) -> bool:
        """Whether all models are loaded, which is all that this asks (unlike `probe`): each job waits for it."""
        return self._note(lambda model: self.client(model).is_ready())

    def _note(self, is_loaded: Callable[[str], bool]) -> bool:
        self.complaint, is_ready = None, False
        try:
            is_ready = all(is_loaded(model) for model in self.models)
            self.is_proven = is_ready and (self.is_proven or all(self._prove(model) for model in self.models))
        except Exception as error:  # whatever answers there need not be a Triton
            self.complaint = str(error).partition("\n")[0][:300]
        if is_ready:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since, self.is_proven = time.monotonic(), False
        return self.is_healthy

    def suspect(self) -> None:
        """Gives it no work until its model has answered a request."""
        self.is_proven = False

    def seconds_silent(self) -> float:
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

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

    def _prove(self, model: str) -> bool:
        """Whether the model refuses what it must refuse, which takes a living stub and no work."""
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
        """Raises:
        UserError: for what is no address, and for one of HTTP, over which what hangs cannot be cancelled.
        """
        for url in urls:
            if check_address(url).scheme not in ("", "grpc", "unix"):
                raise UserError(f"{url!r} is asked over HTTP; a gateway asks its servers over gRPC: grpc://HOST:PORT")
        return cls(all=tuple(Server(url=url, models=models, slots=slots) for url in urls), models=models)

    @property
    def num_healthy(self) -> int:
        return sum(server.is_healthy for server in self.all)

    def info(self, model: str) -> ServiceInfo | None:
        """Return the description of a model by a healthy server, else the latest by any; None if there is none."""
        ordered = sorted(self.all, key=lambda server: not server.is_healthy)
        return next((server.infos[model] for server in ordered if model in server.infos), None)
