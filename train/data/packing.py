"""Which samples share a pack: best-fit packing in two sizes, video tokens and text slots."""

from bisect import bisect_left, insort
from collections.abc import Sequence

CANDIDATES = 64
"""Packs with room for a sample's tokens that are tried for its text, fullest first, before a new one is begun."""
LARGE = 1 / 8
"""Samples above this share of a pack's tokens are placed first, the largest at the head."""


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
    capacity_tokens, capacity_text = capacity
    packs = _OpenPacks(capacity, smallest=min(lengths, default=(0, 0))[0])
    threshold = LARGE * capacity_tokens
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i][0] if lengths[i][0] > threshold else 0):
        tokens, text = lengths[index]
        if tokens > capacity_tokens or text > capacity_text:
            raise ValueError(f"a sample of {tokens} video tokens and {text} text slots exceeds a pack of {capacity}")
        packs.add(index, tokens, text)
    for members in packs.members:
        members.sort(key=lambda i: lengths[i])
    return packs.members


class _OpenPacks:
    """Packs with room to spare, sorted by (tokens left, pack)."""

    def __init__(self, capacity: tuple[int, int], smallest: int) -> None:
        self.capacity = capacity
        self.smallest = smallest
        self.members: list[list[int]] = []
        self._text_left: list[int] = []
        self._open: list[tuple[int, int]] = []

    def add(self, index: int, tokens: int, text: int) -> None:
        """Puts a sample into the fullest pack that has room, or into a new one."""
        first = bisect_left(self._open, (tokens, -1))
        candidates = range(first, min(first + CANDIDATES, len(self._open)))
        position = next((place for place in candidates if self._text_left[self._open[place][1]] >= text), None)
        if position is not None:
            tokens_left, pack = self._open.pop(position)
        else:
            tokens_left, pack = self.capacity[0], len(self.members)
            self.members.append([])
            self._text_left.append(self.capacity[1])
        self.members[pack].append(index)
        self._text_left[pack] -= text
        # a pack without room for the smallest sample is closed, or the list of open packs would grow without end
        if tokens_left - tokens >= self.smallest and self._text_left[pack] > 0:
            insort(self._open, (tokens_left - tokens, pack))
