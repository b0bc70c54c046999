"""Frames of a video in presentation order, with their times; damaged frames are marked.

Files are untrusted: sizes are checked before pixels are decoded, containers that refer to other files are not opened,
and any exception of a decoder becomes an `UnusableSourceError`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import BinaryIO

import av
from av.codec.context import Flags

from megadit.infer.decoding import animations
from megadit.infer.decoding.alpha import AlphaSideData, AlphaTrack, Decoded
from megadit.infer.decoding.colour import NOT_CONVERTED
from megadit.infer.decoding.containers import CONTAINERS, open_container
from megadit.infer.decoding.cropping import NO_CROP, Crop, Cropper, crops_of
from megadit.infer.decoding.frame import Frame
from megadit.infer.decoding.rules import Rules, UnusableSourceError, Work
from megadit.models.shared.documents import placeholder

_COVERS = ("mjpeg", "png", "bmp", "tiff", "webp", "gif")
"""Codecs of pictures: beside a stream of another codec, one is a cover that is not marked as attached."""


@contextmanager
def open_video(
    file: BinaryIO, rules: Rules, *, beat: Callable[[], None] = lambda: None, containers: str = CONTAINERS
) -> Iterator["Video | animations.WebpVideo"]:
    """Open the video of a file (positioned at its start); `beat` is called for every packet.

    Raises:
        UnusableSourceError: if nothing can be decoded, or it is too large.
    """
    head = b""
    try:
        head = file.read(30)
        file.seek(0)
        if animations.is_webp(head):
            rules.check(*animations.webp_size(head))
            yield animations.WebpVideo(file, rules, beat)
            return
        durations, crops = _animation_durations(file, rules, containers), crops_of(file)
        with open_container(file, containers=containers, max_pixels=rules.max_pixels) as container:
            yield Video(container, rules, beat, durations, crops)
    except (av.FFmpegError, OSError, ValueError, EOFError) as error:
        if isinstance(error, UnusableSourceError):
            raise
        message = error.strerror if isinstance(error, av.FFmpegError) else error
        if isinstance(error, av.ArgumentError):  # what ffmpeg says of every file that is in none of `containers`
            message = "it is damaged, or in a format that is not read here"
        if found := placeholder(head):
            message = f"it is {found}"
        raise UnusableSourceError("broken", str(message)) from None


def _animation_durations(file: BinaryIO, rules: Rules, containers: str) -> list[int]:
    """Duration in ticks of each frame of a GIF or APNG; empty for other files. Rewinds the file."""
    head = file.read(animations.HEAD_BYTES)
    file.seek(0)
    if not head.startswith((b"GIF8", b"\x89PNG")):
        return []
    animations.check_bytes(file)
    with open_container(file, containers=containers, max_pixels=rules.max_pixels) as container:
        found = [packet.duration for packet in container.demux(video=0) if packet.duration]
    file.seek(0)
    return found


class Video:
    """The video stream of a container that ffmpeg reads; of several, the one that players choose."""

    def __init__(
        self,
        container: av.container.InputContainer,
        rules: Rules,
        beat: Callable[[], None],
        durations: list[int],
        crops: list[Crop],
    ) -> None:
        streams = [stream for stream in container.streams.video if not _is_picture(stream)]
        if not streams:
            raise UnusableSourceError("broken", "it holds no video")
        streams = [stream for stream in streams if not _is_cover(stream)] or streams
        is_default = av.stream.Disposition.default
        streams = [stream for stream in streams if stream.disposition & is_default] or streams
        self._stream = next((stream for stream in streams if stream.frames != 1), streams[0])  # AVIF's first is still
        if self._stream.codec_context is None:
            raise UnusableSourceError("broken", "it is encrypted, or its codec is not known here")
        self._container, self._rules, self._beat, self._durations = container, rules, beat, durations
        self._stream.codec_context.thread_count = 1  # sources are read in parallel already
        self._stream.codec_context.flags |= Flags.unaligned  # else columns cropped at the left are shown
        self._track = AlphaTrack.find(container, self._stream)
        rules.check(self._stream.width, self._stream.height)
        crop = crops[self._stream.index] if self._stream.index < len(crops) else NO_CROP
        self._cropper = Cropper(crop, self._stream.width, self._stream.height)
        self.is_regular = True
        """Whether the times of its frames are the file's own, so that seeking works."""

    @property
    def time_base(self) -> Fraction:
        return self._stream.time_base

    @property
    def seconds(self) -> float:
        """Duration in the file's header; 0 if there is none."""
        stream, container = self._stream, self._container
        return max((container.duration or 0) / av.time_base, float((stream.duration or 0) * (stream.time_base or 0)))

    @property
    def fps(self) -> float:
        """Frames per second; infinite if the file states no usable rate."""
        if self._durations:
            return animations.rate(self._durations, self.time_base)
        rates = [self._stream.average_rate, self._stream.guessed_rate, self._stream.base_rate]
        if self._container.format.flags & NO_TIMESTAMPS:  # of these guesses the decoder's is that of its headers
            rates = [self._stream.codec_context.framerate, self._stream.guessed_rate, *rates]
        for rate in rates:
            if rate is not None and 0.1 < float(rate) < 1000:
                return float(rate)
        return math.inf

    @property
    def pixel_aspect(self) -> float:
        """Width of a pixel divided by its height; not stored in frames."""
        ratio = self._stream.sample_aspect_ratio
        return float(ratio) if ratio and 0.1 < ratio < 10 else 1.0

    def seek(self, time: int) -> bool:
        """Seeks to the last key frame before `time`; False if the container cannot."""
        if self._stream.codec_context.pix_fmt == "pal8" and "mov" in self._container.format.name:
            return False  # only its first packet has the palette
        try:
            self._container.seek(time, stream=self._stream, backward=True)
        except (av.FFmpegError, OSError):
            return False
        return True

    def frames(self) -> Iterator[Frame]:
        """Every frame once, in presentation order, with increasing times."""
        clock = Clock(self._container.format, self.time_base, self.fps)
        aspect, decoded = self.pixel_aspect, self._decoded()
        frames = (
            Frame(
                pixels=pixels,
                time=clock(pixels),
                duration=pixels.duration or 0,
                rules=self._rules,
                aspect=aspect,
                alpha_HW=alpha_HW,
                is_damaged=is_damaged,
                follows_loss=follows_loss,
            )
            for pixels, alpha_HW, is_damaged, follows_loss in (self._track.paired(decoded) if self._track else decoded)
        )
        for frame in deinterlaced(frames):
            self.is_regular = self.is_regular and clock.is_regular
            yield self._cropper(frame)

    def _decoded(self) -> Iterator[Decoded]:
        """(frame, alpha, whether it is damaged, whether others before it were lost).

        Frames after a damaged one depend on it, until the next key frame.
        """
        is_damaged = follows_loss = False
        alpha = AlphaSideData(self._stream, self._rules) if self._stream.metadata.get("alpha_mode") == "1" else None
        tracks = [self._stream, *([self._track.stream] if self._track else [])]
        packets, work = self._container.demux(tracks), Work()
        while True:
            self._beat()
            try:
                packet = next(packets)
                frames = packet.decode()
            except StopIteration:
                return
            except av.InvalidDataError:
                is_damaged = follows_loss = True
                continue
            except (av.FFmpegError, EOFError):
                return
            work.add(packet.size, sum(frame.width * frame.height for frame in frames))
            if self._track and packet.stream is self._track.stream:
                self._track.add(frames)
                continue
            planes = alpha.decode(packet) if alpha else []
            for number, frame in enumerate(frames):
                if matrix := NOT_CONVERTED.get(frame.colorspace):
                    raise UnusableSourceError("unknown colours", f"{matrix}, which is not converted to RGB here")
                is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)
                yield frame, planes[number] if number < len(planes) else None, is_damaged, follows_loss
                follows_loss = False


