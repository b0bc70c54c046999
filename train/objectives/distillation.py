"""Objectives of distillation.

All treat networks as denoisers of packs, of any parameterization: x is x0 + sigma n (Karras et al., arXiv 2206.00364),
so a teacher may be an EDM or a flow model. Conditioning tokens stay unchanged. Random draws depend on the samples' keys
alone: they are the same in any pack, layout and after any resume.

Shapes: S video tokens, P patch dim, G segments of a pack (padding included).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import Stream, derived_keys, seed_key, uniform
from megadit.models.host_to_device import constant
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.adversary import towards_real
from megadit.train.objectives.denoise import (
    draw_sigma,
    loss_weight,
    mean_of_samples,
    noisy,
    of_tokens,
    sampling_noise,
    target_of,
)
from megadit.train.objectives.losses import LossSums, weighted_error
from megadit.train.objectives.networks import Denoise, Networks
from megadit.train.objectives.tangent import derivative

RHO = 7
"""Exponent that spaces the levels between two of a list (arXiv 2206.00364, eq. 5)."""
FEWEST_DIFFERENCE = 1e-4
"""Lower bound of the difference between teacher and student, by which a gradient is divided."""
LEAST_TANGENT = 0.1
"""c of arXiv 2410.11081, section 4: added to the root mean square by which a tangent is divided."""
SAMPLING_STEPS = 1
"""Random stream of the student's numbers of sampling steps, under the key of the run's seed."""


def guidance(networks: Networks, batch: PackedBatch) -> LossSums:
    """Guidance distillation: lambda(sigma) |D(x; sigma) - D_guided(x; sigma)|^2 (Meng et al., arXiv 2210.03142, eq.
    2)."""
    sigma_G = draw_sigma(batch.noise_key_G, networks.config.diffusion, batch.layout)
    x_S1P = noisy(networks, batch, sigma_G)
    target_S1P = networks.teacher(batch, x_S1P, sigma_G)
    weight_G = loss_weight(networks, sigma_G)
    return weighted_error(batch, networks.model.denoise(batch, x_S1P, sigma_G), target_S1P, weight_G)


def progressive(networks: Networks, batch: PackedBatch) -> LossSums:
    """Progressive distillation: one Euler step of the student matches `teacher_steps` of the teacher (Salimans and Ho,
    arXiv 2202.00512, algorithm 2). The loss is that of the corresponding x0, weighted by lambda(sigma).
    """
    sigma_G, next_G = _drawn_interval(batch, networks.config.train.distill.sigmas)
    x_S1P = noisy(networks, batch, sigma_G)
    y_S1P = _teacher_steps(networks, batch, x_S1P, sigma_G, next_G, networks.config.train.distill.teacher_steps)
    ratio_S11 = of_tokens(batch, next_G / sigma_G)
    target_S1P = (y_S1P - ratio_S11 * x_S1P) / (1 - ratio_S11)
    weight_G = loss_weight(networks, sigma_G)
    return weighted_error(batch, networks.model.denoise(batch, x_S1P, sigma_G), target_S1P, weight_G)


def consistency(networks: Networks, batch: PackedBatch) -> LossSums:
    """Consistency distillation: the student's outputs at both ends of a step of the teacher's ODE agree; for the last
    step the target is the teacher's x0.

    |D(x; sigma) - stopgrad D(x'; sigma')|^2 / (sigma - sigma') (Song et al., arXiv 2303.01469, algorithm 2; weight and
    target without EMA: Song and Dhariwal, 2310.14189, sections 3.2 and 3.3).
    """
    sigma_G, next_G = _drawn_interval(batch, networks.config.train.distill.sigmas)
    x_S1P = noisy(networks, batch, sigma_G)
    y_S1P = _teacher_steps(networks, batch, x_S1P, sigma_G, next_G, 1)
    is_end_S11 = of_tokens(batch, next_G) == 0
    with torch.no_grad():
        target_S1P = networks.model.denoise(batch, y_S1P, torch.where(next_G == 0, sigma_G, next_G))
    target_S1P = torch.where(is_end_S11, y_S1P, target_S1P)  # the network is not evaluated at sigma = 0
    return weighted_error(batch, networks.model.denoise(batch, x_S1P, sigma_G), target_S1P, 1 / (sigma_G - next_G))


def continuous_consistency(networks: Networks, batch: PackedBatch) -> LossSums:
    """Continuous-time consistency distillation (sCM: Lu and Song, arXiv 2410.11081, algorithm 1), for any
    parameterization.

    With t = arctan(sigma / sigma_d) and x_t = cos(t) x, TrigFlow's network is F = (cos(t) x_t - D) / (sin(t) sigma_d),
    and EDM's is -F. As cos(t) sin(t) d/dt is d / d ln(sigma), the tangent along the teacher's ODE is
    g = cos(t) dD/dt = (dD / d ln(sigma)) / sin(t). In the first steps it is blended with the stable
    cos(t)^2 (D - D_teacher) / sin(t) (tangent warm-up); it is scaled to less than unit mean square (tangent
    normalization); and |F - stopgrad(F) - g|^2 is weighted by the learned uncertainty with
    `diffusion.learned_uncertainty` (adaptive weighting).
    """
    sigma_G, x_S1P, teacher_S1P, slope_S1P = _slope(networks, batch)
    D_S1P = networks.model.denoise(batch, x_S1P, sigma_G)
    sigma_d, warmup = networks.config.model.sigma_data, networks.config.train.distill.tangent_warmup
    cos2_G, sin_G = sigma_d**2 / (sigma_G**2 + sigma_d**2), sigma_G / (sigma_G**2 + sigma_d**2).sqrt()
    r = min(1.0, networks.step / warmup) if warmup else 1.0
    stable_S1P = of_tokens(batch, cos2_G) * (D_S1P.detach() - teacher_S1P)
    g_S1P = (r * slope_S1P + (1 - r) * stable_S1P) / of_tokens(batch, sin_G)
    rms_G = mean_of_samples(networks, batch, g_S1P.square().mean(dim=(1, 2))).sqrt()
    g_S1P = g_S1P / of_tokens(batch, rms_G + LEAST_TANGENT)
    target_S1P = D_S1P.detach() - of_tokens(batch, sigma_d * sin_G) * g_S1P
    uncertainty = networks.model.uncertainty
    u_G = None if uncertainty is None else uncertainty(sigma_G)
    return weighted_error(batch, D_S1P, target_S1P, 1 / (sigma_d * sin_G) ** 2, u_G)


def consistency_limit(networks: Networks, batch: PackedBatch) -> LossSums:
    """Limit of `consistency` for adjacent levels: its gradient is that of |D - stopgrad(D - dD/dsigma)|^2, where
    dD/dsigma is along the teacher's ODE (Song et al., arXiv 2303.01469, appendix B.1, for squared distances).
    """
    sigma_G, x_S1P, _, slope_S1P = _slope(networks, batch)
    D_S1P = networks.model.denoise(batch, x_S1P, sigma_G)
    target_S1P = D_S1P.detach() - slope_S1P / of_tokens(batch, sigma_G)
    return weighted_error(batch, D_S1P, target_S1P, torch.ones_like(sigma_G))


def regression(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """Regression to the teacher's videos x0 (`megadit prepare trajectories`): lambda(sigma) |D(x; sigma) - x0|^2; or
    activations [S, 1, D].

    At the first level, x is the noise from which the teacher generated x0 (Luhman and Luhman, arXiv 2101.02388, eq. 7);
    at lower levels, which the sampler `consistency` reaches by adding noise, x is x0 with new noise.
    """
    sigma_G, _ = _drawn_interval(batch, networks.config.train.distill.sigmas)
    first = networks.config.train.distill.sigmas[0]
    start = replace(batch, tokens_S1P=target_of(batch, torch.zeros_like(batch.tokens_S1P)))
    x_S1P = start.noisy(sigma_G, sampling_noise(batch, networks.config.model), networks.config.model.conditioning_noise)
    x_S1P = torch.where(of_tokens(batch, sigma_G) == first, x_S1P, noisy(networks, batch, sigma_G))
    D_S1P = networks.model.denoise(batch, x_S1P, sigma_G)
    if not networks.model.dit.part.is_last:
        return D_S1P
    return weighted_error(batch, D_S1P, batch.tokens_S1P, loss_weight(networks, sigma_G))


def distribution_matching(networks: Networks, batch: PackedBatch) -> LossSums:
    """Distribution matching (DMD2): the gradient with respect to the student's x0 is
    (D_critic - D_teacher) / mean |x0 - D_teacher|, at x0 with new noise (Yin et al., arXiv 2311.18828, eqs. 7 and 8).

    x0 is the result of `calls` sampling steps of the student (2405.14867, section 4.4); samples of the data set provide
    text and conditioning alone. With a discriminator, `adversarial_weight` times the gradient of
    -log P(x0 with noise is real) is added (section 4.3).
    """
    x_S1P, sigma_G = student_state(networks, batch, sampling_steps(networks.config, networks.step))
    x0_S1P = target_of(batch, networks.model.denoise(batch, x_S1P, sigma_G))
    with torch.no_grad():
        fake = made_batch(batch, x0_S1P.detach(), number=1)
        tau_G = draw_sigma(fake.noise_key_G, networks.config.diffusion, batch.layout)
        y_S1P = noisy(networks, fake, tau_G)
        real_S1P, fake_S1P = networks.teacher(batch, y_S1P, tau_G), networks.critic(batch, y_S1P, tau_G)
        scale_G = mean_of_samples(networks, batch, (fake.tokens_S1P - real_S1P).abs().mean(dim=(1, 2)))
        step_S1P = (fake_S1P - real_S1P) / of_tokens(batch, scale_G.clamp(min=FEWEST_DIFFERENCE))
        if (weight := networks.config.train.distill.adversarial_weight) > 0:  # only errors are means over P
            step_S1P += weight * y_S1P.shape[-1] * towards_real(networks.discriminator, batch, y_S1P, tau_G)
        target_S1P = fake.tokens_S1P - step_S1P / 2
    return weighted_error(batch, x0_S1P, target_S1P, torch.ones_like(tau_G))


@torch.no_grad()
def student_state(networks: Networks, batch: PackedBatch, calls: int) -> tuple[Tensor, Tensor]:
    """Input (x [S, 1, P], sigma_G) of the last of `calls` sampling steps of the student, which starts from noise and
    adds new noise of the next level to each x0, as the sampler `consistency` does."""
    x0_S1P = target_of(batch, torch.zeros_like(batch.tokens_S1P))
    for call, sigma in enumerate(networks.config.train.distill.sigmas[:calls]):
        sigma_G = torch.full_like(batch.fps_G, sigma)
        at_level = replace(batch, tokens_S1P=x0_S1P)
        x_S1P = noisy(networks, at_level, sigma_G, Stream.NOISE if call == 0 else Stream.STEP + call)
        if call + 1 < calls:
            x0_S1P = target_of(batch, networks.model.denoise(batch, x_S1P, sigma_G))
    return x_S1P, sigma_G


@torch.no_grad()
def generated(networks: Networks, batch: PackedBatch, *, step: int, update: int) -> PackedBatch:
    """The pack with samples of the student in place of its own, for update `update` (1, 2, ...) of the critic before
    optimizer step `step`."""
    batch = with_scale(batch, networks.config.model)
    own = made_batch(batch, batch.tokens_S1P, number=2 * update)
    x_S1P, sigma_G = student_state(networks, own, sampling_steps(networks.config, step, update))
    x0_S1P = target_of(batch, networks.model.denoise(batch, x_S1P, sigma_G))
    made = made_batch(batch, x0_S1P, number=2 * update + 1)
    return replace(made, real_S1P=batch.tokens_S1P)


def sampling_steps(config: RunConfig, step: int, update: int = 0) -> int:
    """Number of sampling steps of the student, drawn for all samples and ranks of an optimizer step: for its own update
    (0), or for one of those of the critic before it (1, 2, ...)."""
    key_R, position_R = torch.tensor([seed_key(config.train.seed)]), torch.tensor([step])
    number = uniform(key_R, position_R, update + 1, stream=SAMPLING_STEPS)[0, update].item()
    return 1 + int(number * len(config.train.distill.sigmas))


def with_scale(batch: PackedBatch, model: DiTConfig) -> PackedBatch:
    """The pack with a guidance scale for each sample, drawn uniformly by its key, if the student is guidance-distilled
    (Meng et al., arXiv 2210.03142, section 3.2)."""
    if model.guidance_embedding_range is None:
        return batch
    low, high = model.guidance_embedding_range
    number_G = uniform(batch.noise_key_G, torch.zeros_like(batch.noise_key_G), 1, stream=Stream.GUIDANCE)[:, 0]
    return replace(batch, guidance_G=low + (high - low) * number_G)


def made_batch(batch: PackedBatch, x0_S1P: Tensor, *, number: int) -> PackedBatch:
    """The pack with other clean tokens [S, 1, P] and, depending on `number` (1, 2, ...), other noise and noise
    levels."""
    return replace(batch, tokens_S1P=x0_S1P, noise_key_G=derived_keys(batch.noise_key_G, number))


def _drawn_interval(batch: PackedBatch, sigmas: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """(sigma_G, the next lower one) of a list that ends in 0, drawn for each sample by its key."""
    levels = constant((*sigmas, 0.0), batch.fps_G.device)
    number_G = uniform(batch.noise_key_G, torch.zeros_like(batch.noise_key_G), 1, stream=Stream.LEVEL)[:, 0]
    index_G = (number_G * len(sigmas)).long()
    return levels[index_G], levels[index_G + 1]


@torch.no_grad()
def _teacher_steps(
    networks: Networks, batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor, next_G: Tensor, count: int
) -> Tensor:
    """x at `next_G` after `count` Euler steps of the teacher, evenly spaced in sigma^(1/rho)."""
    start_G, stop_G = sigma_G ** (1 / RHO), next_G ** (1 / RHO)
    for step in range(1, count + 1):
        low_G = next_G if step == count else (start_G + step / count * (stop_G - start_G)) ** RHO
        x0_S1P = target_of(replace(batch, tokens_S1P=x_S1P), networks.teacher(batch, x_S1P, sigma_G))
        x_S1P = x0_S1P + of_tokens(batch, low_G / sigma_G) * (x_S1P - x0_S1P)
        sigma_G = low_G
    return x_S1P


@torch.no_grad()
def _slope(networks: Networks, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sigma_G, x, D_teacher, dD / d ln(sigma)), all but the first [S, 1, P]: at training noise levels, the derivative
    of the student's output along the teacher's ODE (`tangent.derivative`)."""
    sigma_G = draw_sigma(batch.noise_key_G, networks.config.diffusion, batch.layout)
    x_S1P = noisy(networks, batch, sigma_G)
    teacher_S1P = networks.teacher(batch, x_S1P, sigma_G)
    direction_S1P = x_S1P - target_of(replace(batch, tokens_S1P=x_S1P), teacher_S1P)
    asked = partial(networks.model.denoise, batch)
    return sigma_G, x_S1P, teacher_S1P, derivative(asked, (x_S1P, sigma_G), (direction_S1P, sigma_G))


def guided(denoise: Denoise, scale: float) -> Denoise:
    """D(no text) + scale (D(text) - D(no text)) (arXiv 2207.12598); the conditioning is the same in both.

    For a guidance-distilled student the scales of the samples come from the pack.
    """

    def denoise_guided(batch: PackedBatch, x_S1P: Tensor, sigma_G: Tensor) -> Tensor:
        D_S1P = denoise(batch, x_S1P, sigma_G)
        if batch.guidance_G is None and scale == 1:
            return D_S1P
        base_S1P = denoise(batch.without_text(), x_S1P, sigma_G)
        scales = scale if batch.guidance_G is None else of_tokens(batch, batch.guidance_G)
        return base_S1P + scales * (D_S1P - base_S1P)

    return denoise_guided
