"""The features of a classifier of ours: what its head reads of a picture or, of one trained on clips, of a clip.

Shapes: B videos or pictures, T/H/W frames, height, width, C colour channels, D width of the features.
"""

from pathlib import Path

import torch
from torch import Tensor

from megadit.infer.evaluate.extractors.base import Sight, resized
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.files import sha256_of


class ClassifierFeatures:
    """The normalised class token of a ViT (arXiv 2010.11929, equation 4), whatever its classes are."""

    name = "vit"

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Loads the network.

        Raises:
            UserError: for a bundle of another kind.
        """
        bundle = Bundle.open(folder)
        self._network = bundle.load_classifier(device).eval().requires_grad_(False)
        self._network.head.linear = None
        self._tokenizer, self._device, self._size = bundle.load_tokenizer(), device, bundle.defaults
        self.fewest_frames = bundle.defaults.num_frames
        self.sees: Sight = "clips" if self.fewest_frames > 1 else "pictures"
        self.width = bundle.config.hidden_size
        self.fingerprint = sha256_of(folder / "transformer" / "model.safetensors")[:12]
        frames = f"{self.fewest_frames} frames from the middle, " if self.fewest_frames > 1 else ""
        self.protocol = f"{frames}bicubic with antialias to {self._size.height}x{self._size.width}, class token"

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        first = (video_BTHWC.shape[1] - self.fewest_frames) // 2
        seen_BTHWC = video_BTHWC[:, first : first + self.fewest_frames].to(self._device)
        video_BCTHW = resized(seen_BTHWC, self._size.height, self._size.width) / 127.5 - 1
        return self._network(self._tokenizer.encode(video_BCTHW)).float()
