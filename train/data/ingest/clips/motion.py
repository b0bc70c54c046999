"""Amount of motion between two frames."""

import numpy as np

MOVING = 0.01
"""Share of the pixels by which small things are seen: what a needle or a falling star covers of a thumbnail."""
LOUDER = 10
"""How many times as much these must change: grain and compression change some pixels of a still picture."""


def motion_between(before_HWC: np.ndarray, after_HWC: np.ndarray) -> float:
    """Mean change of the colours, 0..255, or a tenth of that of the pixels that change most, where this is more: small
    things that move before a plain ground count too."""
    change = np.abs(after_HWC.astype(np.int16) - before_HWC).mean(axis=-1).ravel()
    count = max(1, round(MOVING * change.size))
    return float(max(change.mean(), np.partition(change, -count)[-count:].mean() / LOUDER))
