"""Opens untrusted video files within limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
from av.container import InputContainer

from megadit.infer.decoding.rules import MAX_PIXELS

CONTAINERS = (
    "mov,mp4,m4a,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,m4v,gif,apng,h264,hevc,ivf,mxf,yuv4mpegpipe,nut,"
    "dv,obu,mjpeg,mpjpeg,vc1,gxf"
)
"""Containers that are opened; none of them refers to other files, as playlists do."""


@contextmanager
def open_container(
    file: str | BinaryIO, *, containers: str = CONTAINERS, max_pixels: float = MAX_PIXELS
) -> Iterator[InputContainer]:
    """Open an untrusted video file, as one of `containers` only.

    `max_pixels` limits the memory of a picture, both while ffmpeg probes the file and while it decodes, when the size
    may change.

    Raises:
        av.FFmpegError: if it is in none of these containers.
    """
    limit = pixel_limit(max_pixels)
    options = {"format_whitelist": containers, "max_pixels": limit}
    with av.open(file, options=options, metadata_errors="replace") as container:  # titles have any encoding
        for stream in container.streams.video:
            if stream.codec_context is not None:
                stream.codec_context.options = {"max_pixels": limit}
        yield container


def pixel_limit(max_pixels: float) -> str:
    """Value of ffmpeg's option: a picture is stored in whole blocks, so slightly larger than it is shown."""
    return str(min(int(1.05 * max_pixels) + (1 << 16), (1 << 31) - 1))
