"""Runs jobs of the store on Triton and stores their videos, and handles failures.

Each server has a thread that watches its health, and one that gives it jobs while it has free slots. A job whose server
fails is put back into the queue once, and then runs alone on a server; if that fails too, the job fails: a job that
crashes servers harms other jobs at most once.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from sqlalchemy.exc import SQLAlchemyError

from megadit.models.shared.cli.setting import setting
from megadit.serve.client import Generation
from megadit.serve.contract import VideoRequest
from megadit.serve.events import CancelledError, DeadlineExceededError, InvalidRequestError, ServiceError, VideoResult
from megadit.serve.gateway.jobs.servers import Server, Servers
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.media import unpack
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.store.database import in_a_line
from megadit.serve.gateway.store.jobs import Job
from megadit.serve.gateway.store.results import Results
from megadit.serve.gateway.store.store import JobStore
from megadit.serve.tracing import NOTHING, Span, Tracing

_SECONDS_BETWEEN_LOOKS = 0.2
"""Seconds between polls of the queue; jobs of this gateway's clients are seen at once."""
_SECONDS_BETWEEN_NOTES = 0.2
"""Seconds between records of a job's progress."""
_SECONDS_BETWEEN_PROBES = 1.0
_SECONDS_FOR_A_CANCEL = 5.0
_CANCELLED, _LOST, _DRAINED = "cancelled", "lost", "drained"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """Time limits, in seconds."""

    job_seconds: float = setting(
        3600.0, "seconds for one job at Triton, including its queue (default: 3600)", metavar="S"
    )
    hang_seconds: float = setting(10.0, "seconds after which a silent server loses its jobs (default: 10)", metavar="S")
    """A server is silent if it does not respond to probes."""
    result_seconds: float = setting(86_400.0, "seconds for which a video is kept (default: a day)", metavar="S")


@dataclass(kw_only=True, slots=True, eq=False)
class _Run:
    """A job that runs on a server."""

    job: Job
    server: Server
    generation: Generation
    max_jobs: int = 1
    """Slots of the server that it holds."""
    attempt: Span = NOTHING
    call: Span = NOTHING
    """Span of Triton, within the attempt."""
    began: float = field(default_factory=time.monotonic)
    stopped_for: str | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)

    def stop(self, reason: str) -> None:
        self.stopped_for = self.stopped_for or reason
        self.generation.cancel()


