"""Rows of the table: pictures, those that move, and files that are none."""

import io
import struct
import zlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

from .drawing import FIELDS, HEIGHT, WIDTH, Make, Row, frames, picture, see_through, stored_as
from .flags import BT2020, HIDDEN, coded

# --- pictures -----------------------------------------------------------------------------------------------------


def _save(path: Path, make: Callable[[], Image.Image], **options: Any) -> None:
    make().save(path, **options)


def plain() -> Image.Image:
    return Image.fromarray(picture(5))


def clear() -> Image.Image:
    return Image.fromarray(see_through(6)[5], "RGBA")


def _still(name: str, make: Callable[[], Image.Image] = plain, **values: Any) -> Row:
    of_row = {key: values.pop(key) for key in list(values) if key in Row.__dataclass_fields__}
    return Row(name=name, make=partial(_save, make=make, **values), **{"numbers": (5,), "fps": 0.0} | of_row)


def _as(mode: str, make: Callable[[], Image.Image] = plain) -> Callable[[], Image.Image]:
    return lambda: make().convert(mode)


GREY = [(87,) * 3, (122,) * 3, (58,) * 3, (128,) * 3]
HIDDEN_GREY = [GREY[0], (0, 0, 0), *GREY[2:]]


def deep(kind: type, white: float) -> Callable[[], Image.Image]:
    """Grey of another depth, in which white is this value."""
    return lambda: Image.fromarray((np.asarray(plain().convert("L")) / 255 * white).astype(kind))


def whole_floats() -> Image.Image:
    return Image.fromarray(np.asarray(plain().convert("L")).astype(np.float32))


