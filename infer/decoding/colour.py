"""Conversion of colours to sRGB: transfers and primaries of videos and pictures, ICC profiles of pictures."""

import io
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
_SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
_WHITE_NITS = 203.0
"""Luminance of diffuse white in HLG and PQ, in nits (BT.2408)."""
_PEAK = 1000.0 / _WHITE_NITS
_KNEE = 0.75
"""Luminance above which colours are compressed; 1 is diffuse white."""
_NEARLY_SRGB = 2
"""Largest change of a colour, 0..255, by a profile that still counts as sRGB."""


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
    signal = light ** np.float32(1 / 2.4)
    if transfer == _SRGB_CURVE:
        signal = np.where(light <= 0.0031308, 12.92 * light, 1.055 * signal - 0.055)
    return (255 * signal).round().astype(np.uint8)


@lru_cache(maxsize=4)
def _linear_of_16_bits(transfer: int) -> np.ndarray:
    return _linear(np.arange(1 << 16) / 65535, transfer).astype(np.float32)


@lru_cache(maxsize=4)
def _to_srgb(primaries: int) -> np.ndarray:
    """Matrix from linear RGB of these primaries to linear sRGB, for colours as rows."""
    return (np.linalg.inv(_to_xyz(_SRGB)) @ _to_xyz(WIDE[primaries])).T.astype(np.float32)


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


def _to_xyz(primaries: tuple[tuple[float, float], ...]) -> np.ndarray:
    columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in primaries]).T
    white = np.array([0.3127 / 0.3290, 1, (1 - 0.3127 - 0.3290) / 0.3290])
    return columns * np.linalg.solve(columns, white)


# --- pictures -----------------------------------------------------------------------------------------------------


def coded_to_srgb(image: Image.Image, transfer: int, primaries: int) -> Image.Image:
    """A picture in sRGB whose colours are of this transfer and these primaries; unchanged if it is."""
    if not conversion(transfer, primaries) or image.mode not in ("RGB", "RGBA"):
        return image
    shown = Image.fromarray(to_screen(np.asarray(image.convert("RGB")).astype(np.uint16) * 257, transfer, primaries))
    if image.mode == "RGBA":
        shown.putalpha(image.getchannel("A"))
    return shown


def profile_to_srgb(image: Image.Image) -> Image.Image:
    """The picture in sRGB, without its ICC profile; unchanged if it has no usable profile."""
    profile = image.info.get("icc_profile")
    if not profile:
        return image
    colours = image
    if image.mode in ("P", "PA"):
        colours = image.convert("RGBA" if image.has_transparency_data else "RGB")
    alpha = colours.getchannel("A") if colours.mode in ("RGBA", "LA") else None
    colours = colours.convert(colours.mode[:-1]) if alpha else colours
    transform = _transform(profile, colours.mode)
    if transform is None:
        return image
    shown = ImageCms.applyTransform(colours, transform)
    if alpha:
        shown.putalpha(alpha)
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
