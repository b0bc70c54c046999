"""Amount of motion between two frames."""

import numpy as np

MOVING = 0.01
"""Fraction of pixels by which small moving objects are detected."""
LOUDER = 10
"""Factor by which these must change more, because grain and compression change some pixels of still pictures."""


def motion_between(before_HWC: np.ndarray, after_HWC: np.ndarray) -> float:
    """Mean change of colours, 0..255, or if that is larger, a tenth of that of the pixels that change most, so that
    small moving objects count too."""
    change = np.abs(after_HWC.astype(np.int16) - before_HWC).mean(axis=-1).ravel()
    count = max(1, round(MOVING * change.size))
    return float(max(change.mean(), np.partition(change, -count)[-count:].mean() / LOUDER))
