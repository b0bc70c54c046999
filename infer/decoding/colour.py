"""Conversion of colours to sRGB: transfers and primaries of videos and pictures, ICC profiles of pictures."""

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

PQ, HLG = 16, 18
"""Transfers of high dynamic range, by their numbers in ITU-T H.273."""
_SRGB_CURVE = 13
WIDE = {
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),  # BT.2020
    11: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),  # DCI P3
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),  # Display P3
}
"""Primaries by their numbers in H.273: x and y of red, green and blue. White is D65."""
NOT_CONVERTED = {8: "YCgCo", 11: "Y'D'zD'x", 14: "ICtCp", 15: "IPT-C2", 16: "YCgCo-Re", 17: "YCgCo-Ro"}
"""Matrices by their numbers in H.273 that ffmpeg would read as BT.601."""
_Places = Sequence[tuple[float, float]]
_SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
_D65 = (0.3127, 0.3290)
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
"""Matrix from XYZ to the responses of the eye's cones, by which ICC profiles adapt whites."""
_WHITE_NITS = 203.0
"""Luminance of diffuse white in HLG and PQ, in nits (BT.2408)."""
_PEAK = 1000.0 / _WHITE_NITS
_KNEE = 0.75
"""Luminance above which colours are compressed; 1 is diffuse white."""
_NEARLY_SRGB = 2
"""Largest change of a colour, 0..255, by a profile that still counts as sRGB."""
_SRGB_GAMMA = 1 / 2.2
"""Gamma of PNGs in sRGB."""


def conversion(transfer: int, primaries: int) -> str:
    """Name of the conversion of such a video to sRGB; "" if none is needed."""
    if transfer in (PQ, HLG):
        return "HDR"
    return "wide gamut" if primaries in WIDE else ""


def to_screen(picture_HWC: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """A picture of 16 bits converted to uint8 sRGB; high dynamic range is tone-mapped."""
    linear = _linear_of_16_bits(transfer)[picture_HWC]
    if primaries in WIDE:
        linear = np.maximum(linear @ _to_srgb(primaries), 0)
    if transfer in (PQ, HLG):
        brightest = linear.max(axis=-1, keepdims=True)
        linear *= _rolled_off(brightest) / np.maximum(brightest, 1e-9)
    light = np.clip(linear, 0, 1)
    return _srgb_of(light) if transfer == _SRGB_CURVE else (255 * light ** np.float32(1 / 2.4)).round().astype(np.uint8)


@lru_cache(maxsize=4)
def _linear_of_16_bits(transfer: int) -> np.ndarray:
    return _linear(np.arange(1 << 16) / 65535, transfer).astype(np.float32)


@lru_cache(maxsize=4)
def _to_srgb(primaries: int) -> np.ndarray:
    """Matrix from linear RGB of these primaries to linear sRGB, for colours as rows."""
    return _between(WIDE[primaries], _D65)


def _between(primaries: _Places, white: tuple[float, float]) -> np.ndarray:
    """Matrix from linear RGB of these primaries and white to linear sRGB, for colours as rows; Bradford's adaptation
    makes one white the other."""
    cones = [_BRADFORD @ _xyz(*each) for each in (_D65, white)]
    adapted = np.linalg.inv(_BRADFORD) @ np.diag(cones[0] / cones[1]) @ _BRADFORD
    return (np.linalg.inv(_to_xyz(_SRGB, _D65)) @ adapted @ _to_xyz(primaries, white)).T.astype(np.float32)


def _linear(signal: np.ndarray, transfer: int) -> np.ndarray:
    """Linear light of a signal, with diffuse white at 1."""
    if transfer == PQ:  # SMPTE ST 2084
        m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
        power = signal ** (1 / m2)
        return 10000 / _WHITE_NITS * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)
    if transfer == HLG:  # BT.2100, with the system gamma of 1.2 for each channel, as in zimg
        a = 0.17883277
        b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
        scene = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
        return _PEAK * scene**1.2
    if transfer == _SRGB_CURVE:
        return np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4)
    return signal**2.4  # BT.1886


