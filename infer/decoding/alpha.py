"""Alpha channels that no decoder of a video returns: side data of VP8 and VP9, and the track of an animated AVIF."""

from collections import deque
from collections.abc import Iterable, Iterator

import av
import numpy as np

from megadit.infer.decoding.containers import pixel_limit
from megadit.infer.decoding.rules import Rules

_DECODERS = {"vp8": "vp8", "vp9": "vp9", "libvpx": "vp8", "libvpx-vp9": "vp9"}
_MOST_WAITING = 64
"""Frames that wait for their alpha, or it for them: ffmpeg reads the tracks of a file up to a second apart."""
Decoded = tuple[av.VideoFrame, np.ndarray | None, bool, bool]
"""(frame, its alpha channel in uint8 HW, whether it is damaged, whether others before it were lost)"""


class AlphaSideData:
    """Alpha channel of a VP8 or VP9 video: side data of its packets, which its decoder does not read."""

    def __init__(self, stream: av.VideoStream, rules: Rules) -> None:
        self._decoder = av.CodecContext.create(_DECODERS[stream.codec_context.name], "r")
        self._decoder.options = {"max_pixels": pixel_limit(rules.max_pixels)}
        self._decoder.thread_count = 1

    def decode(self, packet: av.Packet) -> list[np.ndarray]:
        """Alpha of each frame of a packet: uint8 HW."""
        for data in packet.iter_sidedata():
            if data.data_type == "matroska_block_additional":
                content = bytes(data)[8:]  # after the identifier of the side data
                try:
                    frames = self._decoder.decode(av.Packet(content))
                except av.FFmpegError:
                    return []
                return [frame.to_ndarray(format=frame.format.name)[: frame.height, : frame.width] for frame in frames]
        return []


class AlphaTrack:
    """The grey stream of an animated AVIF that is the alpha channel of another one."""

    def __init__(self, stream: av.VideoStream) -> None:
        self.stream = stream
        self._planes: dict[int, np.ndarray] = {}
        """Time -> alpha channel."""

    @classmethod
    def find(cls, container: av.container.InputContainer, stream: av.VideoStream) -> "AlphaTrack | None":
        """The alpha track of `stream`; None if it has none."""
        if container.metadata.get("major_brand") != "avis":
            return None
        after = (other for other in container.streams.video if other.index > stream.index and other.codec_context)
        tracks = (cls(other) for other in after if other.frames == stream.frames and _is_grey(other))
        return next(tracks, None)

    def add(self, frames: Iterable[av.VideoFrame]) -> None:
        """Add frames of the track."""
        self._planes.update((frame.pts, _eight_bits(frame)) for frame in frames)
        while len(self._planes) > _MOST_WAITING:  # of times at which no frame is
            del self._planes[next(iter(self._planes))]

    def paired(self, frames: Iterable[Decoded]) -> Iterator[Decoded]:
        """The frames with their planes, whose packets come before or after theirs."""
        waiting: deque[Decoded] = deque()
        for decoded in frames:
            waiting.append(decoded)
            while waiting and (waiting[0][0].pts in self._planes or len(waiting) > _MOST_WAITING):
                yield self._with_plane(*waiting.popleft())
        yield from (self._with_plane(*decoded) for decoded in waiting)

    def _with_plane(self, frame: av.VideoFrame, alpha_HW: np.ndarray | None, *flags: bool) -> Decoded:
        return frame, self._planes.pop(frame.pts, alpha_HW), *flags


def _is_grey(stream: av.VideoStream) -> bool:
    return (stream.codec_context.pix_fmt or "").startswith("gray")


def _eight_bits(frame: av.VideoFrame) -> np.ndarray:
    """A grey frame as it is stored, in uint8 HW."""
    plane_HW = frame.to_ndarray()
    return (plane_HW >> max(0, frame.format.components[0].bits - 8)).astype(np.uint8)
