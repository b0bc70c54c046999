"""File types: by suffix where that is a usual one, else by the first bytes."""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from megadit.infer.decoding import animations
from megadit.infer.decoding.rules import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from megadit.models.shared.documents import placeholder
from megadit.train.data.ingest.plan import Kind

HEAD_BYTES = animations.HEAD_BYTES
SUFFIXES: dict[Kind, tuple[str, ...]] = {"video": VIDEO_SUFFIXES, "image": IMAGE_SUFFIXES}
NEVER = frozenset(
    ".txt .caption .json .jsonl .ndjson .csv .tsv .parquet .toml .yaml .yml .md .npy .npz .pt .pth .safetensors .bin "
    ".pkl .pickle .py .gz .m4a .mp3 .wav .oga .opus .flac .aac .wma .mka .m4b .srt .vtt .pdf .svg .zip .tar "
    ".part .crdownload .download .opdownload .tmp .bak .orig".split()
)
"""Suffixes of texts, tables, tensors and sound, of unfinished downloads and copies: not opened to see whether they are
pictures all the same."""
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC"}
_MAGIC: tuple[tuple[int, bytes, Kind, str], ...] = (
    (0, b"\xff\xd8\xff", "image", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "image", "PNG"),
    (0, b"GIF8", "image", "GIF"),
    (0, b"II*\0", "image", "TIFF"),
    (0, b"MM\0*", "image", "TIFF"),
    (0, b"\xff\x0a", "image", "JPEG XL"),
    (4, b"JXL \r\n\x87\n", "image", "JPEG XL"),
    (4, b"jP  \r\n\x87\n", "image", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "image", "JPEG 2000"),
    (0, b"qoif", "image", "QOI"),
    (0, b"8BPS", "image", "PSD"),
    (0, b"v/1\x01", "image", "EXR"),
    (0, b"\x1aE\xdf\xa3", "video", "Matroska"),
    (0, b"FLV\x01", "video", "FLV"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "video", "ASF"),
    (0, b"\0\0\x01\xba", "video", "MPEG-PS"),
    (0, b"\0\0\x01\xb3", "video", "MPEG video"),
    (0, b"\0\0\0\x01\x67", "video", "H.264"),
    (0, b"\0\0\0\x01\x40\x01", "video", "H.265"),
    (0, b"\x06\x0e\x2b\x34\x02\x05\x01\x01", "video", "MXF"),
    (0, b"YUV4MPEG2 ", "video", "Y4M"),
    (0, b"DKIF", "video", "IVF"),
    (0, b"nut/multimedia container\0", "video", "NUT"),
    (0, b"\x1f\x07\0", "video", "DV"),
)
_NEXT_JPEG = b"\xff\xd9\xff\xd8\xff"
"""The end of a JPEG and the beginning of another; a thumbnail's end is followed by other marks."""
_PORTABLE = re.compile(rb"P[1-6][ \t\r\n#]")


def unknown_picture(head: bytes) -> tuple[str, str]:
    """Reason and detail of a picture that Pillow does not know."""
    found = sniffed(head)
    if found is None:
        return "broken", f"it is no picture but {placeholder(head) or 'nothing that is known'}"
    kind, name = found
    if kind == "video":
        return "broken", f"it is a video ({name}), whatever its name says"
    library = {"HEIC": "pillow-heif", "JPEG XL": "pillow-jxl-plugin"}.get(name)
    return (f"{name} (pip install {library})", "") if library else ("broken", f"a {name} that cannot be read")


def is_media_name(name: str) -> bool:
    """Whether the suffix is that of pictures or videos."""
    suffix = PurePosixPath(name).suffix.lower()
    return any(suffix in suffixes for suffixes in SUFFIXES.values())


def kinds_of(name: str, read_head: Callable[[], bytes]) -> tuple[Kind, ...]:
    """Kinds as which a file can be read, the likeliest first: an animated picture is a video, and its first frame an
    image.

    `read_head` gives its first `HEAD_BYTES` bytes, where the suffix does not say enough.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix == ".gif":
        return ("video",) if animations.is_animated(read_head()) else ("video", "image")
    if suffix in animations.SUFFIXES:
        return ("video", "image") if animations.is_animated(read_head()) else ("image",)
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return (kind,)
    found = None if suffix in NEVER or suffix.endswith("~") else sniffed(read_head())
    return (found[0],) if found else ()


def sniffed(head: bytes) -> tuple[Kind, str] | None:
    """Kind and format's name of a file with these first bytes; None if it is no picture and no known video."""
    if head[4:8] == b"ftyp":
        brand = _BRANDS.get(head[8:12])
        return _moving(head, brand) if brand else None if head[8:11] == b"M4A" else ("video", "MP4")
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WEBP"):
        return ("video", "AVI") if head[8:12] == b"AVI " else _moving(head, "WebP")
    for offset, magic, kind, name in _MAGIC:
        if head.startswith(magic, offset):
            if name == "JPEG" and _NEXT_JPEG in head and b"MPF\0" not in head:  # but for a stereo photo
                return "video", "MJPEG"
            return _moving(head, name) if name in ("PNG", "GIF") else (kind, name)
    if head[:4] == b"OggS" and (b"theora" in head[:256] or b"OVP80" in head[:256]):
        return "video", "Ogg"
    if head.lstrip().startswith(b"--") and b"image/jpeg" in head[:256]:
        return "video", "MJPEG"
    if head[4:8] in (b"moov", b"mdat", b"wide"):
        return "video", "QuickTime"
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return "image", "BMP"
    if _PORTABLE.match(head):
        return "image", "PPM"
    return ("video", "MPEG-TS") if _is_transport_stream(head) else None


def _moving(head: bytes, name: str) -> tuple[Kind, str]:
    return ("video" if animations.is_animated(head) else "image"), name


def _is_transport_stream(head: bytes) -> bool:
    """Packets of 188 bytes, or 192 with the time of each before it."""
    return any(
        len(head) > first + 4 * step and all(head[first + number * step] == 0x47 for number in range(5))
        for first, step in ((0, 188), (4, 192))
    )


def extension_of(head: bytes) -> str:
    """A suffix for content without a name."""
    found = sniffed(head)
    if found is None:
        return ".jpg"  # whoever reads it says what is wrong with it
    kind, name = found
    if kind == "image":
        return ".jpg"
    return {"Matroska": ".mkv", "AVI": ".avi", "GIF": ".gif", "PNG": ".gif", "WebP": ".gif"}.get(name, ".mp4")
