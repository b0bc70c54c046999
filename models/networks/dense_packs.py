"""A uniform batch as a pack, and back, so that ranks which share the tokens of a pack can sample, too.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, S video tokens, P patch dim, L text tokens,
E text feature width, G segments, Q conditioning channels of a token.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.embeddings import patchify, unpatchify
from megadit.models.packing.pack_layout import PackLayout


class DensePack(NamedTuple):
    """The samples one after another, and padding up to a multiple that all ranks can share."""

    tokens_S1P: Tensor
    text_L1E: Tensor
    fps_G: Tensor
    layout: PackLayout
    attached_S1Q: Tensor | None = None
    """Conditioning as extra channels of the tokens, in networks that read it there."""
    guidance_G: Tensor | None = None
    """Guidance scales, for guidance-distilled networks."""


def pack_dense(x_BCTHW: Tensor, conditioning: Conditioning, config: DiTConfig, multiple: int) -> DensePack:
    """All samples of a uniform batch as one pack of a multiple of `multiple` tokens."""
    sample, lengths = conditioning.segment(config, x_BCTHW.shape[2:]), conditioning.text_length_B.tolist()
    clean = conditioning.clean
    x_BCTHW = x_BCTHW if clean is None or not config.conditioning.is_among else clean.among(x_BCTHW)
    tokens_S1P = _one_by_one(x_BCTHW, config)
    segments = [replace(sample, text_length=length) for length in lengths]
    text_capacity = sum(segment.text_places for segment in segments)
    capacity = -(-len(tokens_S1P) // multiple) * multiple
    layout = PackLayout.pack(segments, capacity=capacity, text_capacity=text_capacity)
    has_channels = clean is not None and not config.conditioning.is_among
    guidance_B = conditioning.guidance_B
    text = [features_LE[: max(length, 1)] for features_LE, length in zip(conditioning.text_BLE, lengths, strict=True)]
    return DensePack(
        tokens_S1P=_filled_up(tokens_S1P, capacity),
        text_L1E=torch.cat(text)[:, None],
        fps_G=pad_segments(conditioning.fps_B.float(), layout),
        layout=layout,
        attached_S1Q=_filled_up(_one_by_one(clean.channels(config), config), capacity) if has_channels else None,
        guidance_G=None if guidance_B is None else pad_segments(guidance_B, layout, value=1.0),
    )


def _one_by_one(x_BCTHW: Tensor, config: DiTConfig) -> Tensor:
    """The tokens of all samples, [S, 1, P]."""
    return rearrange(patchify(x_BCTHW, config), "S B P -> (B S) 1 P")


def _filled_up(tokens_S1P: Tensor, capacity: int) -> Tensor:
    return torch.cat([tokens_S1P, tokens_S1P.new_zeros(capacity - len(tokens_S1P), *tokens_S1P.shape[1:])])


def unpack_dense(tokens_S1P: Tensor, layout: PackLayout, like_BCTHW: Tensor, config: DiTConfig) -> Tensor:
    """The latents, BCTHW, of the tokens of such a pack, without extra conditioning frames; the inverse of
    `pack_dense`."""
    grid, batch = config.token_grid(*like_BCTHW.shape[2:]), len(like_BCTHW)
    samples = [segment.num_tokens for segment in layout.segments[:batch]]
    tokens_SBP = rearrange(tokens_S1P[: sum(samples)], "(B S) 1 P -> S B P", B=batch)
    return unpatchify(tokens_SBP[: prod(grid)], grid, config)


def pad_segments(values_B: Tensor, layout: PackLayout, value: float = 0.0) -> Tensor:
    """One number for each segment: the samples' values, then `value` for padding segments."""
    padding = values_B.new_full((layout.num_segments - len(values_B),), value)
    return torch.cat([values_B, padding])


def gather_tokens(tokens_S1P: Tensor, layout: PackLayout, group: dist.ProcessGroup) -> Tensor:
    """All tokens of a pack, [S, 1, P], from the CP shards of the ranks of `group`; `layout` is this rank's."""
    if group.size() == 1:
        return tokens_S1P
    whole = tokens_S1P.new_zeros(layout.whole.capacity, *tokens_S1P.shape[1:])
    whole[layout.on(whole.device).index_S] = tokens_S1P
    dist.all_reduce(whole, group=group)
    return whole
