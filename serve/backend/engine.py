"""Engine of the service, independent of Triton: checks requests, batches equal settings, reports progress, cancels."""

import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from megadit.infer.conditioning.items import Media, Target, check_conditioning, decoded, strength_of, structure_of
from megadit.infer.hooks.guardrail import Guardrail
from megadit.infer.hooks.guardrail import HeldBackError as Refused
from megadit.infer.hooks.scorer import Scorer
from megadit.infer.media.animations import encode_image
from megadit.infer.media.reader import within_total
from megadit.infer.media.signing import Marker
from megadit.infer.media.untrusted import decode as decode_here
from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline.adapters import Scales
from megadit.infer.pipeline.batches import DENOISE, Cancelled, Step
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import GeneratedVideo
from megadit.infer.sampling.resolve import latent_size, resolve_settings
from megadit.models.diffusion.settings import SERVED, SamplingSettings
from megadit.models.lora.named import MissingAdapterError
from megadit.models.networks.registry import build_without_memory
from megadit.models.shared.errors import UserError
from megadit.serve.backend.adapters import admit, asked_adapters, batches_of, defaults_with, shares_of_work
from megadit.serve.contract import VideoRequest
from megadit.serve.events import (
    AdapterNotFoundError,
    CancelledError,
    DeadlineExceededError,
    Event,
    HeldBackError,
    InvalidRequestError,
    ServiceError,
    StepDone,
    VideoResult,
)
from megadit.serve.service_info import ServiceInfo
from megadit.serve.tracing import NOTHING, Span, shared


