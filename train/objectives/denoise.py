"""The training objective on packs (Karras et al., arXiv 2206.00364, eq. 2), in float32, of any parameterization.

Every sample of a pack has its own noise level. Noise and noise level are functions of the sample's key alone, so that
the same sample is trained in the same way in any pack, on any rank and after any resume.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megadit.models.diffusion.parameterization import denoise_packed, parameterization_of
from megadit.models.networks.dit import DiT
from megadit.train.data.packs.packed_batch import PackedBatch


class LossSums(NamedTuple):
    """Sums over the tokens of a micro-batch that are to be predicted, of a mean over P. Scalars, float32."""

    objective: Tensor
    """Minimised value: the weighted loss, divided by the learned uncertainty where there is one."""
    weighted: Tensor
    """lambda(sigma) |D - x0|^2: 1 for a network that knows nothing, at every noise level. Of a classifier the
    cross-entropy, of what matches images and texts its loss."""
    error: Tensor
    """|D - x0|^2. Of a classifier 1 where another class is the likeliest, else 0; so, of what matches, where another
    text is."""


class Uncertainty(nn.Module):
    """u(sigma), the logarithm of the loss to expect at a noise level (EDM2, arXiv 2312.02696, section 3.1).

    A linear function of Fourier features of c_noise, zero at the start. It is trained with the network and thrown away.
    """

    def __init__(self, num_features: int = 128) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        # no buffers: these stay float32 whatever the precision of the parameters
        self._frequency = 2 * math.pi * torch.randn(num_features, generator=generator, device="cpu")
        self._phase = 2 * math.pi * torch.rand(num_features, generator=generator, device="cpu")
        self.linear = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, c_noise_G: Tensor) -> Tensor:
        self._frequency, self._phase = (x.to(c_noise_G.device) for x in (self._frequency, self._phase))  # sent once
        frequency, phase = self._frequency, self._phase
        features = math.sqrt(2) * torch.cos(c_noise_G.float()[:, None] * frequency + phase)
        # divided by sqrt(features), or one step of Adam at a large rate would move u by more than its range
        return (features @ self.linear.weight.float().T)[:, 0] / math.sqrt(len(frequency))


def weighted_error(
    batch: PackedBatch, D_S1P: Tensor, target_S1P: Tensor, weight_G: Tensor, u_G: Tensor | None = None
) -> LossSums:
    """weight |D - target|^2 of the tokens to be predicted; with a learned uncertainty u the objective is that of EDM2
    (arXiv 2312.02696, eq. 21): weight / exp(u) |D - target|^2 + u."""
    tensors = batch.layout.on(weight_G.device)
    segment_S, is_target_S = tensors.segment_of_token_S, tensors.is_target_S
    error_S = (D_S1P - target_S1P).square().mean(dim=(1, 2)) * is_target_S
    objective_S = weighted_S = weight_G[segment_S] * error_S
    if u_G is not None:
        u_S = u_G[segment_S] * is_target_S
        objective_S = weighted_S / u_S.exp() + u_S
    sums = (batch.loss_weight_G[segment_S] * objective_S).sum(), weighted_S.detach().sum(), error_S.detach().sum()
    return LossSums(*sums)


def edm_loss(
    dit: DiT,
    batch: PackedBatch,
    sigma_G: Tensor,
    noise_S1P: Tensor,
    uncertainty: Uncertainty | None = None,
    before: Tensor | None = None,
) -> LossSums | Tensor:
    """lambda(sigma) |D(x0 + sigma n; sigma) - x0|^2 (eq. 2 and table 1). Of a part of the network, which takes
    activations (`before` [S, 1, D]) and gives its own: see `denoise_packed`.
    """
    parameterization = parameterization_of(dit.config)
    x_S1P = batch.noisy(sigma_G, noise_S1P, dit.config.conditioning_noise)
    D_S1P = denoise_packed(dit, x_S1P, sigma_G, **batch.conditions, before=before)
    if not dit.part.is_last:
        return D_S1P
    u_G = None if uncertainty is None else uncertainty(parameterization.scalings(sigma_G).c_noise)
    return weighted_error(batch, D_S1P, batch.tokens_S1P, parameterization.loss_weight(sigma_G), u_G)
