"""Averages of the weights over training: EDM2's power-function profiles (arXiv 2312.02696, section 3.2 and appendix C).

Each profile is a weighted mean of all weights so far whose weights grow like a power of the step, so that its width
stays the same fraction sigma_rel of the run. Several are kept, in float32; which one is best is measured.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from megadit.train.optim.state import Ownership, assemble, assign, held


def gamma_of(sigma_rel: float) -> float:
    """The exponent of a profile: sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) (eq. 123), solved."""
    inverse = sigma_rel**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def decay(sigma_rel: float, step: int) -> float:
    """beta(t) = (1 - 1/t)^(gamma + 1) (eq. 127): the share of the average that remains at step t = 1, 2, ..."""
    return (1 - 1 / step) ** (gamma_of(sigma_rel) + 1)


class EmaWeights:
    """The averages, each data-parallel rank holding its share of the elements.

    The shares follow the optimizer's: an element is averaged where its float32 master copy is updated.
    """

    def __init__(self, sigma_rels: tuple[float, ...], ownership: Ownership) -> None:
        self.sigma_rels = sigma_rels
        self._ownership = ownership
        self._ranges = list(ownership.ranges())
        self._sources = [
            owned.master.detach().view(-1)[start - owned.start : stop - owned.start]
            for owned, start, stop in self._ranges
        ]
        self._ema_weights = {sigma_rel: [source.clone() for source in self._sources] for sigma_rel in sigma_rels}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after optimizer step `step` (1, 2, ...) into every average."""
        for sigma_rel, ema_weights in self._ema_weights.items():
            torch._foreach_lerp_(ema_weights, self._sources, 1 - decay(sigma_rel, step))

    def parts(self, sigma_rel: float, parameter: nn.Parameter) -> list[tuple[int, Tensor]]:
        """This rank's share of the average of one parameter: (first element, flat values)."""
        pairs = zip(self._ranges, self._ema_weights[sigma_rel], strict=True)
        return [(start, values) for (owned, start, _), values in pairs if owned.parameter is parameter]

    @torch.no_grad()
    def restore(self, sigma_rel: float, parameter: nn.Parameter, whole: Tensor) -> None:
        """Sets this rank's share of the average of one parameter from the whole tensor, of its shape."""
        for start, values in self.parts(sigma_rel, parameter):
            values.copy_(whole.reshape(-1)[start : start + values.numel()])

    @contextmanager
    def swapped_in(self, sigma_rel: float | None, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within the block these parameters (all of this rank's) have their averages; None leaves them as they are.

        Every rank must enter: the shares are gathered. The weights come back unchanged, to the last bit.
        """
        if sigma_rel is None:
            yield
            return
        parameters = list(parameters)
        kept = [held(parameter)[1].clone() for parameter in parameters]
        try:
            for parameter in parameters:
                group = self._ownership.group_of(parameter)
                assign(parameter, assemble(parameter.shape, self.parts(sigma_rel, parameter), group))
            yield
        finally:
            for parameter, values in zip(parameters, kept, strict=True):
                held(parameter)[1].copy_(values)
