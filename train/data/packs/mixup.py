"""Mixup (arXiv 1710.09412, section 2): a sample becomes l x_i + (1 - l) x_j, as does its label, with l from Beta(a, a).

x_j is the next sample in the pack, cyclically within each run of adjacent samples of one size. Packs do not depend on
the number of ranks.

Shapes: C latent channels, T/H/W latent frames, height, width, G segments of a pack (padding included).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megadit.models.diffusion.noise import Stream
from megadit.models.packing.segments import Segment


class Mixture(NamedTuple):
    """Mixup partners of the samples of a pack, and mixing weights."""

    share_G: Tensor
    """float32: weight l of each sample; 1 if it is alone of its size, has no label, or is padding."""
    partner_G: Tensor
    """int64: offset from a sample to its partner, in segments; 0 for none."""

    def of(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Mix the latents (CTHW each) of the samples."""
        if not self.partner_G.any():
            return list(latents)
        others = [latents[index + ahead] for index, ahead in enumerate(self.partner_G[: len(latents)].tolist())]
        parts = zip(latents, others, self.share_G[: len(latents)], strict=True)
        return [torch.lerp(other, own, share.to(own)) for own, other, share in parts]


def draw_mixture(segments: Sequence[Segment], keys: Sequence[int], alpha: float) -> Mixture:
    """Draw mixing weights by the `keys` of the samples; further segments are padding. Alpha 0: no mixup."""
    share_G, partner_G = torch.ones(len(segments)), torch.zeros(len(segments), dtype=torch.long)
    if alpha == 0:
        return Mixture(share_G, partner_G)
    for _, run in groupby(range(len(keys)), key=lambda index: (segments[index].grid, segments[index].text_length > 0)):
        members = list(run)
        if len(members) == 1 or not segments[members[0]].text_length:
            continue
        share_G[members] = torch.tensor([_share(keys[index], alpha) for index in members])
        partner_G[members] = 1
        partner_G[members[-1]] = 1 - len(members)
    return Mixture(share_G, partner_G)


def _share(key: int, alpha: float) -> float:
    bits = np.random.Philox(key=[key % 2**64, Stream.MIXUP])
    return np.random.Generator(bits).beta(alpha, alpha)
