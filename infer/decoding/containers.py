"""Video files that anybody may have made, opened within limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
from av.container import InputContainer

from megadit.infer.decoding.rules import MAX_PIXELS

CONTAINERS = (
    "mov,mp4,m4a,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,m4v,gif,apng,h264,hevc,ivf,mxf,yuv4mpegpipe,nut,"
    "dv,obu,mjpeg,vc1,gxf"
)
"""None of them names other files, as playlists do."""


@contextmanager
def open_container(
    file: str | BinaryIO, *, containers: str = CONTAINERS, max_pixels: float = MAX_PIXELS
) -> Iterator[InputContainer]:
    """A video file that anybody may have made: ffmpeg takes it for one of `containers`, or not at all.

    Neither finding out what it holds, for which ffmpeg decodes pictures before anybody can ask for their size, nor
    decoding, within which the size may change, makes room for a picture of many more than `max_pixels`.

    Raises:
        av.FFmpegError: if it is none of these.
    """
    limit = pixel_limit(max_pixels)
    with av.open(file, options={"format_whitelist": containers, "max_pixels": limit}) as container:
        for stream in container.streams.video:
            stream.codec_context.options = {"max_pixels": limit}
        yield container


def pixel_limit(max_pixels: float) -> str:
    """ffmpeg's option: a picture is stored in whole blocks, and so somewhat larger than it is shown."""
    return str(min(int(1.05 * max_pixels) + (1 << 16), (1 << 31) - 1))
