"""One sample as training reads it.

Shapes: C latent channels, T/H/W latent frames, height, width, K frames, L text tokens, E text feature width.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Frames(NamedTuple):
    """Frames of a clip that were each encoded as an image."""

    latents_CTHW: Tensor
    """[C, K, H, W]."""
    times: tuple[float, ...]
    """When each is, in latent frames: that of frame f is f / the tokenizer's temporal compression."""


@dataclass(slots=True)
class TrainingSample:
    """One clip or image, encoded."""

    sample_id: str
    occurrence: int
    """How often this sample was read before: the passes over the data that came earlier."""
    latent_CTHW: Tensor
    text_LE: Tensor
    """Text features, [0, E] without a caption."""
    fps: float
    """Frames per second of the decoded video; 0 for images."""
    height: int = 0
    width: int = 0
    """Of the decoded video, in pixels."""
    aesthetic_score: float | None = None
    is_prior: bool = False
    """Whether a model made it, to keep what it can do while it learns something else (`megadit prepare prior`)."""
    reference_CTHW: Tensor | None = None
    """The clip that its text, an instruction, changes into this one (`megadit prepare edits`)."""
    given_text_LE: Tensor | None = None
    """Features of a caption that leaves out what a given part shows; in the place of `text_LE` where one is given."""
    frames: Frames | None = None
    """Some of its frames, each encoded as an image: what can be given besides its own latents."""

    @property
    def kind(self) -> str:
        return "video" if self.fps else "image"
