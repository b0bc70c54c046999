"""Names of the linears and factors of an adapter in files: ours, and those of other programs.

| written by      | a key                                                                           |
|-----------------|---------------------------------------------------------------------------------|
| PEFT            | `base_model.model.transformer_blocks.0.attn1.to_q.lora_A.weight`                |
| diffusers       | `transformer.transformer_blocks.0.attn1.to_q.lora_A.weight`                     |
|                 | `unet.mid_block.attentions.0.proj_in.lora_A.weight`, `.lora.down.weight`        |
| ComfyUI         | `diffusion_model.blocks.block0.blocks.0.block.attn.to_q.0.lora_A.weight`        |
| kohya's scripts | `lora_unet_transformer_blocks_0_attn1_to_q.lora_down.weight`, and its `.alpha`  |
| VideoX-Fun      | `lora_unet__blocks_0_self_attn_q.lora_down.weight`, and its `.alpha`            |

A linear of another program may be some rows of one of ours, or the other way round: both are described by the rows of
our fused weight that they compute, and `regroup` converts factors between them.

Shapes: R rank, I and O input and output features, as in `adapter.py`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert.adapters.adapter import ALPHA, BIAS, DIFFERENCE, DOWN, MAGNITUDE, SCALE, UP, UP_BIAS, Change
from megadit.models.convert.tensor_map import Entry
from megadit.models.convert.written import diffusers_entries, original_entries, pipeline_entries
from megadit.models.lora.adapters import targets_of
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import network_shapes
from megadit.models.storage.wrapped import WRAPPERS

_PREFIXES = (
    "base_model.model.", "pipe.dit.", "model.diffusion_model.", "unet.", "transformer.", "diffusion_model.",
    "lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_", "model.", "dit.", "net.",
)  # fmt: skip
"""Prefixes of linears' names; one may follow another."""
_ALL_PREFIXES = re.compile(rf"(?:{'|'.join(map(re.escape, _PREFIXES))})*+")
_ADAPTER = r"(?:\.[\w.-]+)?"
"""The name that a user gave an adapter, as PEFT writes it."""
ENDINGS = {
    DOWN: rf"\.lora_A{_ADAPTER}\.weight|\.lora_down\.weight|[._]lora\.down\.weight",
    UP: rf"\.lora_B{_ADAPTER}\.weight|\.lora_up\.weight|[._]lora\.up\.weight",
    MAGNITUDE: rf"\.lora_magnitude_vector{_ADAPTER}|\.dora_scale",
    BIAS: r"\.diff_b",
    UP_BIAS: rf"\.lora_B{_ADAPTER}\.bias|\.lora_up\.bias",
    DIFFERENCE: r"\.diff",
    ALPHA: r"\.alpha",
    SCALE: r"\.alpha_scale|\.scale",
}
"""Factor -> pattern of the end of its key, after the name of the linear."""
_KEY = re.compile(
    # up to the first factor that may have a name: trying each of many would take quadratic time
    r"(?P<linear>(?:(?!\.lora_(?:[AB]|magnitude_vector)(?:\.|$)).)*?)(?:"
    + "|".join(f"(?P<{factor}>{ending})" for factor, ending in ENDINGS.items())
    + ")"
)


_ATTENTION = re.compile(r"\.(to_[qkv]|to_out)(\.0)?$")
"""Linears of attention that early LoRAs of diffusers named below `processor`."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedRows:
    """A linear under some name: the rows of one of our linears that it computes."""

    name: str
    linear: str
    """Name of our linear, such as blocks.0.self_attention.qkv."""
    rows_O: Tensor
    """int64: the rows, in the order of its outputs."""
    in_features: int
    has_bias: bool
    sides: tuple[int, ...] = ()
    """Further sides of its matrix: (1, 1) for a convolution of single pixels."""


@lru_cache(maxsize=16)
def our_linears(config: NetworkConfig) -> tuple[NamedRows, ...]:
    """The targets of a network, with our names."""
    sizes, found = network_shapes(config), []
    for name, target in targets_of(config).items():
        num_rows, _, *sides = sizes[f"{target.linear}.weight"]
        rows_O = target.rows.of(torch.arange(num_rows)[:, None])[:, 0]
        found.append(NamedRows(name, target.linear, rows_O, target.in_features, target.has_bias, tuple(sides)))
    return tuple(found)


def diffusers_linears(config: NetworkConfig) -> Sequence[NamedRows]:
    """The same targets with diffusers' names; with ours for a network that diffusers lacks."""
    entries = diffusers_entries(config)
    return our_linears(config) if entries is None else _linears(entries, config)


def original_linears(config: NetworkConfig) -> Sequence[NamedRows]:
    """The same targets with the names of the publication, which ComfyUI has.

    Raises:
        UserError: for a network that was never published so.
    """
    entries = original_entries(config)
    if entries is None:
        raise UserError(f"family {config.family} has no published names, for --to original")
    return _linears(entries, config)


@lru_cache(maxsize=16)
def named_linears(config: NetworkConfig) -> Mapping[str, NamedRows]:
    """Every name that a file may use for a linear (also with _ for each dot) -> the linear."""
    known: dict[str, NamedRows] = {}
    forms = diffusers_entries(config), original_entries(config), pipeline_entries(config)
    published = [entries for entries in forms if entries is not None]
    for linears in (our_linears(config), *(_linears(entries, config) for entries in published)):
        for linear in linears:
            for name in (linear.name, _ATTENTION.sub(r".processor.\1", linear.name)):
                known.setdefault(name, linear)
                known.setdefault(name.replace(".", "_"), linear)
    return known