@dataclass(kw_only=True, slots=True, eq=False)
class OpenRequest:
    """A request that is being served, and its callbacks to the client."""

    request: VideoRequest
    send: Callable[[Event], None]
    end: Callable[[ServiceError | None], None]
    """Called exactly once: with None after the last event, or with the error."""
    is_cancelled: Callable[[], bool]
    seconds: float | None = None
    """Time limit of the work."""
    span: Span = NOTHING
    """Span of the request in its trace."""
    has_ended: bool = False
    conditioning: Media = ()
    """Conditioning media of its videos, once read."""
    adapters: Scales = field(default_factory=dict)
    """Adapters of its videos, once read."""
    shares: dict[str, float] = field(default_factory=dict)
    """Number of parameters of each adapter, divided by the network's."""
    made: set[int] = field(default_factory=set)
    """Indices of its finished videos."""

    def finish(self, error: ServiceError | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.end(error)


@dataclass(kw_only=True, slots=True, eq=False)
class _Row:
    """A video to generate."""

    owner: OpenRequest
    index: int
    seed: int

    @property
    def is_done(self) -> bool:
        return self.index in self.owner.made


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Times at which a group's work, and the current run of the sampler, began."""

    began: float = field(default_factory=time.monotonic)
    run_began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def seconds_left(self, step: Step) -> float:
        return (time.monotonic() - self.run_began) / step.num_done * (step.num_steps - step.num_done)


class Engine:
    """Serves requests with one pipeline, one group after another."""

    def __init__(
        self,
        pipeline: TextToVideo,
        info: ServiceInfo,
        *,
        batch_size: int | None = None,
        decode: Callable[[bytes], np.ndarray] | None = None,
        adapters: Path | None = None,
        guardrail: Guardrail | None = None,
        scorer: Scorer | None = None,
        mark: Marker | None = None,
    ) -> None:
        """Use one pipeline for all requests.

        Args:
            batch_size: most videos in a batch (None: as many as the pipeline chooses).
            decode: returns the frames (uint8 THWC) of an uploaded file (None: in this process).
            adapters: folder of the adapters that requests may name (`models/lora/named.py`).
            guardrail: content filter; here it ends only the requests that it refuses, not their batch.
            scorer: scores the videos of requests with `evaluate`.
            mark: signs results.
        """
        self.scorer = scorer
        self.mark = mark
        self.guardrail = guardrail
        self.adapters = adapters
        self.pipeline = pipeline
        self.decode = decode or partial(decode_here, limits=info.limits)
        self.info = info
        self.batch_size = batch_size
        self.defaults = SamplingSettings.from_dict(info.defaults)
        self._num_parameters = sum(each.numel() for each in build_without_memory(pipeline.config).parameters())

    def run(self, open_requests: Sequence[OpenRequest]) -> None:
        """Serves all requests to their end. Equal settings share batches; an error ends only its own request."""
        groups: dict[tuple[SamplingSettings, float | None], list[OpenRequest]] = defaultdict(list)
        for open_request in open_requests:
            try:
                with open_request.span.child("check") as span:
                    settings, open_request.shares = self.check(open_request.request, span)
                    open_request.conditioning = self.read(open_request.request, settings)
                    open_request.adapters = self.read_adapters(open_request.request)
                groups[settings, strength_of(open_request.conditioning)].append(open_request)
            except Exception as error:
                _fail(open_request, error)
        for (settings, _), group in groups.items():
            for batch in batches_of(group, lambda each: each.shares, lambda each: _num_videos(each.request)):
                self._serve(batch, settings, _Clock())

    def _serve(self, open_requests: list[OpenRequest], settings: SamplingSettings, clock: _Clock) -> None:
        """Generates the videos of requests together, or request by request if that fails.

        A request must not end the service or another request, and its error message is sent to no other client.
        """
        try:
            self._generate(open_requests, settings, clock)
        except Exception as error:
            if len(open_requests) == 1:
                _fail(open_requests[0], error)
                return
            for open_request in open_requests:
                self._serve([open_request], settings, clock)

    def check(self, request: VideoRequest, span: Span = NOTHING) -> tuple[SamplingSettings, dict[str, float]]:
        """The settings that a request resolves to, and the fraction of work of each adapter; `span` is that of the
        check. Raises UserError if it is invalid or exceeds the limits."""
        self.info.limits.check_texts(request)
        if (request.preview_every or 0) < 0:
            raise UserError(f"preview_every={request.preview_every} must be 0 (never) or greater")
        asked = {name: getattr(request, name) for name in SERVED}
        adapters = asked_adapters(request, self.info, self.adapters)
        settings = resolve_settings(defaults_with(self.defaults, adapters), **asked)
        shares = shares_of_work(adapters, self.info.limits, self._num_parameters)
        self.info.limits.check_size(
            num_videos=_num_videos(request),
            num_frames=settings.num_frames,
            height=settings.height,
            width=settings.width,
            fps=settings.fps,
            num_steps=settings.num_steps,
            adapter_share=sum(shares.values()),
        )
        if self.guardrail is not None:
            self.guardrail.admit([request.text, *filter(None, [settings.second_prompt])])
        latent_size(settings, self.pipeline.config, self.pipeline.tokenizer)
        request.check_conditioning(self.pipeline.conditionings, self.info.limits)
        self.info.check_evaluate(request)
        texts = [request.text, settings.negative_prompt, settings.second_prompt]
        with span.child("encode text"):  # cached for the generation
            encoded = self.pipeline.text_encoder.encode(texts)
        self.info.limits.check_tokens(int(encoded.length_B.max()))
        return settings, shares

    def read(self, request: VideoRequest, settings: SamplingSettings) -> Media:
        """Read the conditioning media of a request's videos from its files. Raises UserError for files that cannot be
        read, exceed the limits, or do not fit the video."""
        decode = within_total(self.decode, self.info.limits)
        media = decoded(request.sent(), settings.num_frames, decode)
        check_conditioning(media, self.pipeline.conditionings, self._target(settings))
        return media

    def read_adapters(self, request: VideoRequest) -> Scales:
        """Load the adapters of a request; return them by their paths. Raises UserError for adapters that are missing,
        cannot be read, or do not fit the network."""
        scales = asked_adapters(request, self.info, self.adapters)
        admit(self.pipeline, scales)
        return scales

    def _target(self, settings: SamplingSettings) -> Target:
        return Target.of(settings, self.pipeline.config, self.pipeline.tokenizer)

    def _generate(self, open_requests: list[OpenRequest], settings: SamplingSettings, clock: _Clock) -> None:
        rows = [
            _Row(owner=open_request, index=index, seed=(open_request.request.seed or 0) + index)
            for open_request in self._alike_together(open_requests, settings)
            for index in range(_num_videos(open_request.request))
        ]
        while waiting := [row for row in rows if not row.is_done and not row.owner.has_ended]:
            try:
                self._run(waiting, settings, clock)
            except Cancelled:
                continue  # all requests of the batch have ended; start again with the others
        for open_request in open_requests:
            open_request.finish()

    def _alike_together(self, open_requests: list[OpenRequest], settings: SamplingSettings) -> list[OpenRequest]:
        """Sort requests so that those with conditioning at the same places are adjacent and share batches."""
        target = self._target(settings)
        groups: dict[Hashable, list[OpenRequest]] = defaultdict(list)
        for open_request in open_requests:
            groups[structure_of(open_request.conditioning, target)].append(open_request)
        return [open_request for group in groups.values() for open_request in group]

    def _run(self, rows: list[_Row], settings: SamplingSettings, clock: _Clock) -> None:
        clock.run_began = time.monotonic()
        batch, denoising = range(len(rows)), []

        def on_step(step: Step) -> bool:
            nonlocal batch
            batch = step.videos
            for span in denoising:
                span.event("step", {"megadit.step": step.step, "megadit.sigma": step.sigma})
            _end_unwanted(rows, clock)
            _send_progress(rows, step, clock, may_preview=self.guardrail is None or self.guardrail.check_video is None)
            return any(not rows[place].owner.has_ended for place in step.videos)

        @contextmanager
        def around(phase: str, places: range) -> Iterator[None]:
            nonlocal denoising
            spans = list(dict.fromkeys(rows[place].owner.span for place in places))
            with shared(spans, phase, {"megadit.videos": len(places)}) as children:
                if phase == DENOISE:  # decoding may run at the same time, in another thread
                    denoising = children
                yield

        videos = self.pipeline.stream(
            [row.owner.request.text for row in rows],
            settings,
            seeds=[row.seed for row in rows],
            batch_size=self.batch_size,
            conditioning=[row.owner.conditioning for row in rows],
            adapters=[row.owner.adapters for row in rows],
            on_step=on_step,
            around=around,
        )
        for row, video in zip(rows, videos, strict=True):
            row.owner.made.add(row.index)
            if not row.owner.has_ended:
                self._hand_over(row, video, clock, batch_size=len(batch))
                if all(other.is_done for other in rows if other.owner is row.owner):
                    row.owner.finish()

    def _hand_over(self, row: _Row, video: GeneratedVideo, clock: _Clock, *, batch_size: int) -> None:
        """Filters, scores, signs and sends a video; if the filter refuses it, its request ends."""
        request, scores = row.owner.request, None
        if self.guardrail is not None:
            try:
                with row.owner.span.child("screen"):
                    video = replace(video, video=self.guardrail.screen(video.video))
            except Refused as error:
                _fail(row.owner, error)
                return
        if request.evaluate and self.scorer is not None:
            with row.owner.span.child("judge"):
                scores = self.scorer.scores(video.video, request.text)
        result = _result(row, video, seconds=clock.seconds(), batch_size=batch_size, mark=self.mark)
        row.owner.send(replace(result, scores=scores))


def _end_unwanted(rows: list[_Row], clock: _Clock) -> None:
    for open_request in _living_owners(rows):
        if open_request.is_cancelled():
            open_request.finish(CancelledError("the request was cancelled"))
        elif open_request.seconds is not None and clock.seconds() > open_request.seconds:
            open_request.finish(DeadlineExceededError(f"not done within {open_request.seconds:g} s"))


def _send_progress(rows: list[_Row], step: Step, clock: _Clock, *, may_preview: bool) -> None:
    """Sends a step's progress; where requested, with a preview of the request's first video.

    There are no previews if a content filter checks videos.
    """
    previews: np.ndarray | None = None
    for open_request in _living_owners(rows):
        place = next((place for place in step.videos if rows[place].owner is open_request), None)
        preview = b""
        if (
            may_preview
            and place is not None
            and open_request.request.preview_every
            and (step.step - 1) % open_request.request.preview_every == 0
        ):
            previews = step.preview() if previews is None else previews
            frames = previews[place - step.videos.start]
            preview = encode_image(frames[len(frames) // 2], ".jpg")
        open_request.send(
            StepDone(
                step=step.step,
                num_steps=step.num_steps,
                sigma=step.sigma,
                seconds_left=clock.seconds_left(step),
                preview=preview,
            )
        )


def _living_owners(rows: list[_Row]) -> list[OpenRequest]:
    return list(dict.fromkeys(row.owner for row in rows if not row.owner.has_ended))


def _result(row: _Row, video: GeneratedVideo, *, seconds: float, batch_size: int, mark: Marker | None) -> VideoResult:
    """The encoded video, with its settings inside."""
    is_image = video.settings.num_frames == 1
    settings = asdict(video.settings) | row.owner.request.shown_adapters()
    record = json.dumps({"prompt": video.prompt, "seed": video.seed, **settings})
    with row.owner.span.child("write"):
        if is_image:
            data = encode_image(video.video[0], ".png", record)
        else:
            data = encode_mp4(video.video, video.settings.fps, metadata={"comment": record, "title": video.prompt})
    if mark is not None:
        with row.owner.span.child("sign"):
            data = mark(data, ".png" if is_image else ".mp4")
    return VideoResult(
        data=data,
        media_type="image/png" if is_image else "video/mp4",
        index=row.index,
        prompt=video.prompt,
        seed=video.seed,
        settings=settings,
        seconds=seconds,
        batch_size=batch_size,
    )


def _num_videos(request: VideoRequest) -> int:
    return 1 if request.num_videos is None else request.num_videos


def _fail(open_request: OpenRequest, error: Exception) -> None:
    match error:
        case MissingAdapterError():
            answer = AdapterNotFoundError(str(error))
        case Refused():
            answer = HeldBackError(str(error))
        case UserError():
            answer = InvalidRequestError(str(error))
        case _:
            traceback.print_exception(error)
            answer = ServiceError(f"{type(error).__name__}: {error}")
    open_request.finish(answer)
