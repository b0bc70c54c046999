"""Logic of the page, without its layout: requests to the service, and the videos of the gallery."""

import queue
import random
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megadit.infer.media.reader import MediaReader
from megadit.infer.media.video_io import read_video, write_video
from megadit.models.shared.errors import UserError
from megadit.serve.client import Generation, VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import Event, ServiceError, StepDone, VideoResult
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.gateway.media import pack, unpack
from megadit.serve.page.variants import BEST, variants_of

Client = VideoClient | GatewayClient
_SECONDS_BETWEEN_UPDATES = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """A finished video, with everything to generate it again."""

    request: VideoRequest
    media_type: str
    seconds: float
    """Seconds that it took."""
    path: Path
    scores: dict[str, float] | None
    """Scores by a scorer, if the service has one."""
    picture: Path
    """A small animation for the gallery."""
    variant: str = BEST
    """Name of its `Variant`."""
    conditioning: Path | None = None
    """Paths of the request's files, which `request` does not hold."""

    def again(self) -> VideoRequest:
        """The request with its files."""
        return replace(self.request, **unpack(self.conditioning.read_bytes())) if self.conditioning else self.request


class Studio:
    """Logic of the page: runs and cancels requests, stores files, estimates times."""

    def __init__(self, client: Client, *, max_cached: int = 500) -> None:
        self.client = client
        self.info = client.info()
        self.variants = variants_of(client)
        self.media = MediaReader(self.info.limits)
        self._folder = tempfile.TemporaryDirectory(prefix="megadit_videos_")
        self._takes_kept: deque[Path] = deque()
        self._max_cached = max_cached
        self._running: dict[str, list[Generation]] = {}
        self._lock = threading.Lock()
        self._seconds_per_work = self._measure()

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    @property
    def uploads(self) -> Path:
        """Folder of visitors' files and copies of shown videos; removed when the page ends."""
        return self.folder / "gradio"

    def described(self, variant: str) -> str:
        """Return the name of a variant for labels; "" if there is only one."""
        return variant if self.has_variants else ""

    def adapters(self) -> list[str]:
        """Names of adapters that a request may use now; with two experts, also the names for one of them."""
        about = self.info.adapters
        return [f"{form}{name}" for name in self.client.adapters() for form in about.forms] if about else []

    @property
    def first_variant(self) -> str:
        return next(iter(self.variants))

    @property
    def has_variants(self) -> bool:
        """Whether the page shows variants: several, or a student's calls."""
        return [*self.variants] != [BEST]

    def request(self, *, seed: int | None, variant: str | None = None, **settings) -> VideoRequest:
        """A request with nothing left out; `seed` None: a new one, `variant` None: the first. A negative prompt that is
        the service's default becomes that of the variant: a guidance-distilled student has none."""
        if settings.get("negative_prompt") == self.info.defaults["negative_prompt"]:
            settings = settings | {"negative_prompt": None}
        seed = random.randrange(2**31) if seed is None else seed
        asked = VideoRequest(seed=seed, evaluate=self.info.has_scorer, **settings)
        return self.variants[variant or self.first_variant].request(asked)

    def estimate(self, request: VideoRequest, variant: str | None = None) -> float:
        """Estimated seconds of a request, from earlier ones; `variant` as in `request`."""
        return self._seconds_per_work * self.variants[variant or self.first_variant].work(request)

    def run(self, session: str, request: VideoRequest, variant: str | None = None) -> Iterator[Event]:
        """Events of a request, until it ends or `cancel` is called for its session; `variant` as in `request`."""
        steps, chosen = request.num_steps or 1, self.variants[variant or self.first_variant]
        generation = chosen.client.stream(replace(request, preview_every=max(1, steps // 20)))
        with self._lock:
            self._running.setdefault(session, []).append(generation)
        try:
            for event in _paced(generation):
                if isinstance(event, VideoResult):
                    self._seconds_per_work = event.seconds / chosen.work(request)
                yield event
        finally:
            generation.close()
            with self._lock:
                self._running[session].remove(generation)

    def run_side_by_side(
        self, session: str, requests: list[VideoRequest], variants: Sequence[str | None] = (None, None)
    ) -> Iterator[tuple[int, Event | ServiceError | UserError]]:
        """(index, event) of several requests at once; a failed request yields its error."""
        events: queue.Queue = queue.Queue()

        def forward(index: int, request: VideoRequest) -> None:
            try:
                for event in self.run(session, request, variants[index]):
                    events.put((index, event))
            except (ServiceError, UserError) as error:
                events.put((index, error))
            finally:
                events.put(None)

        threads = [threading.Thread(target=forward, args=pair, daemon=True) for pair in enumerate(requests)]
        for thread in threads:
            thread.start()
        left = len(threads)
        while left:
            item = events.get()
            if item is None:
                left -= 1
            else:
                yield item

    def cancel(self, session: str) -> None:
        """Cancels the requests of a session."""
        with self._lock:
            for generation in self._running.get(session, []):
                generation.cancel()

    def keep(self, request: VideoRequest, result: VideoResult, variant: str | None = None) -> Take:
        """Writes a video where the page can serve it; the oldest are removed beyond `max_cached`.

        Paths are random, because everyone who knows a path may read it.
        """
        folder = self.folder / secrets.token_urlsafe(16)
        folder.mkdir()
        media, conditioning = request.media(), folder / "given.zip"
        if media:
            conditioning.write_bytes(pack(media))
        take = Take(
            request=request.without_media(),
            conditioning=conditioning if media else None,
            variant=variant or self.first_variant,
            media_type=result.media_type,
            seconds=result.seconds,
            scores=result.scores,
            path=folder / f"seed{result.seed}{result.suffix}",
            picture=folder / "picture.webp",
        )
        take.path.write_bytes(result.data)
        frames, fps = read_video(take.path)
        enlarged = frames.repeat(factor := max(1, 128 // frames.shape[1]), axis=1).repeat(factor, axis=2)
        write_video(take.picture, enlarged, fps or 1)
        self._takes_kept.append(folder)
        if len(self._takes_kept) > self._max_cached:
            shutil.rmtree(self._takes_kept.popleft(), ignore_errors=True)
        return take

    def _measure(self) -> float:
        """Seconds per pixel and step, measured with one short request."""
        request = self.request(prompt="a video", seed=0, num_steps=2)
        (result,) = self.client.generate(request)
        return result.seconds / self.variants[self.first_variant].work(request)


def _paced(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with progress at a limited rate, each with the latest preview."""
    preview, last_reported = b"", 0.0
    for event in events:
        if isinstance(event, StepDone):
            preview = event.preview or preview
            if time.monotonic() - last_reported < _SECONDS_BETWEEN_UPDATES:
                continue
            last_reported = time.monotonic()
            event = replace(event, preview=preview)
        yield event
