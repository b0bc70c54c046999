"""Adapters: small trained changes beside a network's linears, of which several can be loaded, scaled and removed.

    y = W x + b + scale (alpha / rank) up down x                                  LoRA (arXiv 2106.09685, eq. 3)
    y = m (W + (alpha / rank) up down) x / ||W + (alpha / rank) up down|| + b     DoRA (arXiv 2402.09353, eq. 5)

where the norms are those of rows and carry no gradient (section 4.3), and `scale` multiplies the difference that DoRA
makes. `up` begins at zero and m as the norms of W: the output is then the base's to the last bit.

A *target* is a linear of the network, or the part of a fused one that queries, keys or values have: `targets_of` lists
their names. An *adapter state* has `<target>.down` [rank, in], `<target>.up` [out, rank] and, of DoRA,
`<target>.magnitude` [out], whole whatever the layout.

Shapes: I and O input and output features of a linear, R rank (of several targets of a fused linear, the sum of theirs).
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.adapter_config import AdapterConfig
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.initialize import generator_of, normal_values
from megadit.models.ops.linear import linear
from megadit.models.shared.errors import UserError, did_you_mean

DEFAULT = "adapter"
"""Name of an adapter where there is one."""
ADAPTERS = "adapters"
"""Attribute of a linear that has some."""
MOST_SHOWN = 8
"""Problems of an adapter that a message lists."""
_PARAMETER = re.compile(r"(?P<path>.*?)[^.]+\.adapters\.[^.]+\.(?P<part>[^.]+)\.(?P<kind>down|up|magnitude)$")


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a matrix belong to a target: of every `period` in turn those from `start` to `stop`."""

    period: int = 1
    start: int = 0
    stop: int = 1

    def of(self, matrix_OI: Tensor) -> Tensor:
        """These rows, [rows, I]."""
        return matrix_OI.unflatten(0, (-1, self.period))[:, self.start : self.stop].flatten(0, 1)

    def spread(self, matrix_OR: Tensor) -> Tensor:
        """A matrix of all rows that has these, and zeros in the others: [rows, R] -> [O, R]."""
        turns = matrix_OR.unflatten(0, (-1, self.stop - self.start))
        return F.pad(turns, (0, 0, self.start, self.period - self.stop)).flatten(0, 1)


ALL_ROWS = Rows()


class Target(NamedTuple):
    """What an adapter may change: a linear, or a part of one."""

    linear: str
    """Path of the module."""
    rows: Rows
    in_features: int
    out_features: int
    """Of the target; a fused linear has more."""


@lru_cache(maxsize=16)
def targets_of(config: DiTConfig) -> Mapping[str, Target]:
    """Every target of a network by its name: `blocks.0.self_attention.q`, `blocks.0.mlp.fc1`, `text_embedder`, ...

    Experts that a router chooses among are stacks of matrices and no targets; the one that all tokens go through is.
    """
    with torch.device("meta"):
        dit = DiT(config)
    targets = {}
    for path, module in dit.named_modules():
        if isinstance(module, nn.Linear):
            above, _, last = path.rpartition(".")
            for part, rows in _parts(last, config).items():
                name = f"{above}.{part}" if above else part
                out_features = module.out_features // rows.period * (rows.stop - rows.start)
                targets[name] = Target(path, rows, module.in_features, out_features)
    return targets


def _parts(linear: str, config: DiTConfig) -> dict[str, Rows]:
    """The targets in a linear of this name, and where `attention.py` lays out their rows."""
    head = config.dim_per_head
    queries = config.num_attention_heads // config.key_heads * head
    match linear:
        case "qkv":
            ends = {"q": (0, queries), "k": (queries, queries + head), "v": (queries + head, queries + 2 * head)}
            return {part: Rows(queries + 2 * head, *end) for part, end in ends.items()}
        case "kv":
            return {"k": Rows(2 * head, 0, head), "v": Rows(2 * head, head, 2 * head)}
        case _:
            return {linear: ALL_ROWS}


def chosen_targets(config: DiTConfig, patterns: Iterable[str]) -> dict[str, Target]:
    """The targets that any of the patterns names.

    Raises:
        UserError: for a pattern that names none, with the name most like it.
    """
    targets = targets_of(config)
    chosen = set()
    for pattern in patterns:
        found = {name for name in targets if fnmatchcase(name, pattern)}
        if not found:
            hint = did_you_mean(pattern, targets, "targets are such as " + ", ".join(list(targets)[:4]))
            raise UserError(f"no linear of the network is named {pattern!r}{hint}")
        chosen |= found
    return {name: target for name, target in targets.items() if name in chosen}