@lru_cache(maxsize=16)
def layers_of(config: NetworkConfig) -> Collection[str]:
    """Every name that a file may use for a layer or a group of layers (also with _ for each dot)."""
    forms = diffusers_entries(config), original_entries(config), pipeline_entries(config)
    tensors = [
        *network_shapes(config),
        *(name for entries in forms for entry in entries or () for name in entry.theirs),
    ]
    layers = {name[: dot.start()] for name in tensors for dot in re.finditer(r"\.", name)}
    return layers | {name.replace(".", "_") for name in layers}


def plain_key(key: str) -> str:
    """A file's key without the prefixes and wrappers of programs."""
    key = WRAPPERS.sub("", key)
    return key[_ALL_PREFIXES.match(key).end() :]


def split_key(key: str) -> tuple[str, str] | None:
    """(name of the linear, factor) of a file's key; None for keys of other tensors."""
    found = _KEY.fullmatch(plain_key(key))
    return found and (found["linear"], found.lastgroup)


def _linears(entries: Iterable[Entry], config: NetworkConfig) -> list[NamedRows]:
    """Linears of another program that compute rows of ours; without those with other input orders, and copies."""
    sizes = network_shapes(config)
    targets = {target.linear: target for target in targets_of(config).values()}
    found = []
    for entry in entries:
        linear, (num_rows, *others) = entry.name.removesuffix(".weight"), sizes[entry.name]
        if linear not in targets or entry.moves_inputs:
            continue
        parts = entry.split(torch.arange(num_rows)[:, None])
        if sum(map(len, parts)) == num_rows:
            for name, rows in zip(entry.theirs, parts, strict=True):
                of, sides = targets[linear], tuple(others[1:])
                name = name.removesuffix(".weight")
                found.append(NamedRows(name, linear, rows[:, 0], of.in_features, of.has_bias, sides))
    return found


def regroup(
    changes: Mapping[str, Change], named: Iterable[NamedRows], expected: Iterable[NamedRows]
) -> dict[str, Change]:
    """Convert `changes` of the linears `named` to changes of the linears `expected`.

    A linear that computes some of the rows of another takes these rows of `up`; one that computes the rows of several
    has the sum of their ranks, unless they share `down`. Missing rows do not change.

    Raises:
        UserError: where only some rows have DoRA magnitudes, and where rows are changed twice, under the names of two
            programs.
    """
    origins: dict[str, list[NamedRows]] = {}
    for linear in named:
        if linear.name in changes:
            origins.setdefault(linear.linear, []).append(linear)
    made = {}
    for linear in expected:
        parts = []
        for origin in origins.get(linear.linear, []):
            to, at = _shared_rows(linear.rows_O, origin.rows_O)
            if len(to):
                parts.append((changes[origin.name], to, at))
        if parts:
            if sum(len(to) for _, to, _ in parts) > len(torch.cat([to for _, to, _ in parts]).unique()):
                raise UserError(f"the linear {linear.name} is changed twice, by its names in two programs: keep one")
            made[linear.name] = _joined(parts, linear)
    return made


def _shared_rows(expected_O: Tensor, found_O: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the common rows, in `expected_O` and in `found_O`."""
    place = torch.full((1 + int(max(expected_O.max(), found_O.max())),), -1)
    place[found_O] = torch.arange(len(found_O))
    (to,) = torch.where(place[expected_O] >= 0)
    return to, place[expected_O[to]]


def _joined(parts: list[tuple[Change, Tensor, Tensor]], linear: NamedRows) -> Change:
    """Combine changes of some rows of a linear: each part's rows `at` become the linear's rows `to`."""
    first, num_rows = parts[0][0], len(linear.rows_O)
    shares = all(part.alpha == first.alpha and torch.equal(part.down_RI, first.down_RI) for part, _, _ in parts)
    rank = first.rank if shares else sum(part.rank for part, _, _ in parts)
    alpha = first.alpha if shares else float(rank)  # then each part's own scale is in `up`
    up_OR = first.up_OR.new_zeros(num_rows, rank)
    magnitude_O = None if first.magnitude_O is None else first.magnitude_O.new_zeros(num_rows)
    if magnitude_O is not None and sum(len(to) for _, to, _ in parts) < num_rows:
        raise UserError(f"only some rows of {linear.name} have a DoRA magnitude; all of them need one")
    begin = 0
    for part, to, at in parts:
        scale = 1.0 if shares else part.alpha / part.rank
        up_OR[to, begin : begin + part.rank] = scale * part.up_OR[at]
        begin += 0 if shares else part.rank
        if magnitude_O is not None:
            magnitude_O[to] = part.magnitude_O[at]
    down_RI = first.down_RI if shares else torch.cat([part.down_RI for part, _, _ in parts])
    return Change(down_RI, up_OR, alpha, magnitude_O, _joined_bias(parts, num_rows))


def _joined_bias(parts: list[tuple[Change, Tensor, Tensor]], num_rows: int) -> Tensor | None:
    if all(part.bias_O is None for part, _, _ in parts):
        return None
    bias_O = torch.zeros(num_rows)
    for part, to, at in parts:
        if part.bias_O is not None:
            bias_O[to] = part.bias_O[at]
    return bias_O