def _palette_in_part() -> Image.Image:
    """A palette whose colours are transparent by a table."""
    quantized = plain().quantize(16)
    green = quantized.getpixel((3 * WIDTH // 4, 5))
    quantized.info["transparency"] = bytes(0 if entry == green else 255 for entry in range(16))
    return quantized


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(depth: int, colour: int, rows: Iterable[np.ndarray], more: bytes = b"") -> bytes:
    """A PNG as Pillow does not write it."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, 0)) + more
    content = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")


def _png16(path: Path, *, colour: int) -> None:
    """16 bits a channel: colour 2 is RGB, 4 grey with alpha, 6 RGBA."""
    rgba = see_through(6)[5].astype(np.uint16) * 257
    values = {
        2: rgba[..., :3],
        6: rgba,
        4: np.dstack([np.asarray(plain().convert("L")).astype(np.uint16) * 257, rgba[..., 3]]),
    }[colour]
    path.write_bytes(_png(16, colour, (row.astype(">u2") for row in values)))


def _png_of_few_bits(path: Path, *, depth: int) -> None:
    """Grey 1, 2, 3 and 0 in the four fields, of which 2 is transparent."""
    levels = picture(0, fields=((1,) * 3, (2,) * 3, (3,) * 3, (0,) * 3))[..., :1]
    bits = np.unpackbits(levels, axis=2)[..., 8 - depth :].reshape(HEIGHT, -1)
    path.write_bytes(_png(depth, 0, np.packbits(bits, axis=1), _chunk(b"tRNS", struct.pack(">H", 2))))


def _premultiplied(path: Path) -> None:
    """A TIFF whose colours are multiplied by its alpha already (ExtraSamples 1): half of the green field's."""
    rgba = see_through(6)[5].astype(np.uint16)
    rgba[..., 3] = np.maximum(rgba[..., 3], 128)
    rgba[..., :3] = (rgba[..., :3] * rgba[..., 3:] + 127) // 255
    Image.fromarray(rgba.astype(np.uint8), "RGBA").save(path)
    content, unassociated = path.read_bytes(), struct.pack("<HHII", 338, 3, 1, 2)
    assert content.count(unassociated) == 1
    path.write_bytes(content.replace(unassociated, struct.pack("<HHII", 338, 3, 1, 1)))


@cache
def p3_profile() -> bytes:
    """Display P3 as a profile: sRGB's with other primaries, adapted to D50."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    columns = {
        b"rXYZ": (0.51512, 0.24120, -0.00105),
        b"gXYZ": (0.29198, 0.69225, 0.04189),
        b"bXYZ": (0.15710, 0.06657, 0.78407),
    }
    count = struct.unpack(">I", profile[128:132])[0]
    for entry in range(count):
        tag, offset, _ = struct.unpack(">4sII", profile[132 + 12 * entry : 144 + 12 * entry])
        if tag in columns:
            profile[offset + 8 : offset + 20] = struct.pack(">3i", *(round(value * 65536) for value in columns[tag]))
    return bytes(profile)


def in_p3() -> Image.Image:
    """The picture in the numbers of Display P3."""
    source = ImageCms.createProfile("sRGB"), ImageCms.ImageCmsProfile(io.BytesIO(p3_profile()))
    return ImageCms.profileToProfile(plain(), *source)


def _coded(path: Path, *, primaries: int, transfer: int, make: Callable[[], Image.Image]) -> None:
    """With numbers of H.273 in place of a profile."""
    image = make()
    image.info.pop("icc_profile", None)
    image.save(path, quality=95)
    content = path.read_bytes()
    if path.suffix == ".avif":
        before, mark, after = content.partition(b"colrnclx")
        path.write_bytes(before + mark + struct.pack(">HH", primaries, transfer) + after[4:])
    else:
        path.write_bytes(content[:33] + _chunk(b"cICP", bytes([primaries, transfer, 0, 1])) + content[33:])


def _with_chunks(path: Path, *, chunks: dict[bytes, bytes], make: Callable[[], Image.Image], **options: Any) -> None:
    image = make()
    image.info.pop("icc_profile", None)
    image.save(path, **options)
    content = path.read_bytes()
    path.write_bytes(content[:33] + b"".join(map(_chunk, chunks, chunks.values())) + content[33:])


def _in_light(make: Callable[[], Image.Image] = plain) -> Callable[[], Image.Image]:
    """Linear light in place of sRGB, as renderers write it."""
    steps = np.arange(256) / 255
    light = np.where(steps <= 0.04045, steps / 12.92, ((steps + 0.055) / 1.055) ** 2.4)
    table = (255 * light).round().astype(np.uint8).tolist()

    def made() -> Image.Image:
        image = make()
        colours, alpha = image.split()[:3], image.split()[3:]
        return Image.merge(image.mode, [*(each.point(table) for each in colours), *alpha])

    return made


def _gamma_rows() -> list[Row]:
    def gamma(value: int) -> dict[bytes, bytes]:
        return {b"gAMA": struct.pack(">I", value)}

    def places(*values: int) -> dict[bytes, bytes]:
        return {b"cHRM": struct.pack(">8I", *values)}

    def deep_light() -> Image.Image:
        return Image.fromarray(np.asarray(_in_light(_as("L"))()).astype(np.uint16) * 257)

    srgb = places(31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
    p3 = places(31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)
    key = {"transparency": _in_light()().getpixel((WIDTH - 1, 0))}
    rows = {
        "gamma": (gamma(100_000) | srgb, _in_light(), {}, {}),
        "gamma_grey": (gamma(100_000), _in_light(_as("L")), {}, {"fields": GREY}),
        "gamma_rgba": (gamma(100_000), _in_light(clear), {}, {"fields": HIDDEN}),
        "gamma_palette": (gamma(100_000), lambda: _in_light()().quantize(16), {}, {}),
        "gamma_key": (gamma(100_000), _in_light(), key, {"fields": HIDDEN}),
        "gamma_grey16": (gamma(100_000), deep_light, {}, {"fields": GREY}),
        "gamma_p3": (gamma(45_455) | p3, in_p3, {}, {}),
        "gamma_of_srgb": (gamma(45_455) | srgb, plain, {}, {"near": 0}),
        "gamma_in_srgb": (gamma(100_000) | {b"sRGB": b"\0"}, plain, {}, {"near": 0}),
        "gamma_of_nothing": (gamma(0) | places(*[0] * 8), plain, {}, {"near": 0}),
    }
    return [
        Row(name=f"{name}.png", make=partial(_with_chunks, chunks=chunks, make=make, **options), numbers=(5,), fps=0.0,
            **{"near": 14} | of_row)
        for name, (chunks, make, options, of_row) in rows.items()
    ]  # fmt: skip


def _coded_rows(suffix: str) -> list[Row]:
    def see_through_p3() -> Image.Image:
        image = in_p3()
        image.putalpha(clear().getchannel("A"))
        return image

    kinds = {
        "p3": (12, 13, in_p3, FIELDS),
        "p3_alpha": (12, 13, see_through_p3, HIDDEN),
        "hlg": (9, 18, lambda: Image.fromarray(picture(5, fields=coded(BT2020, 18))), FIELDS),
        "pq": (9, 16, lambda: Image.fromarray(picture(5, fields=coded(BT2020, 16))), FIELDS),
    }
    return [
        Row(name=f"{name}_coded.{suffix}", make=partial(_coded, primaries=primaries, transfer=transfer, make=make),
            numbers=(5,) if transfer == 13 else None, fps=0.0, near=14, fields=fields)
        for name, (primaries, transfer, make, fields) in kinds.items()
        if name != "pq" or suffix == "png"  # its eight bits are too few for an encoder with losses
    ]  # fmt: skip


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


EXIF = {1: "upright", 2: "hflip", 3: "rot180", 4: "vflip", 5: "transpose", 6: "rot90", 7: "transverse", 8: "rot270"}


def _app1(exif: bytes) -> PngImagePlugin.PngInfo:
    """EXIF as the text in which ImageMagick wrote it before PNG had a chunk for it."""
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type APP1", f"\ngeneric profile\n{len(exif):8}\n{exif.hex()}\n", zip=True)
    return info


def _compressed(name: str, text: str) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt(name, text, zip=True)
    return info


def _turned(orientation: int) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(stored_as(EXIF[orientation], picture(5))))


def _exif_still(orientation: int, suffix: str) -> Row:
    options = {"quality": 95} if suffix != "png" else {}
    make = partial(_turned, orientation)
    return _still(f"exif{orientation}.{suffix}", make, exif=_exif(orientation), near=12, **options)


PICTURES = [
    _still("a.png"), _still("a.jpg", quality=95), _still("a.webp", lossless=True),
    _still("lossy.webp", quality=90, near=12),
    _still("a.avif", quality=90, near=12), _still("avif_as.bmp", format="AVIF", quality=90, near=12),
    _still("a.jp2"), _still("a.qoi"), _still("a.bmp"),
    _still("a.tif"), _still("a.ppm"), _still("a.gif"), _still("jpeg.jpeg", quality=95),
    _still("progressive.jpg", quality=95, progressive=True), _still("png_as.jpg", format="PNG"),
    _still("jpg_as.png", format="JPEG", quality=95), _still("webp_as.jpg", format="WEBP", lossless=True),
    *(_still(f"{name}.tif", compression=name, near=12)
      for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
    _still("pages.tif", save_all=True, append_images=[Image.new("RGB", (20, 20))]),
    _still("mpo.jpg", format="MPO", save_all=True, append_images=[Image.new("RGB", (20, 20))], quality=95),
    _still("grey.png", _as("L"), fields=GREY, near=3), _still("grey.jpg", _as("L"), fields=GREY, quality=95),
    _still("bits.png", lambda: plain().convert("L").point(lambda value: 255 * (value > 100), mode="1"),
           fields=[(0,) * 3, (255,) * 3, (0,) * 3, (255,) * 3]),
    _still("palette.png", lambda: plain().quantize(16)), _still("palette.bmp", lambda: plain().quantize(16)),
    _still("cmyk.jpg", _as("CMYK"), quality=95), _still("cmyk.tif", _as("CMYK")),
    _still("rgba.png", clear, fields=HIDDEN), _still("rgba.webp", clear, lossless=True, fields=HIDDEN),
    _still("rgba.tif", clear, fields=HIDDEN), _still("la.png", _as("LA", clear), fields=HIDDEN_GREY),
    _still("palette_alpha.png", _palette_in_part, fields=HIDDEN),
    _still("palette_key.png", lambda: plain().quantize(16), fields=HIDDEN,
           transparency=_palette_in_part().info["transparency"].index(0)),
    Row(name="premultiplied.tif", make=_premultiplied, numbers=(5,), fps=0.0, near=3,
        fields=(FIELDS[0], (20, 90, 20), *FIELDS[2:])),
    _still("key.png", transparency=FIELDS[1], fields=HIDDEN),
    _still("alpha.gif", clear, fields=HIDDEN),
    _still("grey16.png", deep(np.uint16, 65535), fields=GREY, near=3),
    _still("grey16.tif", deep(np.uint16, 65535), fields=GREY, near=3),
    _still("grey16.pgm", deep(np.uint16, 65535), fields=GREY, near=3),
    _still("dark16.png", deep(np.uint16, 12000), near=3,
           fields=[tuple(value * 12000 // 65535 for value in grey) for grey in GREY], numbers=None),
    _still("float1.tif", deep(np.float32, 1), fields=GREY, near=3),
    _still("float255.tif", whole_floats, fields=GREY, near=3),
    _still("float.pfm", deep(np.float32, 1), fields=GREY, near=3),
    _still("int32.tif", deep(np.int32, 65535), fields=GREY, near=3),
    _still("radiance.tif", deep(np.float32, 7.3), refused="unknown range"),
    *(Row(name=f"deep{colour}.png", make=partial(_png16, colour=colour), numbers=(5,), fps=0.0, fields=fields, near=3)
      for colour, fields in ((2, FIELDS), (4, HIDDEN_GREY), (6, HIDDEN))),
    *(_still(f"p3.{suffix}", in_p3, near=12, icc_profile=p3_profile(), **options)
      for suffix, options in (("jpg", {"quality": 95}), ("png", {}), ("webp", {"lossless": True}), ("tif", {}))),
    *(Row(name=f"grey{depth}.png", make=partial(_png_of_few_bits, depth=depth), numbers=None, fps=0.0,
          fields=[(step,) * 3, (0,) * 3, (3 * step,) * 3, (0,) * 3]) for depth, step in ((2, 85), (4, 17))),
    *(row for suffix in ("png", "avif") for row in _coded_rows(suffix)),
    _still("p3_key.png", in_p3, near=12, icc_profile=p3_profile(), fields=HIDDEN,
           transparency=in_p3().getpixel((WIDTH - 1, 0))),
    *_gamma_rows(),
    _still("srgb.jpg", quality=95, icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
    _still("profile_of_nothing.png", icc_profile=b"not a profile"),
    *(_exif_still(orientation, "jpg") for orientation in EXIF),
    *(_exif_still(6, suffix) for suffix in ("png", "webp", "tif")),
    _still("app1.png", partial(_turned, 6), pnginfo=_app1(_exif(6).tobytes())),
    _still("long_text.png", pnginfo=_compressed("XML:com.adobe.xmp", "x" * 3_000_000)),
    _still("xmp_in_app1.png", pnginfo=_app1(b"http://ns.adobe.com/xap/1.0/\0<x/>")),
]  # fmt: skip


def _animation(name: str, durations: Any = 40, **values: Any) -> Row:
    of_row = {key: values.pop(key) for key in list(values) if key in Row.__dataclass_fields__}

    def make(path: Path) -> None:
        first, *rest = map(Image.fromarray, values.get("pictures") or frames(6))
        options = {key: value for key, value in values.items() if key != "pictures"}
        first.save(path, save_all=True, append_images=rest, duration=durations, loop=0, **options)

    return Row(name=name, make=make, **{"numbers": range(6), "fps": 25.0, "near": 12} | of_row)


JOINED_MS = [40, 40, 80, 40, 120, 40]
ANIMATIONS = [
    row
    for suffix, options in (("gif", {}), ("png", {}), ("apng", {"format": "PNG"}), ("webp", {"lossless": True}))
    for row in (
        _animation(f"even.{suffix}", **options),
        _animation(f"joined.{suffix}", JOINED_MS, numbers=(0, 1, 2, 2, 3, 4, 4, 4, 5), **options),
        _animation(f"last_held.{suffix}", [40] * 5 + [120], numbers=(*range(6), 5, 5), **options),
        _animation(f"alpha.{suffix}" if suffix != "gif" else "moving_alpha.gif", pictures=see_through(6), fields=HIDDEN,
                   **options | ({"disposal": 2} if suffix == "gif" else {})),
    )
]  # fmt: skip
ANIMATIONS += [
    _animation("even.avif", quality=95),
    _animation("alpha.avif", pictures=see_through(6), fields=HIDDEN, quality=95),
]


# --- no pictures --------------------------------------------------------------------------------------------------


def _holds(content: bytes) -> Make:
    return lambda path: path.write_bytes(content) and None


NOTHING = [
    Row(name=name, make=_holds(content), refused="broken")
    for name, content in {
        "words.mp4": b"this is not a video\n" * 100,
        "page.jpg": b"<html>not found</html>",
        "playlist.mp4": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "heic_as.jpg": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200),
        "empty.mkv": b"",
    }.items()
]
