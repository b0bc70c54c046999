"""A text encoder's network under another runtime than torch's.

Shapes: B batch, L text tokens, E text feature width.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from megadit.infer.runtimes.network_spec import Shape
from megadit.models.text_encoders import T5TextEncoder

Run = Callable[[Mapping[str, Tensor], Shape], Tensor]


class ExportedT5:
    """Called like the class of `transformers` that `T5TextEncoder` calls; loaded when it is first used."""

    def __init__(self, load: Callable[[], Run], dim: int, device: torch.device) -> None:
        self.device = device
        self._load, self._dim = load, dim
        self._run: Run | None = None

    def __call__(self, tokens_BL: Tensor, *, attention_mask: Tensor) -> SimpleNamespace:
        if self._run is None:
            self._run = self._load()
        features_BLE = self._run({"tokens": tokens_BL, "mask": attention_mask}, (*tokens_BL.shape, self._dim))
        return SimpleNamespace(last_hidden_state=features_BLE)


def with_exported_network(text_encoder: T5TextEncoder, load: Callable[[], Run], device: torch.device) -> T5TextEncoder:
    return text_encoder.with_network(ExportedT5(load, text_encoder.dim, device))
