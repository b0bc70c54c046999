"""Mean speed of pixels, by optical flow. Shapes: T/H/W frames, height, width."""

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from megadit.infer.evaluate.metrics.motion import optical_flow

BLUR = 1.0
"""Standard deviation in pixels of the blur that removes details too fine to follow."""
LIGHT = 3.0
"""Standard deviation in pixels of the neighbourhood whose brightness and contrast are normalised."""
NOISE = 4.0
"""Contrast (0..255) below which differences are treated as noise."""
SCALE = 0.15
"""Scale of normalised contrasts, which puts nearly all into the 0..1 that the flow expects."""


def mean_speed(luma_THW: np.ndarray, fps: float) -> float:
    """Mean speed of all pixels over all frames (0..255), moving or not, in frame widths or heights per second.

    0.5: the camera pans over half the frame's width in a second. What fades or flickers does not move.
    """
    height, width = luma_THW.shape[1:]
    pictures_THW = torch.from_numpy(_evenly_lit(luma_THW.astype(np.float32)))
    right_NHW, down_NHW = optical_flow(pictures_THW[:-1], pictures_THW[1:]).unbind(1)
    return fps * torch.hypot(right_NHW / width, down_NHW / height).mean().item()


def _evenly_lit(luma_THW: np.ndarray) -> np.ndarray:
    """Normalise local brightness and contrast, because optical flow would take changes of light for motion."""
    blurred = _around(luma_THW, BLUR)
    difference = blurred - _around(blurred, LIGHT)
    return 0.5 + SCALE * difference / np.sqrt(_around(difference**2, LIGHT) + NOISE**2)


def _around(values_THW: np.ndarray, sigma: float) -> np.ndarray:
    return gaussian_filter(values_THW, (0, sigma, sigma))
