"""Adversarial losses of a critic's discriminator head, for noised real and generated samples (DMD2, arXiv 2405.14867,
section 4.3).

The head classifies each token separately (tokens have attended to their whole sample), so that its loss is a sum over
tokens, like the others.

Shapes: S video tokens, P patch dim, G segments of a pack.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.diffusion.noise import derived_keys
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import draw_sigma, loss_weight, noisy
from megadit.train.objectives.losses import LossSums, weighted_error
from megadit.train.objectives.networks import Discriminator, Networks


def critic_loss(networks: Networks, batch: PackedBatch) -> LossSums:
    """Loss of a critic with a discriminator head: the denoising loss of the student's samples (`edm_loss`), plus
    `train.distill.adversarial_weight` times -log P(generated | generated) - log P(real | real) at the same noise
    levels, with the pack's real samples."""
    config, critic = networks.config, networks.model
    sigma_G = draw_sigma(batch.noise_key_G, config.diffusion, batch.layout)
    real = replace(batch, tokens_S1P=batch.real_S1P, noise_key_G=derived_keys(batch.noise_key_G, 0))
    x_S1P, of_real_S1P = (noisy(networks, each, sigma_G) for each in (batch, real))
    D_S1P = critic.denoise(batch, x_S1P, sigma_G)
    sums = weighted_error(batch, D_S1P, batch.tokens_S1P, loss_weight(networks, sigma_G))
    reported_S = F.softplus(critic.discriminate(batch, x_S1P, sigma_G)) + F.softplus(
        -critic.discriminate(real, of_real_S1P, sigma_G)
    )
    tensors = batch.layout.on(reported_S.device)
    weight_S = batch.loss_weight_G[tensors.segment_of_token_S] * tensors.is_target_S
    objective = sums.objective + config.train.distill.adversarial_weight * (weight_S * reported_S).sum()
    return sums._replace(objective=objective)


def towards_real(discriminator: Discriminator, batch: PackedBatch, y_S1P: Tensor, sigma_G: Tensor) -> Tensor:
    """Gradient of -log P(y is real), summed over target tokens, with respect to y, [S, 1, P]; parameters of the critic
    get none."""
    with torch.enable_grad():
        y_S1P = y_S1P.detach().requires_grad_()
        reported_S = F.softplus(-discriminator(batch, y_S1P, sigma_G))
        return torch.autograd.grad((reported_S * batch.layout.on(y_S1P.device).is_target_S).sum(), y_S1P)[0]
