"""How networks read the conditioning latents of a video: a table with a row for each mode.

| mode        | networks                               | conditioning                                           |
|-------------|----------------------------------------|--------------------------------------------------------|
| `tokens`    | what this package trains; Wan 2.2's 5B | clean tokens with their own noise level                |
| `augmented` | Cosmos-1.0 (Predict1) video-to-world   | tokens with a little noise, at the sample's level      |
| `marked`    | Cosmos-Predict2 and 2.5 video-to-world | clean tokens with their own noise level, not scaled    |
| `channels`  | Wan 2.1 and 2.2 image-to-video         | extra channels of the noisy latents                    |
"""

from dataclasses import dataclass
from typing import Literal

ConditioningModeName = Literal["tokens", "augmented", "marked", "channels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningMode:
    """How a network reads conditioning latents; `conditioning_sigma` is a field of its configuration."""

    is_among: bool = True
    """Conditioning latents replace noisy ones at their positions. False: latents of a whole video, grey where there is
    no conditioning, are extra channels of all noisy latents, and every position is predicted."""
    has_own_level: bool = True
    """Conditioning tokens are embedded with noise level `conditioning_sigma`. False: with that of the sample."""
    is_noised: bool = False
    """Noise of level `conditioning_sigma` is added to conditioning latents."""
    is_scaled: bool = True
    """Conditioning latents are scaled like latents at `conditioning_sigma`. False: like clean ones."""
    marks: int = 0
    """Number of mask channels, 1 where there is conditioning: none, one, or one for each pixel frame of a latent."""


CONDITIONING_MODES: dict[str, ConditioningMode] = {
    "tokens": ConditioningMode(),
    "augmented": ConditioningMode(has_own_level=False, is_noised=True, marks=1),
    "marked": ConditioningMode(is_scaled=False, marks=1),
    "channels": ConditioningMode(is_among=False, marks=4),
}
