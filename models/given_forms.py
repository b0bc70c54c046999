"""How networks see what is given of a video: one table, one row for each form.

| form        | of networks                            | what is given                                          |
|-------------|----------------------------------------|--------------------------------------------------------|
| `tokens`    | what this package trains; Wan 2.2's 5B | clean tokens at a noise level of their own             |
| `augmented` | Cosmos-1.0 (Predict1) video-to-world   | tokens with a little noise, at the sample's level      |
| `marked`    | Cosmos-Predict2 and 2.5 video-to-world | clean tokens at a noise level of their own, not scaled |
| `channels`  | Wan 2.1 and 2.2 image-to-video         | channels beside the noisy latents                      |
"""

from dataclasses import dataclass
from typing import Literal

GivenFormName = Literal["tokens", "augmented", "marked", "channels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenForm:
    """What a network reads of what is given. Its `given_sigma` is meant wherever a noise level is."""

    is_among: bool = True
    """It stands in its places among the noisy latents. False: latents of a whole video, grey where nothing is given,
    are channels of their own beside all of them, and every place is predicted."""
    has_own_level: bool = True
    """Its tokens are told to be at `given_sigma`. False: at the noise level of the sample."""
    is_noised: bool = False
    """Noise of `given_sigma` is added to it."""
    is_scaled: bool = True
    """It is scaled as latents at `given_sigma` are. False: as clean ones."""
    marks: int = 0
    """Channels that are 1 where it is given: none, one, or one for each frame of a latent."""


GIVEN_FORMS: dict[str, GivenForm] = {
    "tokens": GivenForm(),
    "augmented": GivenForm(has_own_level=False, is_noised=True, marks=1),
    "marked": GivenForm(is_scaled=False, marks=1),
    "channels": GivenForm(is_among=False, marks=4),
}
