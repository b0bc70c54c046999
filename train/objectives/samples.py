"""Values of samples and of their tokens, which objectives compute with.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.diffusion.noise import Stream
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.networks import Networks
from megadit.train.objectives.noise_levels import token_noise


def noisy(networks: Networks, batch: PackedBatch, sigma_G: Tensor, stream: int = Stream.NOISE) -> Tensor:
    """x0 + sigma n, [S, 1, P], with the samples' noise; conditioning tokens have the student's conditioning noise."""
    return batch.noisy(sigma_G, token_noise(batch, stream), networks.config.model.conditioning_noise)


def loss_weight(networks: Networks, sigma_G: Tensor) -> Tensor:
    """lambda(sigma) [G] of the student's parameterization."""
    return parameterization_of(networks.config.model).loss_weight(sigma_G)


def target_of(batch: PackedBatch, x0_S1P: Tensor) -> Tensor:
    """x0 [S, 1, P] at target tokens, and the pack's own tokens at conditioning and padding."""
    is_target_S = batch.layout.on(x0_S1P.device).is_target_S
    return torch.where(is_target_S[:, None, None], x0_S1P, batch.tokens_S1P)


def of_tokens(batch: PackedBatch, value_G: Tensor) -> Tensor:
    """Broadcast values of samples to their tokens, [S, 1, 1]."""
    return value_G[batch.layout.on(value_G.device).segment_of_token_S][:, None, None]


def mean_of_samples(networks: Networks, batch: PackedBatch, value_S: Tensor) -> Tensor:
    """Mean over the target tokens of each sample, [G]; 0 for padding."""
    tensors = batch.layout.on(value_S.device)
    is_target_S = tensors.is_target_S.to(value_S.dtype)
    sums_2G = value_S.new_zeros(2, batch.layout.num_segments)
    both_2S = torch.stack([value_S * is_target_S, is_target_S])
    sums_2G = summed(sums_2G.index_add(1, tensors.segment_of_token_S, both_2S), networks.context)
    return sums_2G[0] / sums_2G[1].clamp(min=1)


def summed(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum a tensor of any shape over a group (None: this rank), in place."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
