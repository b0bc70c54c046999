"""Maps between the tensors of a published checkpoint and ours: one `Entry` for each of our tensors.

Shapes: D width, N heads, K head dim, C latent channels, pt/ph/pw sides of a patch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.shared.errors import UserError


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our tensors, made of one or several of theirs; `split` is the inverse of `join`."""

    name: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]
    moves_inputs: bool = False
    """Whether the columns of their matrix have another order, or it is not a matrix."""


def attention_width(values: Mapping[str, Any]) -> int:
    """Width of all heads by diffusers' settings. Raises UserError for a list, which a product would make as long."""
    heads_and_dim = {name: values[name] for name in ("num_attention_heads", "attention_head_dim")}
    for name, value in heads_and_dim.items():
        if not isinstance(value, int):
            raise UserError(f"{name}={value!r:.40} is not a whole number")
    return math.prod(heads_and_dim.values())


def rename(name: str, theirs: str) -> Entry:
    return Entry(name, (theirs,), lambda parts: parts[0], lambda whole: (whole,))


def rename_linear(name: str, theirs: str, *, bias: bool) -> list[Entry]:
    return [rename(f"{name}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")[: 1 + bias]]


def stack_rows(name: str, theirs: Sequence[str]) -> Entry:
    """Stack linears with the same input into one."""
    return Entry(name, tuple(theirs), torch.cat, lambda whole: whole.chunk(len(theirs)))


def fuse_heads(name: str, theirs: Sequence[str], head_dim: int) -> Entry:
    """Fuse separate projections into one that is laid out head by head: (N, [q k v], K)."""
    count = len(theirs)
    return Entry(
        name,
        tuple(theirs),
        lambda parts: rearrange(torch.stack(tuple(parts)), "j (N K) ... -> (N j K) ...", K=head_dim),
        lambda whole: tuple(rearrange(whole, "(N j K) ... -> j (N K) ...", j=count, K=head_dim)),
    )


def encoder_block(
    ours: str, theirs: str, projections: Sequence[str], layers: Mapping[str, str], head_dim: int
) -> list[Entry]:
    """A block of one of transformers' encoders, whose linears and norms have biases.

    Args:
            ours, theirs: names of the block.
            projections: their names of queries, keys and values within the block.
            layers: our names of the other layers -> theirs, within the block.
        head_dim: width of a head.
    """
    found = [
        fuse_heads(f"{ours}.self_attention.qkv.{kind}", [f"{theirs}.{x}.{kind}" for x in projections], head_dim)
        for kind in ("weight", "bias")
    ]
    for our_name, their_name in layers.items():
        found += rename_linear(f"{ours}.{our_name}", f"{theirs}.{their_name}", bias=True)
    return found


def reorder_heads(name: str, theirs: str, head_dim: int, *, count: int = 3) -> Entry:
    """Reorder a projection laid out ([q k v], N, K) head by head."""
    return Entry(
        name,
        (theirs,),
        lambda parts: rearrange(parts[0], "(j N K) ... -> (N j K) ...", j=count, K=head_dim),
        lambda whole: (rearrange(whole, "(N j K) ... -> (j N K) ...", j=count, K=head_dim),),
    )


def turned(entry: Entry, head_dim: int, *, count: int) -> Entry:
    """Maps channels 2 i and 2 i + 1 of a head to i and i + K / 2, in the first `count` of their tensors.

    They rotate neighbouring channels in rotary positions (arXiv 2104.09864, eq. 34).
    """

    def to_halves(part: Tensor) -> Tensor:
        return rearrange(part, "(N K two) ... -> (N two K) ...", K=head_dim // 2, two=2)

    def to_pairs(part: Tensor) -> Tensor:
        return rearrange(part, "(N two K) ... -> (N K two) ...", K=head_dim // 2, two=2)

    def join(parts: Sequence[Tensor]) -> Tensor:
        return entry.join([to_halves(part) if i < count else part for i, part in enumerate(parts)])

    def split(whole: Tensor) -> list[Tensor]:
        return [to_pairs(part) if i < count else part for i, part in enumerate(entry.split(whole))]

    return replace(entry, join=join, split=split)


def flattened(name: str, theirs: str, sizes: tuple[int, ...]) -> Entry:
    """A vector that they store as a table of these sizes."""
    return Entry(name, (theirs,), lambda parts: parts[0].flatten(), lambda whole: (whole.reshape(*sizes, -1),))


def permute_axis(name: str, theirs: str, pattern: str, config: DiTConfig, *, channels: int) -> Entry:
    """A patch whose elements have another order along one axis: `pattern` is einops', from theirs to ours."""
    patch = {"pt": config.patch_temporal, "ph": config.patch_spatial, "pw": config.patch_spatial, "C": channels}
    before, after = pattern.split(" -> ")
    patch = {side: size for side, size in patch.items() if side in before}
    return Entry(
        name,
        (theirs,),
        lambda parts: rearrange(parts[0], pattern, **patch),
        lambda whole: (rearrange(whole, f"{after} -> {before}", **patch),),
        moves_inputs=before.split()[-1] != after.split()[-1],
    )


def input_patches(name: str, theirs: str, config: DiTConfig, *, is_conv: bool = False) -> Entry:
    """Map the first linear, whose last input channels are those of the conditioning and the padding mask.

    Their columns are (C pt ph pw), as separate axes with `is_conv`; ours are those of the latents, then of each further
    channel.
    """
    patch = {"pt": config.patch_temporal, "ph": config.patch_spatial, "pw": config.patch_spatial}
    channels = (config.in_channels, config.conditioning_channels, 1 if config.padding_mask_channel else 0)
    widths = (config.patch_dim, config.conditioning_dim, config.mask_dim)
    form = "D C pt ph pw" if is_conv else "D (C pt ph pw)"

    def join(parts: Sequence[Tensor]) -> Tensor:
        by_channel = rearrange(parts[0], f"{form} -> D (pt ph pw) C", **patch)
        return torch.cat([group.flatten(1) for group in by_channel.split(channels, dim=-1)], dim=1)

    def split(whole: Tensor) -> tuple[Tensor]:
        groups = zip(whole.split(widths, dim=1), channels, strict=True)
        by_channel = torch.cat([group.unflatten(1, (-1, count)) for group, count in groups if count], dim=-1)
        return (rearrange(by_channel, f"D (pt ph pw) C -> {form}", **patch),)

    return Entry(name, (theirs,), join, split, moves_inputs=True)


def copies(name: str, theirs: Sequence[str]) -> Entry:
    """One tensor that they store several times.

    Joining raises ValueError where the copies differ.
    """

    def join(parts: Sequence[Tensor]) -> Tensor:
        if not all(torch.equal(part, parts[0]) for part in parts[1:]):
            raise ValueError(f"{theirs[0]} and its copies in the other blocks differ")
        return parts[0]

    return Entry(name, tuple(theirs), join, lambda whole: (whole,) * len(theirs))


def renamed(entries: Sequence[Entry], rename_theirs: Callable[[str], str]) -> list[Entry]:
    """The same entries for a checkpoint with other tensor names."""
    return [replace(entry, theirs=tuple(map(rename_theirs, entry.theirs))) for entry in entries]
