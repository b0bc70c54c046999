"""Assignment of samples to packs: best-fit packing in two sizes, video tokens and text slots."""

from bisect import bisect_left, insort
from collections.abc import Sequence

CANDIDATES = 64
"""Packs with room for a sample's tokens that are tried for its text, fullest first, before a new one is begun."""
LARGE = 1 / 8
"""Samples above this share of a pack's tokens are placed first, the largest at the head."""
_PACK_BITS = 40
"""An open pack is one number, tokens left << _PACK_BITS | its place: numbers compare faster than pairs."""


def best_fit(lengths: Sequence[tuple[int, int]], capacity: tuple[int, int]) -> list[list[int]]:
    """Groups samples into packs, few and full; deterministic.

    `lengths` holds (video tokens, text slots) of each sample. Large samples are placed by decreasing length, then the
    small ones as they come; each goes into the pack with the fewest video tokens left that has room for its tokens and
    for its text. (Plain best-fit decreasing packs no tighter, since small samples fill any gap, and would gather small
    images in packs of their own instead of mixing them with clips.)

    O(n log n): a sample looks at a fixed number of packs that lack room for its text. Within a pack, indices are sorted
    by length, so that samples of one size are neighbours, which attention computes as one batch.

    Raises:
        ValueError: if a sample alone exceeds the capacity.
    """
    for tokens, text in lengths:
        if tokens > capacity[0] or text > capacity[1]:
            raise ValueError(f"a sample of {tokens} video tokens and {text} text slots exceeds a pack of {capacity}")
    threshold = LARGE * capacity[0]
    rank = [-tokens if tokens > threshold else 0 for tokens, _ in lengths]
    packs = _place(lengths, sorted(range(len(lengths)), key=rank.__getitem__), capacity)
    for members in packs:
        members.sort(key=lengths.__getitem__)
    return packs


def _place(lengths: Sequence[tuple[int, int]], order: Sequence[int], capacity: tuple[int, int]) -> list[list[int]]:
    """Puts each sample, in this order, into the fullest pack that has room, or into a new one.

    One loop without calls of our own: it runs for every sample of every buffer.
    """
    smallest = min(lengths, default=(0, 0))[0]
    packs: list[list[int]] = []
    text_left: list[int] = []
    is_open: list[int] = []  # packs with room to spare, by (tokens left, pack)
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
        # a pack without room for the smallest sample is closed, or the list of open packs would grow without end
        if left >= smallest and text_left[pack] > 0:
            insort(is_open, left << _PACK_BITS | pack)
    return packs