# ------------------------------------------------------------------------------------------------ beside a linear


class Factors(nn.Module):
    """What an adapter has of one target."""

    def __init__(self, target: Target, rank: int, *, has_magnitude: bool, like: Tensor) -> None:
        super().__init__()
        self.rows = target.rows
        self.down = nn.Parameter(like.new_zeros(rank, target.in_features))
        self.up = nn.Parameter(like.new_zeros(target.out_features, rank))
        self.magnitude = nn.Parameter(like.new_zeros(target.out_features)) if has_magnitude else None

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(down, up), the rows of `up` those of the linear: [R, I], [O, R]."""
        return self.down.to(dtype), self.rows.spread(self.up.to(dtype))


class LowRank(nn.ModuleDict):
    """One adapter beside one linear: the change of its output.

    The `Factors` are those of the linear's targets. Their products are computed together: the rows of every `down` one
    below the other, each `up` in the rows of its target.
    """

    def __init__(self, factors: Mapping[str, Factors], scaling: float) -> None:
        super().__init__(factors)
        self.scaling = scaling
        self.in_features = next(iter(factors.values())).down.shape[1]
        """Of the linear, over all ranks."""
        self.scale: float | Tensor = 1.0
        """How much of the change is added; of a uniform batch also [B, 1], one for each sample."""
        self.kept_I: Tensor | None = None
        """What multiplies the input while training with dropout: 0, or 1 / (1 - dropout)."""
        # `megatron.parallelize` exchanges these where ranks share the linear
        self.exchange: Callable[[Tensor], Tensor] = _identity
        """Of what lies between `down` and `up`."""
        self.sum_inputs: Callable[[Tensor], Tensor] = _identity
        """Over ranks of which each has some input features."""
        self.own_inputs = slice(None)
        """The input features that this rank has."""

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The change of y = base(x), [..., O]."""
        pairs = [factors(x.dtype) for factors in self.values()]
        down_RI, up_OR = torch.cat([down for down, _ in pairs]), torch.cat([up for _, up in pairs], dim=1)
        if self.kept_I is not None and self.training:
            down_RI = down_RI * self.kept_I.to(down_RI)  # as if the input had been multiplied
        h = self.exchange(linear(x, down_RI)) * self.scaling
        ratio_O = self._ratio(base.weight)
        if ratio_O is None:
            return linear(h * self.scale, up_OR)
        ratio_O = ratio_O.to(x.dtype)
        product = y if base.bias is None else y - base.bias
        return self.scale * ((ratio_O - 1) * product + ratio_O * linear(h, up_OR))

    def _ratio(self, weight_OI: Tensor) -> Tensor | None:
        """DoRA's m / ||W + scaling up down||, float32, 1 in the rows of no target; None without magnitudes."""
        changes = []
        for factors in self.values():
            if factors.magnitude is not None:
                norm = self._norm(factors.rows.of(weight_OI), factors)
                change = factors.magnitude.float() / norm - 1
                changes.append(factors.rows.spread(change[:, None])[:, 0])
        return 1 + sum(changes) if changes else None

    @torch.no_grad()
    def _norm(self, weight_OI: Tensor, factors: Factors) -> Tensor:
        """||W + scaling up down|| of each row, in float32, without the matrix itself."""
        W, down, up = weight_OI.float(), factors.down.float(), factors.up.float() * self.scaling
        squares = _squares(W) + 2 * (up * (W @ down.T)).sum(1) + (up * (up @ (down @ down.T))).sum(1)
        return self.sum_inputs(squares).sqrt()


class Adapters(nn.ModuleDict):
    """The adapters of a linear by their names; `forward` is the linear's output with all of their changes."""

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        changed = y
        for adapter in self.values():
            if isinstance(adapter.scale, Tensor) or adapter.scale != 0:
                changed = changed + adapter(x, y, base)
        return changed


