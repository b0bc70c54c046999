"""Order of packs in which all readers come to packs of equal work at the same time, so that no rank waits for another.

Packs are filled to equal tokens, but attention's work grows with the square of a clip's length. Readers do not
communicate: each sorts the packs of its buffer by work, and puts them at positions whose random numbers have the same
order. The numbers are the same for all readers, so a position is as heavy for one as for the others; over an epoch
packs come in random order, each once.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, seed_key, uniform
from megadit.models.flops import forward_flops
from megadit.models.packing.segments import Segment

work_of = lru_cache(maxsize=1 << 14)(forward_flops)
"""(segment, model) -> floating-point operations of its forward pass; few sizes come often."""


def pack_work(segments: Sequence[Segment], model: DiTConfig) -> int:
    """Floating-point operations of a pack."""
    return sum(work_of(segment, model) for segment in segments)


def dealt(work: Sequence[int], keys: Sequence[int], *, start: int, seed: int, together: int = 1) -> list[int]:
    """The index of the pack at each of the positions `start`, `start` + 1, ... of a reader.

    `work` and `keys` hold a number for each pack; packs of equal work are in the order of their keys. `together`
    positions at a time have equal numbers.
    """
    position_R = torch.arange(start, start + len(work)) // together
    key_R = torch.full_like(position_R, seed_key(seed))
    number_R = uniform(key_R, position_R, 1, stream=Stream.ORDER)[:, 0]
    lightest_first = sorted(range(len(work)), key=lambda pack: (work[pack], keys[pack]))
    order = [0] * len(work)
    for pack, place in zip(lightest_first, number_R.argsort(stable=True).tolist(), strict=True):
        order[place] = pack
    return order
