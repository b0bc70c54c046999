"""The gateway's parts (store, keys, servers, runner, results) and its periodic cleanup."""

import asyncio
import itertools
import re
import shutil
import socket
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from megadit.infer.media.reader import MediaReader, within_total
from megadit.infer.media.signing import SigningOptions, load_marker
from megadit.models.diffusion.conditioning_settings import MediaLimits, split_keyframe
from megadit.models.shared.cli.setting import check_settings, group, setting
from megadit.models.shared.errors import UserError
from megadit.serve.contract import MODEL, VideoRequest
from megadit.serve.gateway.adapters import Adapters
from megadit.serve.gateway.jobs.runner import Runner, RunnerSettings
from megadit.serve.gateway.jobs.servers import Servers
from megadit.serve.gateway.jobs.webhooks import Webhooks
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.media import Uploads
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.store.clock import Heart
from megadit.serve.gateway.store.database import Database, holds_password, in_a_line, store_url
from megadit.serve.gateway.store.keys import KeyRing
from megadit.serve.gateway.store.quotas import Rates
from megadit.serve.gateway.store.results import Results
from megadit.serve.gateway.store.store import JobStore
from megadit.serve.gateway.turns import Turns
from megadit.serve.tracing import Tracing

_SECONDS_BETWEEN_BEATS = 1.0
_BEATS_BETWEEN_PURGES = 60
_SECONDS_FOR_READINESS = 1.0
_READERS = 2
"""Processes that check uploaded files."""
_MOST_BODIES = 64
"""Most bodies of a key that are read or wait to be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Settings of a gateway."""

    servers: tuple[str, ...] = setting(
        ("grpc://127.0.0.1:8001",),
        "a Triton server, grpc://HOST:PORT; may be repeated (default: grpc://127.0.0.1:8001)",
        names=("--server",),
        metavar="URL",
        repeated=True,
    )
    models: tuple[str, ...] = setting(
        (MODEL,),
        f"a model to serve; may be repeated (default: {MODEL})",
        names=("--model",),
        metavar="NAME",
        repeated=True,
    )
    store: str = setting(
        "gateway/jobs.sqlite", "file or database URL of jobs and keys (default: {default})", metavar="PATH"
    )
    """Several gateways may share a database."""
    results: str = setting("gateway/videos", "folder or fsspec URL of videos (default: {default})", metavar="URL")
    adapters: str = setting(
        "", "folder of adapters, that of `build-repository`; keys may add their own (default: none)", metavar="DIR"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origin whose pages may ask from browsers, https://HOST or *; may be repeated (default: none)",
        names=("--cors_origin",),
        metavar="ORIGIN",
        repeated=True,
    )
    name: str = setting("", "unique name of this gateway at its store (default: HOST:PORT)")
    slots: int = setting(8, "jobs on each server at once (default: {default})", low=1, metavar="N")
    max_body_bytes: int = setting(1 << 20, "bytes of a request (default: 1 MiB)", low=1, metavar="N")
    max_upload_bytes: int = setting(48 << 20, "bytes of a request with files (default: 48 MiB)", low=1, metavar="N")
    max_uploads: int = setting(4, "requests with files of a key at once (default: {default})", low=1, metavar="N")
    max_streams: int = setting(
        32, "progress streams, waiting requests and downloads of a key at once (default: {default})", low=1, metavar="N"
    )
    min_free_bytes: int = setting(1 << 28, "bytes to leave free on disks (default: 256 MiB)", metavar="N")
    """Disks of the store and the results; with less free space, no job is accepted."""
    history_seconds: float = setting(
        30 * 86_400.0, "seconds after its end until a job is deleted (default: 30 days)", metavar="S"
    )
    private_webhooks: bool = setting(False, "allow webhooks to this machine or its network")
    runner: RunnerSettings = group(RunnerSettings)
    signing: SigningOptions = group(SigningOptions, "signatures (C2PA) in pictures of videos (Triton signs the videos)")

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.servers:
            raise UserError("give at least one server, such as grpc://127.0.0.1:8001")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UserError(f"--cors_origin {origin}: give scheme and host alone, such as https://videos.example")
        if holds_password(self.store):
            raise UserError(
                "the store's URL holds a password, which every user of this machine would see in the process list; "
                "give postgresql+psycopg://USER@HOST/DB?passfile=FILE (a password file of PostgreSQL's)"
            )


