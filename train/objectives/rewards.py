"""Objectives of post-training by rewards and preferences: the teacher is the policy that made the videos, or the
reference.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included), D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.diffusion.noise import Stream
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import (
    draw_sigma,
    loss_weight,
    mean_of_samples,
    noisy,
    of_tokens,
    sampling_noise,
)
from megadit.train.objectives.losses import LossSums, weighted_error
from megadit.train.objectives.networks import Networks


def diffusion_nft(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """Negative-aware fine-tuning (DiffusionNFT: Zheng et al., arXiv 2509.16117, eq. 5): lambda(sigma)
    (r |D+ - x0|^2 + (1 - r) |D- - x0|^2), with D+- = D_old +- beta (D - D_old).

    x0 is a video of the policy D_old, the teacher, and r its optimality probability, 0 to 1. D is linear in the
    velocity, so this is the paper's loss for any parameterization. For r = 1/2 the policy is the minimum; with beta = 1
    and r = 1 this is the denoising loss. Model chunks before the last return activations [2 S, 1, D].
    """
    sigma_G = draw_sigma(batch.noise_key_G, networks.config.diffusion, batch.layout)
    x_S1P, x0_S1P = noisy(networks, batch, sigma_G), batch.tokens_S1P
    found = _with_teachers(networks, batch, x_S1P, sigma_G)
    if isinstance(found, Tensor):
        return found
    D_S1P, old_S1P = found
    step_S1P = networks.config.train.distill.nft_beta * (D_S1P - old_S1P)
    weight_G, r_G = loss_weight(networks, sigma_G), batch.extra_G["reward"]
    positive = weighted_error(batch, old_S1P + step_S1P, x0_S1P, r_G * weight_G)
    negative = weighted_error(batch, old_S1P - step_S1P, x0_S1P, (1 - r_G) * weight_G)
    error = weighted_error(batch, D_S1P.detach(), x0_S1P, weight_G).error
    return LossSums(positive.objective + negative.objective, positive.weighted + negative.weighted, error)


def dpo(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """Direct preference optimization (Diffusion-DPO: Wallace et al., arXiv 2311.12908, eq. 14): softplus(beta
    lambda(sigma) m), where m = (e_w - e_w_ref) - (e_l - e_l_ref) for the errors e = |D - x0|^2 of the chosen and of the
    rejected video of a pair, which have the same noise, and of the teacher, the reference.

    The gradient is that of the sum of errors with weights +-beta lambda sigmoid(beta lambda m); LossSums.error is 1
    where m > 0: the student prefers the rejected video. Model chunks before the last return activations [2 S, 1, D].
    """
    sigma_G = draw_sigma(batch.noise_key_G, networks.config.diffusion, batch.layout)
    x_S1P, x0_S1P = noisy(networks, batch, sigma_G), batch.tokens_S1P
    found = _with_teachers(networks, batch, x_S1P, sigma_G)
    if isinstance(found, Tensor):
        return found
    (D_S1P, reference_S1P), sign_G = found, batch.extra_G["preference"]
    with torch.no_grad():
        more_S = ((D_S1P - x0_S1P).square() - (reference_S1P - x0_S1P).square()).mean(dim=(1, 2))
        more_G = sign_G * mean_of_samples(networks, batch, more_S)
        other_G = torch.where(sign_G > 0, more_G.roll(-1), more_G.roll(1))  # pairs are adjacent, the chosen one first
        beta_G = networks.config.train.distill.dpo_beta * loss_weight(networks, sigma_G)
        margin_G = more_G + other_G
        loss_G = F.softplus(beta_G * margin_G)
        weight_G = 2 * sign_G * beta_G * torch.sigmoid(beta_G * margin_G)  # both videos count the loss of their pair
    return _surrogate(batch, weighted_error(batch, D_S1P, x0_S1P, weight_G).objective, loss_G, margin_G > 0)


def flow_grpo(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """Group-relative policy optimization (Flow-GRPO: Liu et al., arXiv 2505.05470, eq. 5, without the KL term):
    -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), where A = 2 reward - 1 and r is the ratio of the likelihoods of a
    step of sampling under the student and under the policy that took it, the teacher.

    A step of the sampler `euler` with eta > 0 goes from x to rho x + (1 - rho) D(x; sigma) + sigma_up n, where
    rho = sigma_down / sigma. With y = D_old + s n and s = sigma_up / (1 - rho), its log-likelihood is
    -|y - D|^2 / (2 s^2); as there, the mean over all numbers of the latents is taken. `tokens_S1P` are x, and n is
    drawn again by the video's seed. LossSums.error is 1 where r is clipped.
    """
    extra_G, x_S1P = batch.extra_G, batch.tokens_S1P
    is_padding_G = extra_G["sigma"] == 0
    sigma_G = torch.where(is_padding_G, 1.0, extra_G["sigma"])
    s_G = torch.where(is_padding_G, 1.0, extra_G["sigma_up"] / (1 - extra_G["sigma_down"] / sigma_G))
    found = _with_teachers(networks, batch, x_S1P, sigma_G)
    if isinstance(found, Tensor):
        return found
    D_S1P, old_S1P = found
    with torch.no_grad():
        noise_S1P = sampling_noise(batch, networks.config.model, Stream.STEP + extra_G["noise_index"])
        y_S1P = old_S1P + of_tokens(batch, s_G) * noise_S1P
        nearer_S = ((y_S1P - old_S1P).square() - (y_S1P - D_S1P).square()).mean(dim=(1, 2))
        r_G = (mean_of_samples(networks, batch, nearer_S) / (2 * s_G.square())).exp()
        A_G, clip = 2 * extra_G["reward"] - 1, networks.config.train.distill.grpo_clip
        clipped_G = r_G.clamp(1 - clip, 1 + clip) * A_G
        is_clipped_G = clipped_G < r_G * A_G
        weight_G = torch.where(is_clipped_G, 0.0, r_G * A_G / (2 * s_G.square()))
        loss_G = -torch.minimum(r_G * A_G, clipped_G)
    return _surrogate(batch, weighted_error(batch, D_S1P, y_S1P, weight_G).objective, loss_G, is_clipped_G)


def _surrogate(batch: PackedBatch, of_errors: Tensor, loss_G: Tensor, is_counted_G: Tensor) -> LossSums:
    """Sums over target tokens of their samples' losses, with the gradient of `of_errors`; LossSums.error counts the
    tokens of some samples."""
    tensors = batch.layout.on(loss_G.device)
    target_S = tensors.is_target_S
    loss = (loss_G[tensors.segment_of_token_S] * target_S).sum()
    error = (is_counted_G[tensors.segment_of_token_S] & target_S).sum().float()
    return LossSums(of_errors - of_errors.detach() + loss, loss, error)


def _with_teachers(
    networks: Networks, batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor
) -> tuple[Tensor, Tensor] | Tensor:
    """D(x; sigma) [S, 1, P] of student and teacher; or activations of both, which pipeline stages send as one tensor
    [2 S, 1, D]."""
    student, both_S1D = networks.model, networks.model.before
    if both_S1D is not None:
        student.before, networks.teachers_chunk.before = both_S1D.chunk(2)
    D_S1P = student.denoise(batch, x_S1P, sigma_G)
    with torch.no_grad():
        teachers_S1P = networks.teacher(batch, x_S1P, sigma_G)
    return (D_S1P, teachers_S1P) if student.dit.part.is_last else torch.cat([D_S1P, teachers_S1P])
