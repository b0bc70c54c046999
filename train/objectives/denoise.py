"""Denoising objective on packs (Karras et al., arXiv 2206.00364, eq. 2), in float32, for any parameterization.

Every sample of a pack has its own noise level. Noise and noise level depend on the sample's key alone, and so are the
same in any pack, on any rank and after any resume.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

import torch
from torch import Tensor

from megadit.models.diffusion.parameterization import denoise_packed, parameterization_of
from megadit.models.networks.dit import DiT
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.heads import Uncertainty
from megadit.train.objectives.networks import LossSums, Networks
from megadit.train.objectives.noise_levels import draw_sigma, token_noise


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


def edm_loss(
    dit: DiT,
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
    parameterization = parameterization_of(dit.config)
    x_S1P = batch.noisy(sigma_G, noise_S1P, dit.config.conditioning_noise)
    D_S1P = denoise_packed(dit, x_S1P, sigma_G, **batch.conditions, before=before)
    if not dit.part.is_last:
        return D_S1P
    u_G = None if uncertainty is None else uncertainty(parameterization.scalings(sigma_G).c_noise)
    return weighted_error(batch, D_S1P, batch.tokens_S1P, parameterization.loss_weight(sigma_G), u_G)