def _add_changes(base: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """The forward hook of a linear with adapters."""
    return base.adapters(inputs[0], y, base)


def _identity(x: Tensor) -> Tensor:
    return x


def _squares(weight_OI: Tensor) -> Tensor:
    return weight_OI.float().square().sum(1)


# ------------------------------------------------------------------------------------------------ of a network


def attach(dit: DiT, adapter: AdapterConfig, name: str = DEFAULT) -> None:
    """Puts an adapter, all zeros, beside the linears of `dit` that `adapter.targets` names; `name` is free of dots.

    Raises:
        UserError: for a pattern that names none, or if there is an adapter of this name already.
    """
    ranks = dict.fromkeys(chosen_targets(dit.config, adapter.targets), adapter.rank)
    _attach(dit, ranks, adapter, name)


def _attach(dit: DiT, ranks: Mapping[str, int], adapter: AdapterConfig, name: str) -> None:
    if name in adapter_names(dit):
        raise UserError(f"there is an adapter named {name!r} already; give this one another name, or remove that one")
    by_linear: dict[str, dict[str, Factors]] = {}
    modules = dict(dit.named_modules())
    for target_name, rank in ranks.items():
        target = targets_of(dit.config)[target_name]
        if target.linear in modules:  # a part of a network has some of the blocks
            factors = Factors(
                target, rank, has_magnitude=adapter.kind == "dora", like=modules[target.linear].weight.detach()
            )
            by_linear.setdefault(target.linear, {})[target_name.rpartition(".")[2]] = factors
    for path, parts in by_linear.items():
        base = modules[path]
        if not hasattr(base, ADAPTERS):
            _set_adapters(base, Adapters())
        getattr(base, ADAPTERS)[name] = LowRank(parts, adapter.scaling).train(dit.training)


def _set_adapters(base: nn.Module, adapters: Adapters) -> None:
    base.adapters = adapters
    adapters.hook = base.register_forward_hook(_add_changes)


def move_adapters(base: nn.Module, other: nn.Module) -> None:
    """Gives the adapters of a linear, if it has any, to another one that stands for it."""
    if hasattr(base, ADAPTERS):
        adapters = base.adapters
        adapters.hook.remove()
        del base.adapters
        _set_adapters(other, adapters)


def remove(dit: DiT, name: str = DEFAULT) -> None:
    """Takes an adapter away: the network computes what it did before."""
    for base in [module for module in dit.modules() if name in getattr(module, ADAPTERS, ())]:
        del base.adapters[name]
        if not base.adapters:
            base.adapters.hook.remove()
            del base.adapters


def adapter_names(dit: DiT) -> list[str]:
    """The adapters of a network, in the order in which they came."""
    return list(
        dict.fromkeys(name for adapters in dit.modules() if isinstance(adapters, Adapters) for name in adapters)
    )


def set_scale(dit: DiT, scale: float | Tensor, name: str = DEFAULT) -> None:
    """How much of an adapter's change is added: 0 is the base; for a uniform batch also [B], one for each sample.

    A layout that keeps values (`DiT.dense_layout`) is for one scale.
    """
    scale = scale[:, None] if isinstance(scale, Tensor) else scale
    for adapter in _low_ranks(dit, name):
        adapter.scale = scale


def _low_ranks(dit: DiT, name: str) -> Iterator[LowRank]:
    return (module.adapters[name] for module in dit.modules() if name in getattr(module, ADAPTERS, ()))


def adapter_state(dit: DiT, name: str = DEFAULT) -> dict[str, Tensor]:
    """The adapter state of a network that no ranks share; the tensors are the parameters themselves."""
    inside = f".{ADAPTERS}.{name}."
    return {adapter_key(path): value.detach() for path, value in dit.named_parameters() if inside in f".{path}"}


def adapter_key(parameter: str) -> str | None:
    """The key in an adapter state of a parameter's name in the network; None for one of the base."""
    found = _PARAMETER.fullmatch(parameter)
    return found and f"{found['path']}{found['part']}.{found['kind']}"


def load_adapter(dit: DiT, state: Mapping[str, Tensor], adapter: AdapterConfig, name: str = DEFAULT) -> None:
    """Puts an adapter with these values beside the linears of `dit`, in the precision and on the device of each.

    The targets are those of `state`, each with the rank that its tensors have; of `adapter` count `kind` and `scaling`.

    Raises:
        UserError: for tensors that do not fit the network, by name and shape, or are not finite; nothing has changed.
    """
    check_state(state, adapter, dit.config)
    ranks = {key.removesuffix(".down"): len(value) for key, value in state.items() if key.endswith(".down")}
    _attach(dit, ranks, adapter, name)
    with torch.no_grad():
        for key, parameter in adapter_state(dit, name).items():
            parameter.copy_(state[key])


def check_state(state: Mapping[str, Tensor], adapter: AdapterConfig, config: DiTConfig) -> None:
    """Raises UserError for an adapter state that is not one of this network: what does not fit, by name and shape."""
    targets = targets_of(config)
    names = dict.fromkeys(key.rpartition(".")[0] for key in state)
    expected = {}
    for name in names.keys() & targets.keys():
        rank = len(state.get(f"{name}.down", ()))
        expected[f"{name}.down"] = (rank, targets[name].in_features)
        expected[f"{name}.up"] = (targets[name].out_features, rank)
        if adapter.kind == "dora":
            expected[f"{name}.magnitude"] = (targets[name].out_features,)
    problems = [f"{name!r} is no linear of it{did_you_mean(name, targets)}" for name in names if name not in targets]
    problems += [f"{key} is missing" for key in expected if key not in state]
    for key, value in state.items():
        if key.rpartition(".")[0] not in targets:
            continue
        if key not in expected:
            problems.append(f"{key} is not of a {adapter.kind}")
        elif tuple(value.shape) != expected[key]:
            problems.append(f"{key} is {list(value.shape)}, not {list(expected[key])}")
        elif not value.isfinite().all():
            problems.append(f"{key} has values that are not finite")
    if problems or not state:
        shown = "; ".join(problems[:MOST_SHOWN]) or "it has no tensors"
        rest = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
        raise UserError(f"the adapter does not fit the network: {shown}{rest}")


@torch.no_grad()
def merge(dit: DiT) -> None:
    """Adds the changes of all adapters, at their scales, to the weights, and removes the adapters.

    Computed in float64 and rounded once to each weight's precision. The network is one that no ranks share, and scales
    are numbers.
    """
    names = adapter_names(dit)
    for base in [module for module in dit.modules() if hasattr(module, ADAPTERS)]:
        weight_OI = base.weight.double()
        total = sum(adapter.scale * merged_change(adapter, weight_OI) for adapter in base.adapters.values())
        base.weight.copy_(weight_OI + total)
    for name in names:
        remove(dit, name)


def merged_change(adapter: LowRank, weight_OI: Tensor) -> Tensor:
    """What one adapter adds to a matrix at scale 1, [O, I] in the matrix's precision."""
    total = torch.zeros_like(weight_OI)
    for factors in adapter.values():
        own = factors.rows.of(weight_OI)
        changed = own + adapter.scaling * (factors.up.to(own) @ factors.down.to(own))
        if factors.magnitude is not None:
            changed = changed * (factors.magnitude.to(own) / changed.norm(dim=1))[:, None]
        total += factors.rows.spread(changed - own)
    return total


# ------------------------------------------------------------------------------------------------ while training


def train_adapter_only(dit: DiT) -> None:
    """Freezes the base: no gradients of its parameters are computed."""
    for name, parameter in dit.named_parameters():
        parameter.requires_grad_(adapter_key(name) is not None)


def initial_state(
    config: DiTConfig, seed: int, base: Callable[[str], Tensor], dtype: torch.dtype
) -> Callable[[str, torch.Size], Tensor]:
    """value(key, shape) of an adapter before its first step, float32 and whole: the same in any layout.

    `down` is normal with variance 1 / in, `up` zero, and a magnitude the norms of the rows of the weights that `base`
    gives, in the precision in which they compute.
    """

    def value(key: str, shape: torch.Size) -> Tensor:
        name, _, kind = key.rpartition(".")
        if kind == "down":
            return normal_values(f"{name}.down", shape, seed)
        if kind == "up":
            return torch.zeros(shape)
        target = targets_of(config)[name]
        return _squares(target.rows.of(base(f"{target.linear}.weight").to(dtype))).sqrt()

    return value


def draw_dropout(dit: DiT, adapter: AdapterConfig, *, seed: int, step: int) -> None:
    """Chooses the input features that each linear's `down` does not see in this step: the same in any layout."""
    if not adapter.dropout:
        return
    for path, module in dit.named_modules():
        if isinstance(module, LowRank):
            drawn_I = torch.rand(module.in_features, generator=generator_of(f"{path}/{step}", seed), device="cpu")
            kept_I = (drawn_I >= adapter.dropout).float()
            module.kept_I = (kept_I / (1 - adapter.dropout))[module.own_inputs]


def fingerprint(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """16 hex digits that tell one set of weights from another, from up to 64 values of each tensor rounded to bfloat16.

    A copy in half precision has the same; a network that was trained further, or had an adapter merged, another.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        value = read(name)
        chosen = value.flatten()[:: max(1, math.ceil(value.numel() / 64))].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(value.shape)} ".encode() + chosen.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