def _is_picture(stream: av.VideoStream) -> bool:
    """Whether a stream is an attached picture, such as a cover."""
    return bool(stream.disposition & (av.stream.Disposition.attached_pic | av.stream.Disposition.still_image))


def _is_cover(stream: av.VideoStream) -> bool:
    """Whether the codec of a stream is one of pictures."""
    return stream.codec_context is not None and stream.codec_context.name in _COVERS


# --- Presentation times of frames, corrected: decoders return frames in the order of presentation ---------------------

_TS_DISCONT = 0x0200
"""Flag in `container.format.flags`: times may restart within such a file."""
NO_TIMESTAMPS = 0x0080
"""A stream without a container: its times are ffmpeg's guesses."""
_JUMP_SECONDS = 10.0
"""Seconds; a longer gap between two frames of such a file is a restart of time, as in ffmpeg."""
_BACK_SECONDS = 1.0
"""Seconds; a time this far before the last one is a restart."""


class Clock:
    """Times of consecutive frames, in ticks, strictly increasing."""

    def __init__(self, format: av.ContainerFormat, time_base: Fraction, fps: float) -> None:
        self.is_regular = True
        """Whether all times were the file's own, so that seeking works."""
        self._may_jump = bool(format.flags & _TS_DISCONT)
        self._has_no_times = bool(format.flags & NO_TIMESTAMPS)
        self._has_decoding_times = format.name == "avi"  # which has no others
        self._step = max(1, round(1 / (fps * time_base)))
        self._back, self._jump = _BACK_SECONDS / time_base, _JUMP_SECONDS / time_base
        self._last: int | None = None
        self._offset = 0
        self._num_wrong = {"pts": 0, "dts": 0}
        self._before: dict[str, int] = {}

    def __call__(self, frame: av.VideoFrame) -> int:
        stated, last = self._stated(frame), self._last
        step = frame.duration or self._step
        if stated is None:
            time = 0 if last is None else last + step
            self.is_regular = False
        else:
            time = stated + self._offset
            if last is not None and (last - time > self._back or (self._may_jump and time - last > self._jump)):
                self._offset += last + step - time
                time = last + step
            elif last is not None and time <= last:
                time = last + step
            self.is_regular = self.is_regular and time == stated
        self._last = time
        return time

    def _stated(self, frame: av.VideoFrame) -> int | None:
        """The file's time: decoding times are used if presentation times run backwards more often."""
        if self._has_no_times:
            return None
        if self._has_decoding_times and frame.dts is not None:
            return frame.dts
        for name, time in (("pts", frame.pts), ("dts", frame.dts)):
            if time is not None:
                self._num_wrong[name] += name in self._before and time <= self._before[name]
                self._before[name] = time
        if frame.pts is not None and (frame.dts is None or self._num_wrong["pts"] <= self._num_wrong["dts"]):
            return frame.pts
        return frame.dts


