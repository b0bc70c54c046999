"""The layout of a uniform batch, with a cache of values that are the same at all noise levels.

Shapes: S video tokens, L text places, I image tokens, B batch, D width.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megadit.models.host_to_device import constant, memo_key
from megadit.models.packing.segments import DenseRows, Grid, OpenRows, up_to_each


class TensorCache:
    """Cache of tensors computed for a dense batch, up to a size in bytes."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` limits the size of all cached tensors together."""
        self._values: dict[Hashable, Any] = {}
        self._free_bytes = max_bytes

    def cached(self, key: Hashable, compute: Callable[..., Any], *args: Any) -> Any:
        """compute(*args), a tensor, a tuple of them or None: computed once if it fits, else at each call."""
        if key in self._values:
            return self._values[key]
        value = compute(*args)
        parts = value if isinstance(value, tuple) else (value,)
        size = sum(part.untyped_storage().nbytes() for part in parts if part is not None)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._values[key] = value
        return value


def grid_positions(grid: Grid, device: torch.device | str | None = None) -> Tensor:
    """int64 [T*H*W, 3]: the (t, h, w) of each token of one grid, in order."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


class DenseTensors(NamedTuple):
    """Tensors of a dense layout on one device."""

    layout: "DenseLayout"
    device: torch.device

    @property
    def positions_S3(self) -> Tensor:
        """Each token's (t, h, w): int64, or float32 where frames have times of their own."""
        position_S3 = grid_positions(self.layout.grid, self.layout.device)
        if self.layout.times is not None:
            times, device = self.layout.times, self.layout.device
            time_T = times.to(device) if isinstance(times, Tensor) else constant(times, device)
            position_S3 = torch.cat([time_T[position_S3[:, 0], None], position_S3[:, 1:]], dim=1)
        return position_S3.to(self.device)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A uniform batch: every sample has the same grid. The form in which sampling and export run."""

    grid: Grid
    """Tokens along time, height and width, extra conditioning frames included."""
    text_mask_BL: Tensor
    """bool: True where a text token may be attended."""
    device: torch.device
    over: Literal["sample", "before", "time", "space"] = "sample"
    """The tokens that self-attention sees: all of a sample, the preceding ones, those of the same pixel, or of the same
    frame."""
    rows: DenseRows | OpenRows | None = None
    """Modulation rows where some tokens are conditioning; None: modulation broadcasts over the batch."""
    times: tuple[float, ...] | Tensor | None = None
    """Time of each frame of tokens, float32 [T]; None: 0, 1, 2, ..."""
    kept: TensorCache | None = None
    """Cache of values that are the same at all noise levels, for sampling; None: no cache."""

    groups: ClassVar[None] = None
    """No length groups: attention batches over all samples."""

    @property
    def is_causal(self) -> bool:
        """See `PackLayout.is_causal`."""
        return self.over == "before"

    def attended(self, num_queries: int, num_keys: int, device: torch.device, *, cross: bool) -> Tensor:
        """bool [1 or B, 1 or S, L or S]: see `Layout`."""
        if cross:
            return self.text_mask_BL[:, None]
        if self.is_causal:
            return up_to_each(num_keys, device)[None]
        token_S, area = torch.arange(num_queries, device=device), self.grid[1] * self.grid[2]
        sample_S = {"sample": token_S * 0, "time": token_S % area, "space": token_S // area}[self.over]
        return (sample_S[:, None] == sample_S)[None]

    def seeing(self, image_IBD: Tensor) -> "DenseLayout":
        """The same batch with image tokens in place of its text; all of [I, B, D] may be attended to."""
        return replace(self, text_mask_BL=torch.ones(image_IBD.shape[1::-1], dtype=torch.bool, device=self.device))

    def on(self, device: torch.device) -> DenseTensors:
        return DenseTensors(self, device)

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any:
        """function(self, *args), cached if there is a cache; see `PackLayout.memo`."""
        if self.kept is None:
            return function(self, *args)
        return self.kept.cached(memo_key(function, args), function, self, *args)

    def per_condition(self, function: Callable[..., Any], owner: Hashable, *inputs: Any) -> Any:
        """function(owner, *inputs), for a result that is the same at every noise level: it depends on the parameters of
        `owner`, sizes and conditioning.

        For one layout, `inputs` must always be the same values: they are not part of the key.
        """
        if self.kept is None:
            return function(owner, *inputs)
        return self.kept.cached(("per condition", memo_key(function, (owner,))), function, owner, *inputs)
