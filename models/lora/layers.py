"""Low-rank adapters of linears: two factors, whose product changes the linear's output.

    y = W x + b + scale (alpha / rank) up down x                                  LoRA (arXiv 2106.09685, eq. 3)
    y = m (W + (alpha / rank) up down) x / ||W + (alpha / rank) up down|| + b     DoRA (arXiv 2402.09353, eq. 5)

where norms are those of rows and carry no gradient (section 4.3), and `scale` multiplies DoRA's whole difference; some
published adapters also change b. `up` starts at zero and m at the norms of W: the output then equals the base's
exactly.

Shapes: I and O input and output features of the linear, R rank (of several targets of a fused linear, the sum of
theirs), B batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.ops.reference import linear

ATTRIBUTE = "adapters"
"""Attribute of a linear that holds its adapters."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a matrix that belong to a target: those from `start` to `stop` of every `period`."""

    period: int = 1
    start: int = 0
    stop: int = 1

    def of(self, matrix_OI: Tensor) -> Tensor:
        """These rows, [rows, I]."""
        return matrix_OI.unflatten(0, (-1, self.period))[:, self.start : self.stop].flatten(0, 1)

    def spread(self, matrix_OR: Tensor) -> Tensor:
        """A matrix with these rows, and zeros in the others: [..., rows, R] -> [..., O, R]."""
        if self == Rows():  # all rows: no copy in each step
            return matrix_OR
        turns = matrix_OR.unflatten(-2, (-1, self.stop - self.start))
        return F.pad(turns, (0, 0, self.start, self.period - self.stop)).flatten(-3, -2)


class Target(NamedTuple):
    """A target of an adapter: a linear, or the queries', keys' or values' rows of a fused one."""

    linear: str
    """Path of the module."""
    rows: Rows
    in_features: int
    out_features: int
    """Output features of the target; a fused linear has more."""
    has_bias: bool = False


class Factors(nn.Module):
    """Parameters of an adapter for one target."""

    def __init__(self, target: Target, rank: int, *, has_magnitude: bool, has_bias: bool = False, like: Tensor) -> None:
        super().__init__()
        self.rows = target.rows
        self.down = nn.Parameter(like.new_zeros(rank, target.in_features))
        self.up = nn.Parameter(like.new_zeros(target.out_features, rank))
        self.magnitude = nn.Parameter(like.new_zeros(target.out_features)) if has_magnitude else None
        self.bias = nn.Parameter(like.new_zeros(target.out_features)) if has_bias else None

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(down, up), [R, I] and [O, R]; `up` has all rows of the linear."""
        return self.down.to(dtype), self.rows.spread(self.up.to(dtype))


class LowRank(nn.ModuleDict):
    """One adapter attached to one linear: the change of its output.

    The `Factors` are those of the linear's targets. Their products are computed together: every `down` is concatenated
    along the rank, each `up` fills the rows of its target.
    """

    def __init__(self, factors: Mapping[str, Factors], scaling: float, *, samples_first: bool = False) -> None:
        """`samples_first`: the linear reads [B, ..., I], not [S, B, I], or [G, I] of conditioning with G = B or 2 B."""
        super().__init__(factors)
        self.scaling = scaling
        self.samples_first = samples_first
        self.in_features = next(iter(factors.values())).down.shape[1]
        """Input features of the linear, over all ranks."""
        self.scale: float | Tensor = 1.0
        """Factor of the change; for a uniform batch also [B, 1], one for each sample."""
        self.is_active_I: Tensor | None = None
        """Dropout mask of the input features, in training: 0, or 1 / (1 - dropout); None without dropout."""
        # `megatron.parallelize` replaces these where ranks share the linear
        self.exchange: Callable[[Tensor], Tensor] = _identity
        """Communication of the activations between `down` and `up`."""
        self.sum_inputs: Callable[[Tensor], Tensor] = _identity
        """Sum over ranks that have different input features."""
        self.own_inputs = slice(None)
        """This rank's input features."""

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The change of y = base(x), [..., O]."""
        pairs = [factors(x.dtype) for factors in self.values()]
        down_RI, up_OR = (_concatenated(side, dim) for dim, side in enumerate(zip(*pairs, strict=True)))
        if self.is_active_I is not None and torch.is_grad_enabled():
            down_RI = down_RI * self.is_active_I.to(down_RI)  # same as multiplying the input
        h = self.exchange(linear(x, down_RI))
        ratio_O = self._ratio(base)
        scale = self.scale
        if isinstance(scale, Tensor) and self.samples_first:
            scale = scale.to(h.dtype).reshape(-1, *[1] * (h.ndim - 1))
        elif isinstance(scale, Tensor):  # conditioning has B rows, or 2 B with conditioning tokens
            scale = scale.to(h.dtype).repeat(h.shape[-2] // len(scale), 1)
        if ratio_O is None:
            change = linear(_times(h, scale * self.scaling), up_OR)
        else:
            h = _times(h, self.scaling)
            ratio_O = ratio_O.to(x.dtype)
            product = y if base.bias is None else y - base.bias
            change = scale * ((ratio_O - 1) * product + ratio_O * linear(h, up_OR))
        bias_O = self.bias_change()
        return change if bias_O is None else change + scale * bias_O.to(x.dtype)

    def bias_change(self) -> Tensor | None:
        """Return the adapter's change of the bias at scale 1, [O]; None: no change."""
        changes = [
            factors.rows.spread(factors.bias[:, None])[:, 0] for factors in self.values() if factors.bias is not None
        ]
        return sum(changes) if changes else None

    def change_of(self, weight_OI: Tensor) -> Tensor:
        """Return the adapter's change of a whole matrix at scale 1, [O, I] in the matrix's precision."""
        change_OI = torch.zeros_like(weight_OI)
        for factors in self.values():
            own = factors.rows.of(weight_OI)
            changed = own + self.scaling * (factors.up.to(own) @ factors.down.to(own))
            if factors.magnitude is not None:
                changed = changed * (factors.magnitude.to(own) / changed.norm(dim=1))[:, None]
            change_OI += factors.rows.spread(changed - own)
        return change_OI

    def _ratio(self, base: nn.Module) -> Tensor | None:
        """DoRA's m / ||W + scaling up down||, float32, 1 in rows without a target; None without magnitudes."""
        targets = [factors for factors in self.values() if factors.magnitude is not None]
        if not targets:
            return None  # before the matrix is read: an 8-bit one would be dequantized
        weight_OI, changes = matrix_of(base), []
        for factors in targets:
            # rounded like the magnitudes, which start as these norms
            norm = self._norm(factors.rows.of(weight_OI), factors).to(factors.magnitude.dtype)
            change = factors.magnitude.float() / norm.float() - 1
            changes.append(factors.rows.spread(change[:, None])[:, 0])
        return 1 + sum(changes)

    @torch.no_grad()
    def _norm(self, weight_OI: Tensor, factors: Factors) -> Tensor:
        """||W + scaling up down|| of each row, in float32, without the matrix itself."""
        W, down, up = weight_OI.float(), factors.down.float(), factors.up.float() * self.scaling
        squares = squared_norms(W) + 2 * (up * (W @ down.T)).sum(1) + (up * (up @ (down @ down.T))).sum(1)
        return self.sum_inputs(squares).sqrt()


