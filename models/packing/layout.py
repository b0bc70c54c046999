"""The layout of tokens as blocks and ops read it: which tokens form a sample, and which text belongs to it.

`PackLayout` (a pack), `DenseLayout` (a uniform batch) and `FixedLayout` (a pack whose sizes a CUDA graph fixes)
implement it.

Shapes: S video tokens, L text places, I image tokens, B batch (1 for a pack), D width.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """The modulation row of each token: which shift, scale and gate modulate it."""

    def of_token(self, device: torch.device) -> Tensor:
        """int64 [S] for a pack, [S, B] for a uniform batch."""


class Layout(Protocol):
    """A sequence of video tokens."""

    @property
    def rows(self) -> Rows | None:
        """None: batch element b has row b."""

    @property
    def is_causal(self) -> bool:
        """True: each token attends to itself and those before it in its sample; False: to all of them."""

    def attended(self, num_queries: int, num_keys: int, device: torch.device, *, cross: bool) -> Tensor:
        """bool [B or 1, S or 1, L or S]: the keys that each query may attend to, those of its own sample.

        With `cross` they are text places; a sample without text has that of the null token.
        """

    def seeing(self, image_IBD: Tensor) -> "Layout":
        """The same tokens with those of an image in place of their text; only for a uniform batch."""

    def per_condition(self, function: Callable[..., Any], owner: Hashable, *inputs: Any) -> Any:
        """function(owner, *inputs): a result that is the same at every noise level, and may be cached."""

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any:
        """function(self, *args), which may be cached."""
