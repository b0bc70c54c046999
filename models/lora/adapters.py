"""Adapters of a network: trained changes of its linears, of which several can be loaded, scaled and removed.

A *target* is a linear, or the rows of queries, keys or values in a fused one: `targets_of` lists their names.
An *adapter state* has `<target>.down` [rank, in], `<target>.up` [out, rank], with DoRA `<target>.magnitude` [out], and
in some published ones `<target>.bias` [out], unsharded. `layers.py` defines what they compute.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor, nn

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.lora.layers import Adapters, Factors, LowRank, Rows, Target, adapters_of, matrix_of, squared_norms
from megadit.models.networks.initialize import generator_of, normal_values
from megadit.models.networks.registry import SavedNetwork, build_without_memory
from megadit.models.shared.errors import UserError, did_you_mean

DEFAULT = "adapter"
"""Default name of an adapter."""
MOST_SHOWN = 8
"""Maximum number of problems that a message lists."""
_PARAMETER = re.compile(r"(?P<path>.*?)[^.]+\.adapters\.[^.]+\.(?P<part>[^.]+)\.(?P<kind>down|up|magnitude|bias)")


# ------------------------------------------------------------------------------------------------ targets


@lru_cache(maxsize=16)
def targets_of(config: NetworkConfig) -> Mapping[str, Target]:
    """Every target of a network by its name: `blocks.0.self_attention.q`, `blocks.0.mlp.fc1`, `text_embedder`, ...

    Routed experts are stacks of matrices and no targets; the shared expert is.
    """
    targets = {}
    for path, module in build_without_memory(config).named_modules():
        if sizes := _sizes(module):
            above, _, last = path.rpartition(".")
            for part, rows in _rows_of(last, config).items():
                name = f"{above}.{part}" if above else part
                in_features, out_features = sizes
                own_features = out_features // rows.period * (rows.stop - rows.start)
                targets[name] = Target(path, rows, in_features, own_features, module.bias is not None)
    return targets


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear or a 1x1 convolution; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride == (1, 1) and module.groups == 1:
        return module.in_channels, module.out_channels
    return None


def _rows_of(linear: str, config: NetworkConfig) -> dict[str, Rows]:
    """The targets in a linear of this name, with their rows in the layout of `attention.py`."""
    match linear:
        case "qkv":
            head = config.dim_per_head
            queries = config.num_attention_heads // config.key_heads * head
            ends = {"q": (0, queries), "k": (queries, queries + head), "v": (queries + head, queries + 2 * head)}
            return {part: Rows(queries + 2 * head, *end) for part, end in ends.items()}
        case "kv":
            head = config.dim_per_head
            return {"k": Rows(2 * head, 0, head), "v": Rows(2 * head, head, 2 * head)}
        case _:
            return {linear: Rows()}


@lru_cache(maxsize=64)
def chosen_targets(config: NetworkConfig, patterns: tuple[str, ...]) -> Mapping[str, Target]:
    """The targets that match any of the patterns.

    Raises:
        UserError: for a pattern without a match, with the most similar name.
    """
    targets = targets_of(config)
    chosen = set()
    for pattern in patterns:
        found = {name for name in targets if fnmatchcase(name, pattern)}
        if not found:
            hint = did_you_mean(pattern, targets, "there are " + ", ".join(list(targets)[:MOST_SHOWN]) + ", ...")
            raise UserError(f"no linear of the network is named {pattern!r}{hint}")
        chosen |= found
    return {name: target for name, target in targets.items() if name in chosen}


# ------------------------------------------------------------------------------------------------ attaching


def attach(dit: SavedNetwork, adapter: AdapterConfig, name: str = DEFAULT) -> None:
    """Attaches an adapter, all zeros, to the linears of `dit` that match `adapter.targets`; `name` must not contain
    dots.

    Raises:
        UserError: for a pattern without a match, or if an adapter of this name exists.
    """
    ranks = dict.fromkeys(chosen_targets(dit.config, adapter.targets), adapter.rank)
    _attach(dit, ranks, adapter, name)


def _attach(
    dit: SavedNetwork, ranks: Mapping[str, int], adapter: AdapterConfig, name: str, biased: Collection[str] = ()
) -> None:
    if name in adapter_names(dit):
        raise UserError(f"there is an adapter named {name!r} already; give this one another name, or remove that one")
    modules, targets = dict(dit.named_modules()), targets_of(dit.config)
    by_linear: dict[str, dict[str, Factors]] = {}
    for target_name, rank in ranks.items():
        target = targets[target_name]
        if target.linear in modules:  # a model chunk has some of the blocks
            like, has_magnitude = matrix_of(modules[target.linear]).detach(), adapter.kind == "dora"
            has_bias = target_name in biased
            factors = Factors(target, rank, has_magnitude=has_magnitude, has_bias=has_bias, like=like)
            by_linear.setdefault(target.linear, {})[target_name.rpartition(".")[2]] = factors
    for path, factors in by_linear.items():
        attached_to(modules[path])[name] = LowRank(factors, adapter.scaling, samples_first=dit.config.samples_first)


def attached_to(base: nn.Module) -> Adapters:
    """The adapters of a linear; more can be attached to it."""
    if not adapters_of(base):
        Adapters().attach(base)
    return base.adapters


def remove(dit: SavedNetwork, name: str = DEFAULT) -> None:
    """Removes an adapter from a network."""
    for base in [module for module in dit.modules() if name in adapters_of(module)]:
        del base.adapters[name]
        if not base.adapters:
            base.adapters.leave(base)


def adapter_names(dit: SavedNetwork) -> list[str]:
    """The names of a network's adapters, in the order in which they were attached."""
    return list(dict.fromkeys(name for module in dit.modules() for name in adapters_of(module)))