class SlotLowRank(nn.Module):
    """An adapter whose factors are inputs of every call, different for each sample: for exported networks.

    `factors` are (down [B, R, I], up [B, rows, R]) of each target, `up` with scaling and scale; () changes nothing.
    """

    def __init__(self, rows: Sequence[Rows], *, samples_first: bool = False) -> None:
        """`samples_first`: see `LowRank`."""
        super().__init__()
        self.rows = tuple(rows)
        """Rows of each target."""
        self.samples_first = samples_first
        self.factors: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def scale(self) -> float:
        return 1.0 if self.factors else 0.0

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The change of y = base(x), [..., O]; x is [S, B, I], or [G, I] of conditioning, with G a multiple of B; with
        `samples_first` [B, ..., I]."""
        down_BRI = torch.cat([down for down, _ in self.factors], dim=1).to(x.dtype)
        ups = [rows.spread(up) for rows, (_, up) in zip(self.rows, self.factors, strict=True)]
        up_BOR = torch.cat(ups, dim=2).to(x.dtype)
        batch = down_BRI.shape[0]  # stays symbolic in export, unlike len
        if self.samples_first:
            x_BSI = x.reshape(batch, -1, x.shape[-1])
            return ((x_BSI @ down_BRI.mT) @ up_BOR.mT).reshape(y.shape)
        x_SBI = x if x.ndim == 3 else x.unflatten(0, (-1, batch))
        change_BSO = (x_SBI.transpose(0, 1) @ down_BRI.mT) @ up_BOR.mT
        return change_BSO.transpose(0, 1).reshape(y.shape)


class Adapters(nn.ModuleDict):
    """The adapters of a linear by their names; `forward` returns its output with all of their changes.

    x is [..., I], y = base(x) and the result [..., O].
    """

    def attach(self, base: nn.Module) -> None:
        """Attach to `base` (a forward hook): its output passes through `forward` from now on."""
        base.adapters = self
        self._hook = base.register_forward_hook(_with_changes)

    def leave(self, base: nn.Module) -> None:
        """The inverse of `attach`."""
        self._hook.remove()
        del base.adapters

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        changed = y
        for adapter in self.values():
            if isinstance(adapter.scale, Tensor) or adapter.scale != 0:  # exact: -0 + 0 is 0
                changed = changed + adapter(x, y, base)
        return changed


def adapters_of(base: nn.Module) -> "Adapters | dict":
    """Return the adapters attached to a module, by name; {} where there are none."""
    return getattr(base, ATTRIBUTE, {})


def move_adapters(base: nn.Module, other: nn.Module) -> None:
    """Moves the adapters of a linear, if it has any, to the module that replaces it."""
    if adapters := adapters_of(base):
        adapters.leave(base)
        adapters.attach(other)


def squared_norms(weight_OI: Tensor) -> Tensor:
    """Squared norms of the rows, float32 [O]."""
    return weight_OI.float().square().sum(1)


def matrix_of(base: nn.Module) -> Tensor:
    """The weight of a linear or 1x1 convolution as a matrix [O, I]: a view of it."""
    return base.weight.flatten(1)


def _with_changes(base: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    if not isinstance(base, nn.Conv2d):
        return base.adapters(inputs[0], y, base)
    return base.adapters(inputs[0].movedim(1, -1), y.movedim(1, -1), base).movedim(-1, 1)


def _concatenated(matrices: Sequence[Tensor], dim: int) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1 else x * factor


def _identity(x: Tensor) -> Tensor:
    return x
