"""Discriminator head on a critic's features, for noised real and generated samples (DMD2, arXiv 2405.14867, section
4.3).

It classifies each token separately (tokens have attended to their whole sample), so that its loss is a sum over tokens,
like the others.

Shapes: S video tokens, P patch dim, D width, G segments of a pack.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import derived_keys
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.networks.initialize import initial_value
from megadit.train.config.schema import DiffusionConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import LossSums, weighted_error
from megadit.train.objectives.noise_levels import draw_sigma, token_noise

HIDDEN = 256
Denoise = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(pack, x [S, 1, P], sigma_G) -> D(x; sigma) [S, 1, P] with the text and conditioning of the pack; its own clean
tokens are not used."""
Discriminator = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(pack, x [S, 1, P], sigma_G) -> logits [S] that each token is real."""


def head_parameters(width: int) -> int:
    """Number of parameters of the head of a network of this width."""
    return HIDDEN * (width + 2) + 1


class Adversary(nn.Module):
    """Logits from features in the middle of a network: norm, linear, SiLU, linear, in float32.

    Initially all logits are 0. It is trained with the critic and then discarded.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, 1)
        self.linear_1.weight.data.copy_(initial_value("adversary.linear_1.weight", self.linear_1.weight.shape, seed))
        for parameter in (self.linear_1.bias, *self.linear_2.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x_S1D: Tensor) -> Tensor:
        """[S, 1, D] -> [S]."""
        h_SD = F.layer_norm(x_S1D[:, 0].float(), x_S1D.shape[-1:])
        for layer in (self.linear_1, self.linear_2):
            h_SD = F.linear(F.silu(h_SD) if layer is self.linear_2 else h_SD, layer.weight.float(), layer.bias.float())
        return h_SD[:, 0]


def critic_loss(
    denoise: Denoise,
    batch: PackedBatch,
    *,
    discriminator: Discriminator,
    diffusion: DiffusionConfig,
    model: DiTConfig,
    weight: float,
) -> LossSums:
    """Loss of a critic with a discriminator head: the denoising loss of the student's samples (`edm_loss`), plus
    `weight` times -log P(generated | generated) - log P(real | real) at the same noise levels, with the pack's real
    samples."""
    sigma_G = draw_sigma(batch.noise_key_G, diffusion, batch.layout)
    real = replace(batch, tokens_S1P=batch.real_S1P, noise_key_G=derived_keys(batch.noise_key_G, 0))
    x_S1P, of_real_S1P = (each.noisy(sigma_G, token_noise(each), model.conditioning_noise) for each in (batch, real))
    weight_G = parameterization_of(model).loss_weight(sigma_G)
    sums = weighted_error(batch, denoise(batch, x_S1P, sigma_G), batch.tokens_S1P, weight_G)
    reported_S = F.softplus(discriminator(batch, x_S1P, sigma_G)) + F.softplus(
        -discriminator(real, of_real_S1P, sigma_G)
    )
    return sums._replace(objective=sums.objective + weight * _sum_of_targets(batch, reported_S))


def towards_real(discriminator: Discriminator, batch: PackedBatch, y_S1P: Tensor, sigma_G: Tensor) -> Tensor:
    """Gradient of -log P(y is real) with respect to y, [S, 1, P]; parameters of the critic get none."""
    with torch.enable_grad():
        y_S1P = y_S1P.detach().requires_grad_()
        loss = _sum_of_targets(batch, F.softplus(-discriminator(batch, y_S1P, sigma_G)))
        return torch.autograd.grad(loss, y_S1P)[0]


def _sum_of_targets(batch: PackedBatch, value_S: Tensor) -> Tensor:
    """Sum over the target tokens, weighted as the losses of their samples."""
    tensors = batch.layout.on(value_S.device)
    return (value_S * tensors.is_target_S * batch.loss_weight_G[tensors.segment_of_token_S]).sum()
