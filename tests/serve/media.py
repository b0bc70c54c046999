"""Media for tests of the service: right ones and wrong ones, as the bytes of files."""

import io
import struct
import zlib

import numpy as np

from megadit.infer.media.animations import encode_animation, encode_image
from megadit.infer.media.video_io import encode_mp4


def clip(num_frames: int, seed: int, height: int = 16, width: int = 24) -> np.ndarray:
    """uint8 THWC, the same coarse picture in each frame."""
    coarse = np.random.default_rng(seed).integers(0, 255, (1, height // 4, width // 4, 3), dtype=np.uint8)
    return coarse.repeat(num_frames, 0).repeat(4, 1).repeat(4, 2)


PNG = encode_image(clip(1, 1)[0], ".png")
OTHER_PNG = encode_image(clip(1, 2)[0], ".png")
MP4 = encode_mp4(clip(9, 3), 8)
GIF = encode_animation(np.concatenate([clip(1, seed) for seed in range(9)]), 8, ".gif")
HALF = np.zeros((16, 24, 3), np.uint8)
HALF[:, 12:] = 255
MASK = encode_image(HALF, ".png")
"""White is the right half."""


def png_header(width: int, height: int) -> bytes:
    """The beginning of a png that says to be so large, and holds a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def real_png(width: int, height: int) -> bytes:
    """One that holds what it says, and is small nevertheless."""
    return encode_image(np.zeros((height, width, 3), np.uint8), ".png")


def endless_gif() -> bytes:
    """Two frames, of which one is shown 65,535 times as long as the other."""
    from PIL import Image

    frames, buffer = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")], io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=[10, 655350])
    return buffer.getvalue()


HOSTILE = {
    "nothing of a kind": b"hello, world",
    "a script": b"#!/bin/sh\ntouch /tmp/owned\n",
    "a playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a page": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "a zip": b"PK\x03\x04" + bytes(100),
    "a truncated png": PNG[: len(PNG) // 2],
    "a truncated mp4": MP4[: len(MP4) // 2],
    "a truncated gif": GIF[:40],
    "65,535 x 65,535 pixels": png_header(65535, 65535),
    "2,147,483,647 pixels wide": png_header(2**31 - 1, 1),
    "1 x 100,000 pixels": real_png(1, 100_000),
    "100,000 x 1 pixels": real_png(100_000, 1),
    "8,000 x 8,000 pixels in 190 KB": real_png(8000, 8000),
    "a webp of 16,384 x 16,384": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + bytes(10),
    "a gif that lasts": endless_gif(),
    "ten hours": encode_mp4(clip(361, 5), 0.01),
}
