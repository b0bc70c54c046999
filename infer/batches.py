"""The videos of a generation, cut into those that are sampled together."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megadit.infer.adapters import Scales
from megadit.infer.given import Media
from megadit.models.shared.errors import UserError


@dataclass(frozen=True, slots=True)
class Batch:
    """The videos that are sampled together."""

    places: range
    """Of them among all prompts of the generation."""
    prompts: list[str]
    seeds: list[int]
    adapter_scale_B: Mapping[str, Tensor]
    """How much each gets of each adapter, float32, by the adapter's name beside the network."""
    given: Sequence[Media]
    """What is given of each, in the same places of all."""


@dataclass(frozen=True, slots=True)
class Videos:
    """What a generation asks for: a prompt, a seed, adapters and given media of each video."""

    prompts: list[str]
    seeds: list[int]
    adapters: list[Scales]
    given: list[Media]

    @classmethod
    def read(
        cls,
        prompts: Sequence[str],
        seeds: int | Sequence[int],
        adapters: Scales | Sequence[Scales],
        given: list[Media],
    ) -> "Videos":
        """Seeds and adapters come once for all prompts, or as a list with an entry for each; `given` as the latter.

        Raises:
            UserError: for prompts that are none, and a list of another length.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts must be a list; got the text {prompts!r}: write [prompt]")
        if not prompts:
            raise UserError("there is no prompt; give at least one")
        seeds = [seeds] * len(prompts) if isinstance(seeds, int) else list(seeds)
        if len(seeds) != len(prompts):
            raise UserError(f"got {len(seeds)} seeds for {len(prompts)} prompts; give one seed, or one for each prompt")
        adapters = [adapters] * len(prompts) if isinstance(adapters, Mapping) else list(adapters)
        if len(adapters) != len(prompts):
            raise UserError(
                f"got adapters for {len(adapters)} of {len(prompts)} prompts; give them once, or for each prompt"
            )
        return cls(list(prompts), seeds, adapters, given)

    def batches(self, size: int, names: Mapping[str, str], structure: Callable[[Media], Hashable]) -> Iterator[Batch]:
        """Neighbours of which the same places are given, as `structure` says, at most `size` at a time.

        `names` are those of adapters beside the network, by their paths.
        """
        places = range(len(self.prompts))
        for _, alike in groupby(places, key=lambda place: structure(self.given[place])):
            first, *rest = alike
            stop = first + 1 + len(rest)
            for start in range(first, stop, size):
                here = slice(start, min(start + size, stop))
                scales = _scales(self.adapters[here], names)
                yield Batch(places[here], self.prompts[here], self.seeds[here], scales, self.given[here])


def _scales(adapters: Sequence[Scales], names: Mapping[str, str]) -> dict[str, Tensor]:
    used = dict.fromkeys(path for scales in adapters for path in scales)
    return {names[path]: torch.tensor([float(scales.get(path, 0.0)) for scales in adapters]) for path in used}
