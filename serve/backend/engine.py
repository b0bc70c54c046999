"""Requests to videos: checks at the door, equal settings in one batch, progress, cancelling. Without Triton."""

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

from megadit.infer.conditioning.items import Media, Target, check_conditioning, strength_of, structure_of
from megadit.infer.conditioning.named import decoded
from megadit.infer.hooks.guardrail import Guardrail
from megadit.infer.hooks.guardrail import HeldBackError as Refused
from megadit.infer.hooks.scorer import Scorer
from megadit.infer.media.animations import encode_image
from megadit.infer.media.reader import within_total
from megadit.infer.media.signing import Marker
from megadit.infer.media.untrusted import decode as decode_here
from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline.adapters import Scales
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import GeneratedVideo
from megadit.infer.runtimes.load import check_runtime, open_exported
from megadit.infer.sampling.callbacks import DENOISE, Cancelled, Step
from megadit.infer.sampling.resolve import latent_size, resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SERVED, SamplingSettings
from megadit.models.lora.named import MissingAdapterError
from megadit.models.networks.registry import build_without_memory
from megadit.models.shared.errors import UserError
from megadit.serve.backend.adapters import admit, asked_adapters, batches_of, defaults_with, shares_of_work
from megadit.serve.contract import ServiceInfo, VideoRequest
from megadit.serve.events import (
    ADAPTER_MARK,
    DEADLINE_MARK,
    GUARDRAIL_MARK,
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
from megadit.serve.tracing import NOTHING, Span, shared


@dataclass(kw_only=True, slots=True, eq=False)
class OpenRequest:
    """A request that is being served, and how to reach who asked."""

    request: VideoRequest
    send: Callable[[Event], None]
    end: Callable[[ServiceError | None], None]
    """Called exactly once: with None after the last event, or with what went wrong."""
    is_cancelled: Callable[[], bool]
    seconds: float | None = None
    """How long the work may take."""
    span: Span = NOTHING
    """Span of the request in its trace."""
    has_ended: bool = False
    conditioning: Media = ()
    """Conditioning media of its videos, once read."""
    adapters: Scales = field(default_factory=dict)
    """Adapters of its videos, once read."""
    shares: dict[str, float] = field(default_factory=dict)
    """Number of parameters of each of these, divided by the network's."""
    made: set[int] = field(default_factory=set)
    """Indices of its videos that are done."""

    def finish(self, error: ServiceError | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.end(error)


@dataclass(kw_only=True, slots=True, eq=False)
class _Row:
    """A video to make."""

    owner: OpenRequest
    index: int
    seed: int

    @property
    def is_done(self) -> bool:
        return self.index in self.owner.made


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Times at which a group's work, and the present run of the sampler, began."""

    began: float = field(default_factory=time.monotonic)
    run_began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def seconds_left(self, step: int, num_steps: int) -> float:
        return (time.monotonic() - self.run_began) / step * (num_steps - step)


class Engine:
    """Serves requests with one pipeline, one group after the other."""

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
        """`batch_size`: videos made at once, at most (None: as many as the pipeline finds good); `decode` gives the
        frames (uint8 THWC) of a file that was sent (None: in this process); `adapters` is the folder of those that
        requests name (`named_adapters.py`); `guardrail` is a content filter, which here ends the requests alone that
        it refuses (the pipeline's own would end a batch); `judge` scores the videos of requests that ask for it;
        `mark` signs what is sent."""
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
        """Ends every request. Those of equal settings are made together; an error ends only its own request."""
        groups: dict[tuple[SamplingSettings, float | None], list[OpenRequest]] = defaultdict(list)
        for open_request in open_requests:
            try:
                with open_request.span.child("check") as span:
                    settings, open_request.shares = self._checked(open_request.request, span)
                    open_request.conditioning = self.read(open_request.request, settings)
                    open_request.adapters = self.read_adapters(open_request.request)
                groups[settings, strength_of(open_request.conditioning)].append(open_request)
            except Exception as error:
                _fail(open_request, error)
        for (settings, _), group in groups.items():
            for batch in batches_of(group, lambda each: each.shares, lambda each: _num_videos(each.request)):
                self._serve(batch, settings, _Clock())

    def _serve(self, open_requests: list[OpenRequest], settings: SamplingSettings, clock: _Clock) -> None:
        """Makes the videos of requests together, or each request's alone where that fails.

        Nothing that one request does may end the service or a request beside it, and what an error says of one is told
        to nobody else.
        """
        try:
            self._generate(open_requests, settings, clock)
        except Exception as error:
            if len(open_requests) == 1:
                _fail(open_requests[0], error)
                return
            for open_request in open_requests:
                self._serve([open_request], settings, clock)

    def check(self, request: VideoRequest, span: Span = NOTHING) -> SamplingSettings:
        """The settings that a request resolves to; `span` is that of the check.

        Raises:
            UserError: if it cannot or may not be served.
        """
        return self._checked(request, span)[0]

    def _checked(self, request: VideoRequest, span: Span) -> tuple[SamplingSettings, dict[str, float]]:
        """The settings, and the share of work of each adapter."""
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
        with span.child("encode text"):  # kept, and not encoded again when the video is made
            encoded = self.pipeline.text_encoder.encode(texts)
        self.info.limits.check_tokens(int(encoded.length_B.max()))
        return settings, shares

    def read(self, request: VideoRequest, settings: SamplingSettings) -> Media:
        """Read the conditioning media of a request's videos from its files.

        Raises:
            UserError: for files that cannot be read, are too much, or do not fit the video.
        """
        decode = within_total(self.decode, self.info.limits)
        media = decoded(request.sent(), settings.num_frames, decode)
        check_conditioning(media, self.pipeline.conditionings, self._target(settings))
        return media

    def read_adapters(self, request: VideoRequest) -> Scales:
        """The adapters of a request, by their paths, once each has been read.

        Raises:
            UserError: for those that are not there, cannot be read, or do not fit the network.
        """
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
                continue  # a whole batch was for nobody; what others wait for starts anew
        for open_request in open_requests:
            open_request.finish()

    def _alike_together(self, open_requests: list[OpenRequest], settings: SamplingSettings) -> list[OpenRequest]:
        """Put requests with conditioning in the same places side by side: neighbours share batches."""
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
                if phase == DENOISE:  # decoding may go on beside it, in a thread of its own
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
        """Sends a video, screened, judged and signed; where it is held back, its request ends."""
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


def most_videos_at_once(bundle: Bundle, runtime: str) -> int | None:
    """Return the batch size in videos that a bundle's networks were exported for; None where they take any number.

    Guidance asks the denoiser for two rows of each video (conditional, unconditional), unless it is guidance-distilled.

    Raises:
        UserError: if the bundle was not exported for `runtime`.
    """
    if runtime == "torch":
        return None
    rows = open_exported(bundle, check_runtime(runtime)).network("denoiser").axes["batch"].max
    return rows if bundle.config.guidance_embedding_range is not None else max(1, rows // 2)


def _end_unwanted(rows: list[_Row], clock: _Clock) -> None:
    for open_request in _living_owners(rows):
        if open_request.is_cancelled():
            open_request.finish(CancelledError("the request was cancelled"))
        elif open_request.seconds is not None and clock.seconds() > open_request.seconds:
            open_request.finish(DeadlineExceededError(f"{DEADLINE_MARK}: not done within {open_request.seconds:g} s"))


def _send_progress(rows: list[_Row], step: Step, clock: _Clock, *, may_preview: bool) -> None:
    """Sends a step's progress, to those who asked for one with a preview of the first of their videos.

    Of videos that a filter looks at first there are none.
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
                seconds_left=clock.seconds_left(step.step, step.num_steps),
                preview=preview,
            )
        )


def _living_owners(rows: list[_Row]) -> list[OpenRequest]:
    return list(dict.fromkeys(row.owner for row in rows if not row.owner.has_ended))


def _result(row: _Row, video: GeneratedVideo, *, seconds: float, batch_size: int, mark: Marker | None) -> VideoResult:
    """The encoded video, with what made it inside."""
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
    if isinstance(error, MissingAdapterError):
        open_request.finish(AdapterNotFoundError(f"{ADAPTER_MARK}: {error}"))
        return
    if isinstance(error, Refused):
        open_request.finish(HeldBackError(f"{GUARDRAIL_MARK}: {error}"))
        return
    if isinstance(error, UserError):
        open_request.finish(InvalidRequestError(str(error)))
        return
    traceback.print_exception(error)
    open_request.finish(ServiceError(f"{type(error).__name__}: {error}"))