# --- Deinterlacing by ffmpeg's bwdif ----------------------------------------------------------------------------------


def deinterlaced(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames; those that are marked as interlaced are deinterlaced, with their neighbours."""
    filter, before = None, None
    for frame in frames:
        if filter is not None and not filter.is_interlaced(frame):
            yield from filter.rest()
            filter, before = None, None
        if filter is None:
            if not frame.pixels.interlaced_frame:
                before = frame
                yield frame
                continue
            filter = _Bwdif(frame, before if before is not None and _shape(before) == _shape(frame) else None)
        yield from filter.put(frame)
    if filter is not None:
        yield from filter.rest()


def _shape(frame: Frame) -> tuple[int, int, str]:
    return frame.pixels.width, frame.pixels.height, frame.pixels.format.name


class _Bwdif:
    """Filter with one output frame for each input frame, delayed by one."""

    def __init__(self, first: Frame, before: Frame | None) -> None:
        self._shape = _shape(first)
        width, height, format = self._shape
        self._graph, self._waiting = av.filter.Graph(), deque()
        try:
            source = self._graph.add_buffer(width=width, height=height, format=format, time_base=first.pixels.time_base)
            bwdif = self._graph.add("bwdif", "mode=send_frame:deint=interlaced")
            self._graph.link_nodes(source, bwdif, self._graph.add("buffersink")).configure()
        except (av.FFmpegError, ValueError) as error:
            raise UnusableSourceError("interlaced", f"{format}: {error}") from None
        self._count = 0
        if before is not None:
            self._push(before)
            self._waiting[-1] = None

    def is_interlaced(self, frame: Frame) -> bool:
        return _shape(frame) == self._shape

    def put(self, frame: Frame) -> list[Frame]:
        self._push(frame)
        return self._pull()

    def rest(self) -> list[Frame]:
        self._graph.push(None)
        return self._pull()

    def _push(self, frame: Frame) -> None:
        pts = frame.pixels.pts
        frame.pixels.pts = self._count  # bwdif needs increasing times
        self._graph.push(frame.pixels)
        frame.pixels.pts = pts
        self._count += 1
        self._waiting.append(frame)

    def _pull(self) -> list[Frame]:
        found = []
        while True:
            try:
                pixels = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):
                return found
            frame = self._waiting.popleft()
            if frame is not None:
                found.append(replace(frame, pixels=pixels, is_deinterlaced=frame.pixels.interlaced_frame))