def set_scale(dit: SavedNetwork, scale: float | Tensor, name: str = DEFAULT) -> None:
    """Set the scale of an adapter's change: 0 is the base; for a uniform batch also [B], one for each sample.

    A layout with a cache (`DiT.dense_layout`) is valid for one scale.
    """
    for adapter in _low_ranks(dit, name):
        adapter.scale = scale[:, None] if isinstance(scale, Tensor) else scale


def _low_ranks(dit: SavedNetwork, name: str) -> Iterator[LowRank]:
    return (adapters_of(module)[name] for module in dit.modules() if name in adapters_of(module))


def adapter_state(dit: SavedNetwork, name: str = DEFAULT) -> dict[str, Tensor]:
    """The adapter state of an unsharded network; the tensors are the parameters themselves."""
    inside = f".adapters.{name}."
    return {adapter_key(path): value.detach() for path, value in dit.named_parameters() if inside in f".{path}"}


def adapter_key(parameter: str) -> str | None:
    """The key in an adapter state of a parameter's name in the network; None for a parameter of the base."""
    found = _PARAMETER.fullmatch(parameter)
    return found and f"{found['path']}{found['part']}.{found['kind']}"


def load_adapter(dit: SavedNetwork, state: Mapping[str, Tensor], adapter: AdapterConfig, name: str = DEFAULT) -> None:
    """Attaches an adapter with these values to the linears of `dit`, in the precision and on the device of each.

    The targets are those of `state`, each with the rank of its tensors; only `kind` and `scaling` of `adapter` are
    read.

    Raises:
        UserError: for tensors that do not fit the network (by name and shape), or are not finite; then nothing changes.
    """
    check_state(state, adapter, dit.config)
    ranks = {key.removesuffix(".down"): len(value) for key, value in state.items() if key.endswith(".down")}
    _attach(dit, ranks, adapter, name, {key.removesuffix(".bias") for key in state if key.endswith(".bias")})
    with torch.no_grad():
        for key, parameter in adapter_state(dit, name).items():
            parameter.copy_(state[key])