def _rolled_off(light: np.ndarray) -> np.ndarray:
    """Reinhard's curve above the knee, which reaches 1 at the peak."""
    over, most = (light - _KNEE) / (1 - _KNEE), (_PEAK - _KNEE) / (1 - _KNEE)
    over = np.clip(over, 0, most)
    return np.where(light <= _KNEE, light, _KNEE + (1 - _KNEE) * over * (1 + over / most**2) / (1 + over))


def _to_xyz(primaries: _Places, white: tuple[float, float]) -> np.ndarray:
    columns = np.stack([_xyz(*each) for each in primaries], axis=1)
    return columns * np.linalg.solve(columns, _xyz(*white))


def _xyz(x: float, y: float) -> np.ndarray:
    return np.array([x / y, 1, (1 - x - y) / y])


def _srgb_of(light: np.ndarray) -> np.ndarray:
    """Numbers of linear light, 0..1, in 8 bits."""
    signal = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** np.float32(1 / 2.4) - 0.055)
    return (255 * signal).round().astype(np.uint8)


# --- pictures -----------------------------------------------------------------------------------------------------


def coded_to_srgb(image: Image.Image, transfer: int, primaries: int) -> Image.Image:
    """A picture in sRGB whose colours are of this transfer and these primaries; unchanged if it is."""
    if not conversion(transfer, primaries) or image.mode not in ("RGB", "RGBA"):
        return image
    return _converted(
        image,
        lambda colours: Image.fromarray(to_screen(np.asarray(colours).astype(np.uint16) * 257, transfer, primaries)),
    )


def profile_to_srgb(image: Image.Image) -> Image.Image:
    """The picture in sRGB, without its ICC profile; unchanged if it has no usable profile."""
    profile = image.info.get("icc_profile")
    if not profile:
        return image
    transform = _transform(profile, _MODES.get(image.mode, image.mode))
    return _converted(image, lambda colours: ImageCms.applyTransform(colours, transform)) if transform else image


def gamma_to_srgb(image: Image.Image) -> Image.Image:
    """The picture in sRGB, by the gamma and the primaries of a PNG without a profile; unchanged if they are those of
    sRGB, or none that a screen can have."""
    info = image.info
    gamma, places = info.get("gamma", _SRGB_GAMMA), info.get("chromaticity")
    is_srgb = "srgb" in info or "icc_profile" in info or not ("gamma" in info or places)
    if is_srgb or image.mode not in _MODES or not 0.1 < gamma < 10:
        return image
    matrix = np.eye(3, dtype=np.float32)
    if places and min(places[1::2]) > 0:
        white, *primaries = zip(places[::2], places[1::2], strict=True)
        with suppress(np.linalg.LinAlgError):
            matrix = _between(primaries, white)
    has_curve, is_wide = abs(gamma / _SRGB_GAMMA - 1) > 0.05, abs(matrix - np.eye(3)).max() > 0.02
    if not has_curve and not is_wide:
        return image
    steps = np.arange(256) / 255
    linear = (steps ** (1 / gamma) if has_curve else _linear(steps, _SRGB_CURVE)).astype(np.float32)

    def convert(colours: Image.Image) -> Image.Image:
        light = linear[np.asarray(colours)]
        if is_wide and colours.mode == "RGB":
            light = np.clip(light @ matrix, 0, 1)
        return Image.fromarray(_srgb_of(light))

    return _converted(image, convert)


_MODES = {"L": "L", "LA": "L", "RGB": "RGB", "RGBA": "RGB", "P": "RGB", "PA": "RGB"}
"""Mode of a picture -> mode of its colours."""


def _converted(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The picture with other colours; transparent where it was."""
    mode = _MODES.get(image.mode, image.mode)
    shown = convert(image.convert(mode))
    if image.has_transparency_data:
        shown.putalpha(image.convert(f"{mode}A").getchannel("A"))
    return shown


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Transform of a profile to sRGB; None if it makes no visible change."""
    if mode not in ("RGB", "L", "CMYK"):
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    if mode == "CMYK":
        return transform
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    probe = steps if mode == "L" else np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, 3)
    probe = Image.fromarray(probe[None], mode)
    off = np.asarray(probe.convert("RGB"), np.int16) - np.asarray(ImageCms.applyTransform(probe, transform))
    return transform if np.abs(off).max() > _NEARLY_SRGB else None