class Runner:
    """Runs the jobs of a store, up to the servers' slots at once."""

    def __init__(
        self,
        store: JobStore,
        servers: Servers,
        results: Results,
        metrics: Metrics,
        tracing: Tracing,
        *,
        settings: RunnerSettings,
    ) -> None:
        self._store, self._servers, self._results, self._metrics = store, servers, results, metrics
        self._settings, self._tracing = settings, tracing
        self._draining, self._ended, self._news = threading.Event(), threading.Event(), threading.Event()
        self._paused = threading.Event()
        self._runs: dict[str, _Run] = {}
        self._handing_out: set[str] = set()
        """Servers whose thread is about to claim a job."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(sum(server.slots for server in servers.all), thread_name_prefix="job")
        self._threads = [
            threading.Thread(target=loop, args=[server], name=f"{loop.__name__} {server.url}", daemon=True)
            for server in servers.all
            for loop in (self._watch, self._hand_out)
        ]

    def start(self) -> None:
        for job in self._store.interrupt_all(self._store.owner):  # jobs of an earlier process of this gateway
            log("job interrupted", job=job.id, reason="the gateway ended")
        for thread in self._threads:
            thread.start()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def pause(self) -> None:
        """Starts no job until `resume`; running jobs continue, new ones wait in the queue."""
        self._paused.set()

    @property
    def is_paused(self) -> bool:
        return self._paused.is_set()

    def resume(self) -> None:
        self._paused.clear()
        self._news.set()

    @property
    def is_idle(self) -> bool:
        """Whether it is paused and no job runs on a server."""
        with self._lock:
            return self._paused.is_set() and not self._runs and not self._handing_out

    def notify(self) -> None:
        """Wakes the threads for a new job in the queue."""
        self._news.set()

    def cancel(self, job_id: str) -> None:
        """Cancels a job that this gateway runs; returns after the cancellation was sent to Triton."""
        with self._lock:
            run = self._runs.get(job_id)
        if run is not None:
            run.stop(_CANCELLED)
            run.has_ended.wait(_SECONDS_FOR_A_CANCEL)

    def recover(self) -> None:
        """Puts back jobs that run here by the store and do not: the response of a store that took them was lost."""
        jobs = self._store.running(self._store.owner)
        with self._lock:
            lost = [] if self._handing_out else [job for job in jobs if job.id not in self._runs]
        for job in lost:
            if self._store.requeue(job):
                log("job interrupted", job=job.id, reason="the store had failed when it was started")

    def drain(self, seconds: float) -> None:
        """Starts no more jobs, lets running ones finish, and puts those back that are not done in time."""
        self._draining.set()
        self._news.set()
        for thread in self._threads:
            if thread.name.startswith(self._hand_out.__name__):
                thread.join()
        deadline = time.monotonic() + seconds
        for run in self._running():
            run.has_ended.wait(max(0.0, deadline - time.monotonic()))
        for run in self._running():
            run.stop(_DRAINED)
        for run in self._running():
            run.has_ended.wait(_SECONDS_FOR_A_CANCEL)
        self._ended.set()
        self._pool.shutdown(wait=True)

    def _running(self) -> list[_Run]:
        with self._lock:
            return list(self._runs.values())

    # ------------------------------------------------------------------------------------------ threads of a server

    def _watch(self, server: Server) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_PROBES if server.infos else 0.2):
            before = server.is_healthy, server.complaint
            server.probe()
            if (server.is_healthy, server.complaint) != before:
                state = "healthy" if server.is_healthy else "unhealthy"
                log(f"server is {state}", server=server.url, reason=server.complaint)
            if server.seconds_silent() > self._settings.hang_seconds:
                for run in self._running():
                    if run.server is server:
                        run.stop(_LOST)

    def _hand_out(self, server: Server) -> None:
        while not self._draining.is_set():
            if not server.free.acquire(timeout=_SECONDS_BETWEEN_LOOKS):
                continue
            with self._lock:
                may_begin = server.is_healthy and not self._paused.is_set()
                self._handing_out |= {server.url} if may_begin else set()
            is_dispatched = False
            try:
                is_dispatched = may_begin and self._begin_next(server)
            except SQLAlchemyError as error:  # a job that it claimed is recovered
                log("store failed", reason=in_a_line(error))
            except Exception as error:  # a job of another release: others can be started
                log("no job started", error=error)
            finally:
                self._handing_out.discard(server.url)
            if not is_dispatched:
                server.free.release()
                self._news.wait(_SECONDS_BETWEEN_LOOKS)
                self._news.clear()

    def _begin_next(self, server: Server) -> bool:
        """Starts the next job; returns whether there was one, and this server responded just before."""
        if not self._store.has_queued() or not server.is_responding():
            return False
        job = self._store.claim(frozenset(server.models))
        if job is None:
            return False
        request = self._request(job)
        if request is None:
            return False
        client, is_alone = server.client(job.model), job.is_suspected
        if is_alone and not self._empty(server):  # last: what fails after it would keep the server's slots
            self._store.give_back(job)
            return False
        attempt, call = self._spans(job, server)
        generation = client.stream(request, timeout=self._settings.job_seconds, traceparent=call.traceparent)
        slots = server.slots if is_alone else 1
        run = _Run(job=job, server=server, generation=generation, max_jobs=slots, attempt=attempt, call=call)
        with self._lock:
            self._runs[job.id] = run
        self._metrics.stages.labels("queue", job.key_id).observe(max(0.0, job.started_at - job.created_at))
        log("job started", job=job.id, key=job.key_id, server=server.url, attempt=job.attempts)
        self._pool.submit(self._work, run)
        return True

    def _spans(self, job: Job, server: Server) -> tuple[Span, Span]:
        """Begin the spans of a job's attempt and of Triton's work in it, and record the span of its queue time."""
        about = {"megadit.job": job.id, "megadit.key": job.key_id, "megadit.attempt": job.attempts}
        queue = self._tracing.begin("queue", job.traceparent, about, at=job.queued_at or job.created_at)
        queue.end(at=job.started_at)
        attempt = self._tracing.begin("attempt", job.traceparent, about | {"megadit.gateway": self._store.owner})
        about = {"megadit.model": job.model, "megadit.server": server.url}
        return attempt, attempt.child("triton", about, kind="client")

    def _request(self, job: Job) -> VideoRequest | None:
        """The request with its files; a job whose files are missing fails."""
        if job.conditioning_name is None:
            return job.request
        try:
            return replace(job.request, **unpack(self._results.conditioning(job)))
        except Exception as error:  # fsspec's file systems raise any exception
            log("files of a job not read", error=error, job=job.id)
        self._store.fail(job, "storage_failed", "the files of its request cannot be read")
        return None

    def _empty(self, server: Server) -> bool:
        """Waits until a server has no other job, and takes all of its slots; one is held already.

        Returns False if this gateway is ending, or the server does not respond.
        """
        held = 0
        while held < server.slots - 1 and not self._draining.is_set():
            held += server.free.acquire(timeout=_SECONDS_BETWEEN_LOOKS)
        is_ours = held == server.slots - 1 and not self._draining.is_set() and server.is_responding()
        if not is_ours and held:
            server.free.release(held)
        return is_ours

    # ------------------------------------------------------------------------------------------ one job

    def _work(self, run: _Run) -> None:
        try:
            self._settle(run)
        except SQLAlchemyError as error:
            log("job lost its gateway", reason=in_a_line(error), job=run.job.id)
        except Exception as error:
            log("job lost its gateway", error=error, job=run.job.id)
        finally:
            with self._lock:
                del self._runs[run.job.id]
            run.attempt.end()
            run.has_ended.set()
            run.server.free.release(run.max_jobs)
            self._news.set()

    def _settle(self, run: _Run) -> None:
        """Generates the video and records the outcome of the job."""
        try:
            with run.call:
                video = self._generate(run)
            self._metrics.stages.labels("triton", run.job.key_id).observe(time.monotonic() - run.began)
        except InvalidRequestError as error:
            self._fail(run, error.code, str(error))
        except CancelledError as error:
            self._settle_stopped(run, error)
        except DeadlineExceededError as error:
            if time.monotonic() - run.began < self._settings.job_seconds:
                self._interrupt(run, f"the server did not answer: {error}")
            else:
                self._fail(run, "timed_out", f"not done within {self._settings.job_seconds:g} s")
        except ServiceError as error:
            self._interrupt(run, str(error))
        except Exception as error:  # an invalid response, or a bug: the job must end anyway
            log("run failed", error=error, job=run.job.id)
            self._interrupt(run, "the gateway could not follow it")
        else:
            self._keep(run, video)

    def _generate(self, run: _Run) -> VideoResult:
        video, preview, last_note = None, b"", -_SECONDS_BETWEEN_NOTES
        for event in run.generation:
            if isinstance(event, VideoResult):
                video = event
                continue
            preview = event.preview or preview
            if time.monotonic() - last_note >= _SECONDS_BETWEEN_NOTES:
                last_note = time.monotonic()
                try:
                    is_ours = self._store.note_step(run.job, event.step, preview)
                    preview = b""
                except SQLAlchemyError:
                    continue  # a full disk: progress is recorded later, or not at all
                if not is_ours:  # deleted through another gateway
                    run.stop(_CANCELLED)
        if video is None:
            raise ServiceError("the stream ended without a video")
        return video

    def _keep(self, run: _Run, video: VideoResult) -> None:
        began = time.monotonic()
        try:
            with run.attempt.child("store", {"megadit.bytes": len(video.data)}):
                result = self._results.put(run.job.id, video.data, video.media_type)
        except Exception as error:  # fsspec's file systems raise any exception
            log("result not stored", error=error, job=run.job.id)
            self._fail(run, "storage_failed", "the video could not be stored")
            return
        self._metrics.stages.labels("store", run.job.key_id).observe(time.monotonic() - began)
        seconds = self._settings.result_seconds
        results = {"seconds_to_live": seconds, "scores": video.scores}
        if self._record(run, lambda: self._store.complete(run.job, result, **results)):
            self._end(run, "completed")
        else:
            self._results.remove(result.name)

    def _settle_stopped(self, run: _Run, error: CancelledError) -> None:
        if run.stopped_for == _CANCELLED:
            self._cancelled(run)
        elif run.stopped_for == _DRAINED:
            self._record(run, lambda: self._store.give_back(run.job))
        else:
            self._interrupt(run, "its server hangs" if run.stopped_for == _LOST else str(error))

    def _interrupt(self, run: _Run, reason: str) -> None:
        run.server.suspect()
        run.attempt.end("interrupted")
        self._metrics.interruptions.labels(run.server.url).inc()
        log("job interrupted", job=run.job.id, server=run.server.url, attempt=run.job.attempts, reason=reason)
        if (
            self._record(run, lambda: self._store.interrupt(run.job, suspicion="server_failed"))
            and run.job.is_suspected
        ):
            self._end(run, "failed", "server_failed")

    def _fail(self, run: _Run, code: str, message: str) -> None:
        if self._record(run, lambda: self._store.fail(run.job, code, message)):
            self._end(run, "failed", code)

    def _end(self, run: _Run, outcome: str, code: str | None = None) -> None:
        self._metrics.videos.labels(run.job.key_id, run.job.model, outcome).inc()
        if code is not None:
            run.attempt.end(code)
            self._metrics.errors.labels(run.job.key_id, code).inc()
        log(f"job {outcome}", job=run.job.id, key=run.job.key_id, code=code, seconds=time.monotonic() - run.began)

    def _cancelled(self, run: _Run) -> None:
        self._metrics.videos.labels(run.job.key_id, run.job.model, "cancelled").inc()
        log("job cancelled", job=run.job.id, step=run.job.step)

    def _record(self, run: _Run, write: Callable[[], bool]) -> bool:
        """Writes the outcome of a job; False if it was deleted meanwhile, or another gateway has taken it over."""
        is_ours = self._persist(write)
        if not is_ours and self._persist(lambda: self._store.is_deleted(run.job)):
            self._cancelled(run)
        return is_ours

    def _persist(self, write: Callable[[], bool]) -> bool:
        """Writes to the store; retries while that fails (a full disk), until this gateway ends."""
        while True:
            try:
                return write()
            except SQLAlchemyError as error:
                log("store failed", reason=in_a_line(error))
                if self._ended.wait(1.0):
                    raise