def check_state(state: Mapping[str, Tensor], adapter: AdapterConfig, config: NetworkConfig) -> None:
    """Raises UserError if an adapter state does not fit this network, with names and shapes."""
    targets = targets_of(config)
    names = dict.fromkeys(key.rpartition(".")[0] for key in state)
    expected = {}
    for name in [name for name in names if name in targets]:
        rank = len(state.get(f"{name}.down", ()))
        expected[f"{name}.down"] = (rank, targets[name].in_features)
        expected[f"{name}.up"] = (targets[name].out_features, rank)
        if adapter.kind == "dora":
            expected[f"{name}.magnitude"] = (targets[name].out_features,)
        if f"{name}.bias" in state and targets[name].has_bias:
            expected[f"{name}.bias"] = (targets[name].out_features,)
    problems = [f"{name!r} is not a linear of it{did_you_mean(name, targets)}" for name in names if name not in targets]
    problems += [f"{key} is missing" for key in expected if key not in state]
    for key, value in state.items():
        if key.rpartition(".")[0] not in targets:
            continue
        if key not in expected:
            problems.append(f"{key} does not belong to a {adapter.kind}")
        elif tuple(value.shape) != expected[key]:
            problems.append(f"{key} is {list(value.shape)}, not {list(expected[key])}")
        elif not value.isfinite().all():
            problems.append(f"{key} has values that are not finite")
    if problems or not state:
        shown = "; ".join(problems[:MOST_SHOWN]) or "it has no tensors"
        rest = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
        raise UserError(f"the adapter does not fit the network: {shown}{rest}")


@torch.no_grad()
def merge(dit: SavedNetwork) -> None:
    """Adds the changes of all adapters, at their scales, to the weights, and removes the adapters.

    Computed in float64 and rounded once to each weight's precision. The network must be unsharded, and scales must be
    numbers.
    """
    for base in [module for module in dit.modules() if adapters_of(module)]:
        weight_OI, adapters = matrix_of(base).double(), base.adapters
        changed_OI = weight_OI + sum(each.scale * each.change_of(weight_OI) for each in adapters.values())
        base.weight.copy_(changed_OI.view_as(base.weight))
        biases = [(each.scale, each.bias_change()) for each in adapters.values()]
        for scale, bias_O in biases:
            if bias_O is not None:
                base.bias.add_((scale * bias_O.double()).to(base.bias))
        adapters.leave(base)


def fingerprint(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """16 hex digits that identify a set of weights: a hash of up to 64 values of each tensor, rounded to bfloat16.

    A copy in half precision has the same fingerprint; a network that was trained further, or merged with an adapter,
    has another.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        value = read(name)
        chosen = value.flatten()[:: math.ceil(value.numel() / 64)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(value.shape)} ".encode() + chosen.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ training


def train_adapter_only(dit: SavedNetwork, dtype: torch.dtype) -> None:
    """Freezes the base and keeps it in `dtype`, in which it computes (or in eight bits)."""
    for name, parameter in dit.named_parameters():
        if adapter_key(name) is None:
            kept = dtype if parameter.is_floating_point() else parameter.dtype
            parameter.requires_grad_(False).data = parameter.data.to(kept)


def initial_adapter_value(
    key: str, config: NetworkConfig, rank: int, *, seed: int, base: Callable[[str], Tensor], dtype: torch.dtype
) -> Tensor:
    """The whole tensor of an adapter state before the first step, float32: the same in any layout.

    `down` is normal with variance 1 / in, `up` zero, and a magnitude the norms of the rows of the weights; `base`
    returns them by their names, and they compute in `dtype`.
    """
    name, _, kind = key.rpartition(".")
    target = targets_of(config)[name]
    match kind:
        case "down":
            return normal_values(key, torch.Size((rank, target.in_features)), seed)
        case "up":
            return torch.zeros(target.out_features, rank)
        case _:
            return squared_norms(target.rows.of(base(f"{target.linear}.weight").to(dtype))).sqrt()


def draw_dropout(dit: SavedNetwork, dropout: float, *, seed: int, step: int) -> None:
    """Draws the input features that each linear's `down` drops in this step: the same in any layout."""
    if not dropout:
        return
    for path, module in dit.named_modules():
        if isinstance(module, LowRank):
            drawn_I = torch.rand(module.in_features, generator=generator_of(f"{path}/{step}", seed), device="cpu")
            module.is_active_I = ((drawn_I >= dropout) / (1 - dropout))[module.own_inputs]
