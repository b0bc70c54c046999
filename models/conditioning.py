"""What a video is made from, beside noise.

Shapes: B batch, L text tokens, E text feature width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Conditioning:
    """The conditions of a batch of videos, compared by identity."""

    text_BLE: Tensor
    """Text features, L >= 1; rows beyond each length are ignored."""
    text_length_B: Tensor
    """int64, 0..L. 0 means no text: one learned null token stands in."""
    fps_B: Tensor
    """float32, frames per second of the decoded video; 0 for images."""
    adapter_scale_B: Mapping[str, Tensor] = field(default_factory=dict)
    """float32, how much each video gets of an adapter of this name; nothing of one that is not named."""

    def __len__(self) -> int:
        return self.text_BLE.shape[0]

    def null(self) -> "Conditioning":
        """The same videos without their text."""
        return replace(self, text_length_B=torch.zeros_like(self.text_length_B))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Conditioning":
        """On another device; `dtype` applies to the text features alone."""
        return Conditioning(
            self.text_BLE.to(device, dtype or self.text_BLE.dtype),
            self.text_length_B.to(device),
            self.fps_B.to(device),
            {name: scale_B.to(device) for name, scale_B in self.adapter_scale_B.items()},
        )

    @staticmethod
    def concatenate(parts: "list[Conditioning]") -> "Conditioning":
        """One batch from several with the same adapters, whose text may differ in length."""
        longest = max(part.text_BLE.shape[1] for part in parts)
        padded = [F.pad(part.text_BLE, (0, 0, 0, longest - part.text_BLE.shape[1])) for part in parts]
        return Conditioning(
            torch.cat(padded),
            torch.cat([part.text_length_B for part in parts]),
            torch.cat([part.fps_B for part in parts]),
            {name: torch.cat([part.adapter_scale_B[name] for part in parts]) for name in parts[0].adapter_scale_B},
        )
