"""Assignment of samples to packs: best-fit bin packing by video tokens and text tokens."""

from bisect import bisect_left, insort
from collections.abc import Sequence

CANDIDATES = 64
"""Maximum number of packs with space for a sample's video tokens that are tried for its text, fullest first."""
LARGE = 1 / 8
"""Fraction of a pack's tokens above which samples are placed first, by decreasing length."""
_PACK_BITS = 40
"""An open pack is encoded as (free tokens << _PACK_BITS) | index, because integers compare faster than tuples."""


def best_fit(lengths: Sequence[tuple[int, int]], capacity: tuple[int, int]) -> list[list[int]]:
    """Group samples into few, full packs; deterministic.

    `lengths` holds (video tokens, text tokens) of each sample. Large samples are placed by decreasing length, then the
    small ones in their order; each goes into the pack with the fewest free video tokens that fits it. (Plain best-fit
    decreasing packs no tighter, and would collect small images in packs of their own instead of mixing them with
    clips.)

    O(n log n), because at most `CANDIDATES` packs are tried per sample. Within a pack, indices are sorted by length, so
    that samples of one size are adjacent, and attention computes them as one batch.

    Raises:
        ValueError: if a sample alone exceeds the capacity.
    """
    for tokens, text in lengths:
        if tokens > capacity[0] or text > capacity[1]:
            raise ValueError(f"a sample of {tokens} video tokens and {text} text tokens exceeds a pack of {capacity}")
    threshold = LARGE * capacity[0]
    rank = [-tokens if tokens > threshold else 0 for tokens, _ in lengths]
    packs = _place(lengths, sorted(range(len(lengths)), key=rank.__getitem__), capacity)
    for members in packs:
        members.sort(key=lengths.__getitem__)
    return packs


def _place(lengths: Sequence[tuple[int, int]], order: Sequence[int], capacity: tuple[int, int]) -> list[list[int]]:
    """Put each sample, in this order, into the fullest pack that fits it, or into a new one.

    A single loop without Python calls, because it runs for every sample of every buffer.
    """
    smallest = min(lengths, default=(0, 0))[0]
    packs: list[list[int]] = []
    text_left: list[int] = []
    is_open: list[int] = []  # packs with free space, by (free tokens, pack)
    mask = (1 << _PACK_BITS) - 1
    for index in order:
        tokens, text = lengths[index]
        first = bisect_left(is_open, tokens << _PACK_BITS)
        for place in range(first, min(first + CANDIDATES, len(is_open))):
            pack = is_open[place] & mask
            if text_left[pack] >= text:
                left = (is_open.pop(place) >> _PACK_BITS) - tokens
                packs[pack].append(index)
                text_left[pack] -= text
                break
        else:
            pack, left = len(packs), capacity[0] - tokens
            packs.append([index])
            text_left.append(capacity[1] - text)
        # a pack that cannot fit the smallest sample is closed, or the list of open packs would grow without bound
        if left >= smallest and text_left[pack] > 0:
            insort(is_open, left << _PACK_BITS | pack)
    return packs
