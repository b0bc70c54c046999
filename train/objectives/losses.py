"""The EDM loss of a pack (arXiv 2206.00364, eq. 2), in float32, for any parameterization.

Every sample of a pack has its own noise level.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megadit.models.diffusion.parameterization import PackedNetwork, denoise_packed, parameterization_of
from megadit.train.data.packs.packed_batch import PackedBatch


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch, of means over P; scalars, float32."""

    objective: Tensor
    """Minimised value: the weighted loss, divided by the learned uncertainty if there is one."""
    weighted: Tensor
    """lambda(sigma) |D - x0|^2, about 1 for an untrained network at every noise level; classifiers: cross-entropy;
    image-text matching: its loss."""
    error: Tensor
    """|D - x0|^2; classifiers: 1 if another class is likelier, else 0; image-text matching: 1 if another text is."""


class Uncertainty(nn.Module):
    """u(sigma), the logarithm of the loss to expect at a noise level (EDM2, arXiv 2312.02696, section 3.1).

    A linear function of Fourier features of ln(sigma) / 4, which is EDM's c_noise, in every parameterization: those of
    DDPM's steps, from 0 to 999, would not be smooth. Initially zero; trained with the network and then discarded.
    """

    def __init__(self, num_features: int = 128) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        # not buffers: these stay float32 whatever the precision of the parameters
        self._frequency = 2 * math.pi * torch.randn(num_features, generator=generator, device="cpu")
        self._phase = 2 * math.pi * torch.rand(num_features, generator=generator, device="cpu")
        self.linear = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, sigma_G: Tensor) -> Tensor:
        self._frequency, self._phase = (x.to(sigma_G.device) for x in (self._frequency, self._phase))  # copied once
        frequency, phase = self._frequency, self._phase
        features = math.sqrt(2) * torch.cos(sigma_G.float().log()[:, None] / 4 * frequency + phase)
        # divided by sqrt(features), because one step of Adam at a large rate could move u by more than its range
        return (features @ self.linear.weight.float().T)[:, 0] / math.sqrt(len(frequency))


def edm_loss(
    dit: PackedNetwork,
    batch: PackedBatch,
    sigma_G: Tensor,
    noise_S1P: Tensor,
    uncertainty: Uncertainty | None = None,
    before: Tensor | None = None,
) -> LossSums | Tensor:
    """lambda(sigma) |D(x0 + sigma n; sigma) - x0|^2 (eq. 2 and table 1).

    Model chunks before the last return activations, from those of the chunk before (`before` [S, 1, D]): see
    `denoise_packed`.
    """
    x_S1P = batch.noisy(sigma_G, noise_S1P, dit.config.conditioning_noise)
    D_S1P = denoise_packed(dit, x_S1P, sigma_G, **batch.conditions, before=before)
    if not dit.part.is_last:
        return D_S1P
    u_G = None if uncertainty is None else uncertainty(sigma_G)
    return weighted_error(batch, D_S1P, batch.tokens_S1P, parameterization_of(dit.config).loss_weight(sigma_G), u_G)


def weighted_error(
    batch: PackedBatch, D_S1P: Tensor, target_S1P: Tensor, weight_G: Tensor, u_G: Tensor | None = None
) -> LossSums:
    """weight |D - target|^2 over the target tokens; with a learned uncertainty u the objective is EDM2's (arXiv
    2312.02696, eq. 21): weight / exp(u) |D - target|^2 + u."""
    tensors = batch.layout.on(weight_G.device)
    segment_S, is_target_S = tensors.segment_of_token_S, tensors.is_target_S
    error_S = (D_S1P - target_S1P).square().mean(dim=(1, 2)) * is_target_S
    objective_S = weighted_S = weight_G[segment_S] * error_S
    if u_G is not None:
        u_S = u_G[segment_S] * is_target_S
        objective_S = weighted_S / u_S.exp() + u_S
    sums = (batch.loss_weight_G[segment_S] * objective_S).sum(), weighted_S.detach().sum(), error_S.detach().sum()
    return LossSums(*sums)
