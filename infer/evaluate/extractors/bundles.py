"""Features by bundles of classifiers and CLIP models, of pictures or, if they were trained on clips, of clips.

Shapes: B videos or pictures, T/H/W frames, height, width, C colour channels, D width of the features.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megadit.infer.evaluate.extractors.base import Extractor, Sight, resized
from megadit.models.bundle import USED_BY, Bundle, Kind
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import sha256_of


def open_bundle_extractor(path: Path, device: torch.device) -> Extractor:
    """Open the extractor of a classifier or a CLIP model; raises UserError for a bundle of another kind."""
    bundle = Bundle.open(path)
    if bundle.kind not in OF_KIND:
        raise UserError(f"{path} {USED_BY[bundle.kind]}")
    return OF_KIND[bundle.kind](bundle, device)


class _EmbeddingNetwork:
    """Preprocessing that both extractors share: pictures are prepared as in training."""

    def __init__(self, bundle: Bundle, device: torch.device, *, width: int, identity: str) -> None:
        """`identity` describes the features in the protocol."""
        self._tokenizer, self._device, self._size = bundle.load_tokenizer(), device, bundle.defaults
        self.fewest_frames = bundle.defaults.num_frames
        self.sees: Sight = "clips" if self.fewest_frames > 1 else "pictures"
        self.width = width
        self.fingerprint = sha256_of(bundle.path / "transformer" / "model.safetensors")[:12]
        frames = f"{self.fewest_frames} frames from the middle, " if self.fewest_frames > 1 else ""
        self.protocol = f"{frames}bicubic with antialias to {self._size.height}x{self._size.width}, {identity}"

    def _latents(self, video_BTHWC: Tensor) -> Tensor:
        """Return the latents that the network reads."""
        first = (video_BTHWC.shape[1] - self.fewest_frames) // 2
        seen_BTHWC = video_BTHWC[:, first : first + self.fewest_frames].to(self._device)
        return self._tokenizer.encode(resized(seen_BTHWC, self._size.height, self._size.width) / 127.5 - 1)


class ClassifierFeatures(_EmbeddingNetwork):
    """The normalised class token of a ViT (arXiv 2010.11929, equation 4)."""

    name = "vit"

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self._network = bundle.load_classifier(device).eval().requires_grad_(False)
        self._network.head.linear = None
        super().__init__(bundle, device, width=bundle.config.hidden_size, identity="class token")

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return self._network(self._latents(video_BTHWC)).float()


class ClipFeatures(_EmbeddingNetwork):
    """CLIP's embeddings of pictures and of texts (arXiv 2103.00020), not normalised."""

    name = "clip"

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self._network = bundle.load_clip(device).eval().requires_grad_(False)
        self._words = bundle.load_text_encoder()
        super().__init__(bundle, device, width=bundle.config.text_tower.embedding_size, identity="embedding")

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return self._network.image_tower(self._latents(video_BTHWC)).float()

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Features of texts, float32 [B, D]; texts are truncated to the tokens of the text encoder."""
        return self._network.text_tower(*(x.to(self._device) for x in self._words.tokens(list(texts)))).float()


OF_KIND: Mapping[Kind, Callable[[Bundle, torch.device], Extractor]] = {
    "classifier": ClassifierFeatures,
    "clip": ClipFeatures,
}
