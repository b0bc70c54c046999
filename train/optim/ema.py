"""EMA weights with EDM2's power-function profiles (arXiv 2312.02696, section 3.2 and appendix C).

Each profile is a weighted mean over all steps so far, weighted by a power of the step, so that its width remains the
same fraction sigma_rel of the run. Several are kept in float32; validation measures which one is best.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from megadit.train.optim.state import Ownership, assemble, assign, held


def gamma_of(sigma_rel: float) -> float:
    """The exponent of a profile: the solution gamma of sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) (eq.
    123)."""
    inverse = sigma_rel**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def decay(sigma_rel: float, step: int) -> float:
    """EMA decay beta(t) = (1 - 1/t)^(gamma + 1) (eq. 127) at step t = 1, 2, ..."""
    return (1 - 1 / step) ** (gamma_of(sigma_rel) + 1)


class EmaWeights:
    """EMA weights of several profiles, sharded over data-parallel ranks like the float32 master copies of the
    optimizer."""

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
        """Update all EMA weights with the weights after optimizer step `step` (1, 2, ...)."""
        for sigma_rel, ema_weights in self._ema_weights.items():
            torch._foreach_lerp_(ema_weights, self._sources, 1 - decay(sigma_rel, step))

    def parts(self, sigma_rel: float, parameter: nn.Parameter) -> list[tuple[int, Tensor]]:
        """This rank's slices of the EMA of one parameter: (first element, flat values)."""
        pairs = zip(self._ranges, self._ema_weights[sigma_rel], strict=True)
        return [(start, values) for (owned, start, _), values in pairs if owned.parameter is parameter]

    @torch.no_grad()
    def restore(self, sigma_rel: float, parameter: nn.Parameter, whole: Tensor) -> None:
        """Set this rank's slices of the EMA of one parameter from the whole tensor, of its shape."""
        for start, values in self.parts(sigma_rel, parameter):
            values.copy_(whole.reshape(-1)[start : start + values.numel()])

    @contextmanager
    def swapped_in(self, sigma_rel: float | None, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within the block these parameters (all of this rank's) hold their EMA; None leaves them unchanged.

        Every rank must enter, because slices are gathered. The weights are restored bit by bit afterwards.
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
