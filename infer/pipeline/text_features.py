"""Text features, cached for each text.

Shapes: B batch, L text tokens, E text feature width.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch

from megadit.models.networks.conditioning import Conditioning
from megadit.models.text_encoders import TextEncoder, TextFeatures

_CACHED = 1024


class TextFeaturesCache:
    """A text encoder with a cache of features, which may be freed between generations.

    Every text is encoded alone, so that its features do not depend on other texts of the batch.
    """

    def __init__(self, encoder: TextEncoder, reload: Callable[[], TextEncoder] | None = None) -> None:
        """Wrap an encoder; with `reload` it is freed after every `prepare`, and loaded again for new texts."""
        self._encoder: TextEncoder | None = encoder
        self._reload = reload
        self._seen: OrderedDict[str, TextFeatures] = OrderedDict()
        self._most = _CACHED

    def prepare(self, texts: Iterable[str]) -> None:
        """Encodes these texts before sampling needs the memory."""
        texts = list(dict.fromkeys(texts))
        self._most = max(_CACHED, len(texts))  # all of these are needed next
        for text in texts:
            self._features(text)
        if self._reload is not None:
            self._encoder = None

    def encode(self, texts: list[str]) -> TextFeatures:
        return TextFeatures.concatenate([self._features(text) for text in texts])

    def conditioning(self, texts: list[str], fps: float) -> Conditioning:
        """Return the conditioning of one video for each text; `fps` is 0 for images."""
        encoded = self.encode(texts)
        fps_B = torch.full((len(texts),), fps)
        return Conditioning(encoded.features_BLE, encoded.length_B, fps_B, pooled_BP=encoded.pooled_BP)

    def _features(self, text: str) -> TextFeatures:
        """Features of one text."""
        if text not in self._seen:
            if self._encoder is None:
                self._encoder = self._reload()
            self._seen[text] = self._encoder.encode([text])
        self._seen.move_to_end(text)
        features = self._seen[text]
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return features