class Gateway:
    """Everything behind the routes."""

    def __init__(self, settings: GatewaySettings, *, port: int = 0) -> None:
        """Opens the store and the results; nothing runs before `start`. Raises UserError for a store or results that
        cannot be used, and for invalid options of signing or tracing."""
        self.settings = settings
        self.tracing = Tracing.of_environment("megadit-gateway")
        self.database = Database(settings.store)
        self.keys = KeyRing(self.database)
        self.store = JobStore(self.database, owner=settings.name or f"{socket.gethostname()}:{port}")
        self.results = Results(settings.results)
        self.results.claim(self.database.store_id, self.store.knows)
        self.adapters = Adapters(settings.adapters)
        self.mark = load_marker(settings.signing)
        self.metrics = Metrics()
        self.rates = Rates(self.database)
        self.servers = Servers.of(settings.servers, settings.models, slots=settings.slots)
        self.uploads = Uploads(
            most_bytes=settings.max_upload_bytes,
            most_at_once=settings.max_uploads,
            usual_bytes=settings.max_body_bytes,
            most_usual=_MOST_BODIES,
        )
        self.reading = Turns(1, waiting=_MOST_BODIES, rest=3.0)
        """Turns to read large bodies."""
        self.decoding = Turns(_READERS, waiting=_MOST_BODIES)
        """Turns to decode files, once they are known to be a request's."""
        self.looking = Turns(1, waiting=_MOST_BODIES)
        """Turns to look at adapters."""
        self.picturing = Turns(1)
        """Turns to make pictures of videos, each of which takes a core."""
        self.undecided: deque[tuple[str, str]] = deque()
        """Id of a job and name of its files, where the store failed when it was created."""
        self._readers: dict[MediaLimits, MediaReader] = {}
        self.runner = Runner(
            self.store, self.servers, self.results, self.metrics, self.tracing, settings=settings.runner
        )
        self.metrics.watch(
            self.store.counts, lambda: {server.url: server.is_healthy for server in self.servers.all}, self.has_space
        )
        self._webhooks = Webhooks(self.store, self.keys, self.metrics, may_be_private=settings.private_webhooks)
        self._heart = Heart(self.database, self.store.owner)
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="readiness")
        self._asked: Future | None = None
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeper", daemon=True)

    def start(self) -> None:
        """Starts the gateway; raises UserError if a gateway of the same name is running."""
        self._heart.claim()
        self.results.sweep(self.store.has_result)
        self.runner.start()
        self._webhooks.start()
        self._housekeeper.start()

    def stop(self, drain_seconds: float) -> None:
        """Lets running jobs finish, puts back the others, and closes the store."""
        self.runner.drain(drain_seconds)
        self._webhooks.stop()
        self._stopping.set()
        self._housekeeper.join()
        with suppress(SQLAlchemyError):
            if not self.store.has_unfinished():  # which others take over from a dead gateway
                self._heart.leave()
        self._asker.shutdown()
        for reader in self._readers.values():
            reader.close()
        self.database.close()
        self.tracing.close()

    async def is_ready(self) -> bool:
        """Whether the store responds, a server is healthy and this gateway is not ending; returns within a timeout."""
        if self.runner.is_draining or not self.servers.num_healthy:
            return False
        if self._asked is None or self._asked.done():  # at most one query waits for a store that does not respond
            self._asked = self._asker.submit(self._ask_store)
        done, _ = await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=_SECONDS_FOR_READINESS)
        return any(answer.exception() is None for answer in done)

    def _ask_store(self) -> None:
        self.store.has_queued()
        self.database.check_writable()

    def check_media(self, request: VideoRequest, limits: MediaLimits) -> None:
        """Raises UserError for files that cannot be read or exceed the limits, TimeoutError if no process is free."""
        reader = self._readers.setdefault(limits, MediaReader(limits, num_processes=_READERS, is_checking=True))
        read = within_total(reader.num_pixels, limits)
        for name, value in request.media().items():
            for file in map(split_keyframe, value) if name == "keyframe" else [(0, value)]:
                read(file[1])

    def has_space(self) -> bool:
        """Whether the disks of the store and of the results have enough free space."""
        url = store_url(self.settings.store)
        folder = Path(url.removeprefix("sqlite:///")).parent if url.startswith("sqlite") else None
        free = [self.results.free_bytes(), *([shutil.disk_usage(folder).free] if folder else [])]
        return min(free) >= self.settings.min_free_bytes

    def clean_up(self) -> None:
        """Removes expired videos, and files of requests whose jobs have ended."""
        while self.undecided:
            job_id, name = self.undecided[0]
            if not self.store.has_result(job_id, name):
                self.results.remove(name)
            self.undecided.popleft()
        for job in self.store.expired():
            self.results.remove(job.result_name)
            self.store.forget_result(job)
        for job in self.store.ended_with_conditioning():
            self.results.remove(job.conditioning_name)
            self.store.forget_conditioning(job)

    def _is_revoked(self, key_id: str) -> bool:
        key = self.keys.find(key_id)
        return key is not None and key.is_revoked

    def _keep_house(self) -> None:
        for beat in itertools.count():
            if self._stopping.wait(_SECONDS_BETWEEN_BEATS):
                return
            try:
                for dead in self._heart.beat():
                    for job in self.store.interrupt_all(dead):
                        log("job interrupted", job=job.id, reason=f"the gateway {dead} ended")
                    self._heart.bury(dead)
                self.runner.recover()
                self.clean_up()
                if beat % _BEATS_BETWEEN_PURGES == 0:
                    self.store.purge(self.settings.history_seconds)
                    self.adapters.sweep(self._is_revoked)
            except SQLAlchemyError as error:
                log("store failed", reason=in_a_line(error))
            except Exception as error:  # a storage that does not respond; the next round tries again
                log("housekeeping failed", error=error)
