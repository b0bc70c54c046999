"""The denoising objective: `edm_loss` with noise of a level sigma that is drawn for each sample; distributions of
sigma, and other values of samples and of their tokens, with which objectives compute.

Noise and noise level depend on the sample's key alone, and so are the same in any pack, on any rank and after any
resume.

A flow model's t is sigma / (1 + sigma): a logit-normal t is a log-normal sigma, a shift of t multiplies sigma.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, normal
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.packing.pack_layout import PackLayout
from megadit.train.config.schema import DiffusionConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.losses import LossSums, edm_loss
from megadit.train.objectives.networks import Networks

LEAST_T = 1e-4
"""Minimum of t and of 1 - t: nearer to 0 or 1, float32 loses the noise or x0."""


def denoise(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """`edm_loss` at noise levels drawn for each sample, with the learned uncertainty if there is one; or activations
    [S, 1, D]."""
    sigma_G = draw_sigma(batch.noise_key_G, networks.config.diffusion, batch.layout)
    model = networks.model
    return edm_loss(model.dit, batch, sigma_G, token_noise(batch), model.uncertainty, model.before)


def denoise_at(networks: Networks, batch: PackedBatch, *, sigma: float) -> LossSums | Tensor:
    """`edm_loss` of all samples at one noise level, without uncertainty, for validation; or activations [S, 1, D]."""
    sigma_G = torch.full_like(batch.fps_G, sigma)
    return edm_loss(networks.model.dit, batch, sigma_G, token_noise(batch), before=networks.model.before)


def log_normal(normal_G: Tensor, mean: float, std: float) -> Tensor:
    """sigma [G]: ln sigma ~ N(mean, std^2) (arXiv 2206.00364, table 1; of t: 2403.03206, eq. 19)."""
    return (mean + std * normal_G).exp()


def uniform(normal_G: Tensor, mean: float, std: float) -> Tensor:
    """sigma [G]: t uniform from 0 to 1, then times exp(mean), which is a flow model's shift; `std` is unused."""
    return mode(normal_G, mean, 0.0)


def mode(normal_G: Tensor, mean: float, std: float) -> Tensor:
    """sigma [G]: t = 1 - u - s (cos^2(pi u / 2) - 1 + u) with u uniform and s = `std` (arXiv 2403.03206, eq. 20), then
    times exp(mean): more of the middle for s > 0."""
    # t and 1 - t by the same function of 1 - u and u, to avoid cancellation
    t_G, rest_G = (
        (w_G + std * (w_G - torch.sin(math.pi / 2 * w_G) ** 2)).clamp(min=LEAST_T)
        for w_G in (torch.special.ndtr(-normal_G), torch.special.ndtr(normal_G))
    )
    return math.exp(mean) * t_G / rest_G


DISTRIBUTIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "log_normal": log_normal,
    "uniform": uniform,
    "mode": mode,
}
"""`diffusion.noise_levels` -> function from unit normal numbers, `p_mean` and `p_std` to sigma."""


def draw_sigma(noise_key_G: Tensor, diffusion: DiffusionConfig, layout: PackLayout) -> Tensor:
    """Noise level of each sample, float32 [G]: a function of its key and, with `diffusion.shift_tokens`, of its
    size."""
    position_G = torch.zeros_like(noise_key_G)
    normal_G = normal(noise_key_G, position_G, 1, stream=Stream.SIGMA)[:, 0]
    sigma_G = DISTRIBUTIONS[diffusion.noise_levels](normal_G, diffusion.p_mean, diffusion.p_std)
    if diffusion.shift_tokens is None:
        return sigma_G
    # padding of text alone has no video tokens, and needs a level with a finite logarithm
    tokens_G = layout.on(sigma_G.device).num_tokens_G.clamp(min=1)
    return sigma_G * (tokens_G / diffusion.shift_tokens).sqrt()


def sampling_noise(batch: PackedBatch, model: DiTConfig, stream_G: Tensor | None = None) -> Tensor:
    """Unit noise [S, 1, P] of sampling with the seeds of the pack's videos, the initial one or that of their streams:
    `noise.latent_noise` at the tokens of this rank."""
    seed_key_G = batch.extra_G["seed_key"]
    tensors = batch.layout.on(seed_key_G.device)
    segment_S, token_S = tensors.segment_of_token_S, tensors.position_in_segment_S
    height_S, width_S = tensors.grid_G3[segment_S, 1:].unbind(-1)
    patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    places = (token_S // (height_S * width_S), token_S // width_S % height_S, token_S % width_S)
    inner_K3 = torch.cartesian_prod(*(torch.arange(side, device=token_S.device) for side in patch)).view(-1, 3)
    t_SK, h_SK, w_SK = (
        place_S[:, None] * side + inner_K for place_S, side, inner_K in zip(places, patch, inner_K3.T, strict=True)
    )
    sides = height_S[:, None] * model.patch_spatial, width_S[:, None] * model.patch_spatial
    position_SK = (t_SK * sides[0] + h_SK) * sides[1] + w_SK
    segment_R, width = segment_S.repeat_interleave(len(inner_K3)), batch.tokens_S1P.shape[-1] // len(inner_K3)
    stream = Stream.NOISE if stream_G is None else stream_G[segment_R]
    noise_RC = normal(seed_key_G[segment_R], position_SK.flatten(), width, stream=stream)
    return noise_RC.reshape(len(token_S), 1, -1)


def token_noise(batch: PackedBatch, stream: int = Stream.NOISE) -> Tensor:
    """Unit normal noise [S, 1, P]; row r of a sample depends on its key and r alone."""
    tensors = batch.layout.on(batch.noise_key_G.device)
    key_S, width = batch.noise_key_G[tensors.segment_of_token_S], batch.tokens_S1P.shape[-1]
    return normal(key_S, tensors.position_in_segment_S, width, stream=stream)[:, None]


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
