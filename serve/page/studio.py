"""Logic of the page, without its layout: requests to the service, and the videos of the gallery."""

import queue
import random
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megadit.infer.media.reader import MediaReader
from megadit.infer.media.video_io import read_video, write_video
from megadit.models.shared.errors import UserError
from megadit.serve.client import Generation, VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import Event, ServiceError, StepDone, VideoResult
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.gateway.media import pack, unpack
from megadit.serve.service_info import ServiceInfo, calls_in_words, calls_of

Client = VideoClient | GatewayClient
BEST = "best"
"""Name of the variant without a fixed number of calls."""
MOST_GUIDANCE = 10.0
"""Highest guidance scale on the page, unless the network is guidance-distilled."""
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
        self._stored_videos: deque[Path] = deque()
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
                if not self._running[session]:
                    del self._running[session]

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
        self._stored_videos.append(folder)
        if len(self._stored_videos) > self._max_cached:
            shutil.rmtree(self._stored_videos.popleft(), ignore_errors=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model of the service, or an adapter of it, with the settings that it was trained for."""

    name: str
    client: VideoClient | GatewayClient = field(repr=False)
    info: ServiceInfo = field(repr=False)
    defaults: Mapping[str, Any] = field(repr=False)
    adapter: str | None = None

    @property
    def scales(self) -> tuple[float, ...]:
        """The lowest and the highest guidance scale on the page."""
        return self.info.guidance_embedding_range or (1.0, max(MOST_GUIDANCE, 2 * self.defaults["guidance"]))

    def work(self, request: VideoRequest) -> int:
        """Pixels times network calls: guidance takes two a step, unless the network is guidance-distilled."""
        calls = request.num_steps * (1 if self.info.has_guidance_embedding or request.guidance == 1 else 2)
        return request.num_frames * request.height * request.width * calls

    def request(self, request: VideoRequest) -> VideoRequest:
        """The request with the variant's adapter added, and nothing left out."""
        if self.adapter is not None and self.adapter not in request.adapter_scales():
            request = replace(request, adapters=(*(request.adapters or ()), self.adapter))
        return self.info.filled(request)


def variants_of(client: VideoClient | GatewayClient) -> dict[str, Variant]:
    """Name -> variant of a service, its own first; without students that a gateway does not serve. Raises ServiceError
    if the service does not respond."""
    info = client.info()
    found = [_variant(client, info)]
    for other in map(client.with_model, info.students):
        with suppress(ServiceError):
            found.append(_variant(other, other.info()))
    for adapter, asked in (info.adapters.defaults if info.adapters is not None else {}).items():
        found.append(_variant(client, info, info.defaults | asked, adapter))
    several = {name for name, count in Counter(variant.name for variant in found).items() if count > 1}
    return {variant.name: variant for variant in (_distinguished(variant, several) for variant in found)}


def _variant(
    client: VideoClient | GatewayClient,
    info: ServiceInfo,
    defaults: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> Variant:
    defaults = info.defaults if defaults is None else defaults
    calls = calls_of(defaults, has_guidance_embedding=info.has_guidance_embedding)
    name = BEST if calls is None else calls_in_words(calls)
    return Variant(name=name, client=client, info=info, defaults=defaults, adapter=adapter)


def _distinguished(variant: Variant, several: set[str]) -> Variant:
    """Adds the adapter to the name of a variant whose calls are not unique."""
    is_one_of_several = variant.adapter and variant.name in several
    return replace(variant, name=f"{variant.name}, {variant.adapter}") if is_one_of_several else variant
