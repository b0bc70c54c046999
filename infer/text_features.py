"""Text features, computed once for each text.

Shapes: B batch, L text tokens, E text feature width.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megadit.models.text_encoders import TextEncoder, TextFeatures

_KEPT = 1024


class TextFeaturesCache:
    """A text encoder that remembers the texts it has seen, and may be let go between generations.

    Every text is encoded alone, so that its features do not depend on its company.
    """

    def __init__(self, encoder: TextEncoder, reload: Callable[[], TextEncoder] | None = None) -> None:
        """With `reload`, the encoder is dropped after every `prepare`, and loaded again for texts not seen yet."""
        self._encoder: TextEncoder | None = encoder
        self._reload = reload
        self._seen: OrderedDict[str, Tensor] = OrderedDict()
        self._most = _KEPT

    def prepare(self, texts: Iterable[str]) -> None:
        """Encodes these texts, before the network needs the memory."""
        texts = list(dict.fromkeys(texts))
        self._most = max(_KEPT, len(texts))  # all of these are about to be asked for
        for text in texts:
            self._features(text)
        if self._reload is not None:
            self._encoder = None

    def encode(self, texts: list[str]) -> TextFeatures:
        features = [self._features(text) for text in texts]
        features_BLE = pad_sequence(features, batch_first=True)
        if features_BLE.shape[1] == 0:  # L is at least 1
            features_BLE = features_BLE.new_zeros(len(texts), 1, features_BLE.shape[2])
        return TextFeatures(features_BLE, torch.tensor([len(feature_LE) for feature_LE in features]))

    def _features(self, text: str) -> Tensor:
        """Features [L, E] of a text without padding."""
        if text not in self._seen:
            if self._encoder is None:
                self._encoder = self._reload()
            encoded = self._encoder.encode([text])
            self._seen[text] = encoded.features_BLE[0, : encoded.length_B[0]]
        self._seen.move_to_end(text)
        feature_LE = self._seen[text]
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return feature_LE
