"""What each objective asks of a student, on denoisers whose answers are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megadit.models.diffusion.noise import latent_noise
from megadit.models.diffusion.parameterization import ddpm_sigmas, denoise_packed, parameterization_of
from megadit.models.networks.dit import WHOLE_NETWORK
from megadit.models.networks.embeddings import patchify
from megadit.train.config.schema import DiffusionConfig
from megadit.train.objectives.denoise import draw_sigma, of_tokens
from megadit.train.objectives.distillation import (
    generated,
    guided,
    sampling_steps,
    student_state,
)
from megadit.train.objectives.registry import OBJECTIVES, OF_STUDENTS
from tests.train.objectives.exact import DEVIATION, MEAN, MODEL, networks, of_normal, pack, sigma_of


def loss(objective, *of, batch=None, **settings):
    """The loss of (student, teacher, critic)."""
    return OBJECTIVES[objective](networks(objective, *of, **settings), pack() if batch is None else batch)


TWO_LEVELS = {"sigmas": (20.0, 2.0)}
assert sampling_steps(networks("regression", **TWO_LEVELS).config, step=1) == 2
TEACHER = of_normal(MEAN, DEVIATION)


class RawNetwork:
    """The network of an exact denoiser of normal data, which predicts what its parameterization has it predict: the
    expected noise (`vp`), or noise minus x0 (`flow`), of its own input, at the level that it is told."""

    part, dtype = WHOLE_NETWORK, torch.float32

    def __init__(self, parameterization, mean=MEAN):
        self.config, self.mean = replace(MODEL, parameterization=parameterization), mean

    def forward_packed(self, z_S1P, c_noise_R, text_L1E, fps_G, layout, **more):
        told = c_noise_R.double()[layout.on("cpu").row_of_token_S][:, None, None]
        if self.config.parameterization == "flow":  # z = (1 - t) x0 + t n
            of_data, of_noise = 1 - told, told
        else:  # z = a x0 + s n, s / a = sigma of DDPM's step
            sigmas = ddpm_sigmas().log().numpy()
            sigma = torch.from_numpy(np.exp(np.interp(told.numpy(), np.arange(len(sigmas)), sigmas)))
            of_data = 1 / (1 + sigma**2).sqrt()
            of_noise = sigma * of_data
        ratio = (z_S1P - of_data * self.mean) / (of_data**2 * DEVIATION**2 + of_noise**2)
        noise, x0 = of_noise * ratio, self.mean + of_data * DEVIATION**2 * ratio
        return (noise - x0 if self.config.parameterization == "flow" else noise).float()


def of_network(parameterization, mean=MEAN):
    dit = RawNetwork(parameterization, mean)
    return lambda batch, x_S1P, sigma_G: denoise_packed(dit, x_S1P, sigma_G, **batch.conditions)


TEACHERS = {"edm": TEACHER, "flow": of_network("flow"), "vp": of_network("vp")}
"""The same denoiser, through networks that predict other things."""
of_every_kind = pytest.mark.parametrize("kind", TEACHERS)


@of_every_kind
def test_networks_of_every_kind_are_one_denoiser(kind):
    batch, sigma_G = pack(), torch.tensor([3.0, 0.2, 1.0])
    found = TEACHERS[kind](batch, batch.tokens_S1P, sigma_G)
    torch.testing.assert_close(found, TEACHER(batch, batch.tokens_S1P, sigma_G), rtol=1e-5, atol=1e-5)


@of_every_kind
def test_one_that_answers_as_the_teacher_has_nothing_to_learn_of_guidance(kind):
    model = replace(MODEL, parameterization=kind)
    assert loss("guidance", TEACHER, TEACHERS[kind], model=model).error < 1e-9
    off = loss("guidance", lambda *asked: TEACHER(*asked) + 0.1, TEACHERS[kind], model=model)
    batch = pack()
    sigma_G = draw_sigma(batch.noise_key_G, DiffusionConfig(), batch.layout)
    weight_G = parameterization_of(model).loss_weight(sigma_G)
    assert off.error == pytest.approx(0.01 * 12, rel=1e-3)
    assert off.weighted == pytest.approx(0.01 * (4 * weight_G[0] + 8 * weight_G[1]).item(), rel=1e-3)


@of_every_kind
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_one_step_of_the_student_is_several_of_the_teacher(steps, kind):
    sigmas, rho = (10.0, 1.0), 7

    def student(batch, x_S1P, sigma_G):
        """The x0 from which Euler's one step leads to where the teacher's steps lead, by scalars alone."""
        x0_S1P = torch.zeros_like(x_S1P)
        for low, high in zip((1.0, 0.0), sigmas, strict=True):
            y_S1P, sigma = x_S1P, high
            for step in range(1, steps + 1):
                next_sigma = (high ** (1 / rho) + step / steps * (low ** (1 / rho) - high ** (1 / rho))) ** rho
                D_S1P = TEACHER(batch, y_S1P, torch.full_like(sigma_G, sigma))
                y_S1P, sigma = D_S1P + next_sigma / sigma * (y_S1P - D_S1P), next_sigma
            found_S1P = (y_S1P - low / high * x_S1P) / (1 - low / high)
            x0_S1P = torch.where(sigma_of(batch, sigma_G) == high, found_S1P, x0_S1P)
        return x0_S1P

    sums = loss("progressive", student, TEACHERS[kind], sigmas=sigmas, teacher_steps=steps)
    assert sums.error < 1e-8
    if steps > 1:
        assert loss("progressive", TEACHER, TEACHERS[kind], sigmas=sigmas, teacher_steps=steps).error > 1e-4


@of_every_kind
def test_the_end_of_the_ode_is_consistent(kind):
    """x0 = mean + (x - mean) deviation / sqrt(deviation^2 + sigma^2) is where the exact flow of normal data ends; small
    steps are near it."""

    def end(batch, x_S1P, sigma_G):
        sigma = sigma_of(batch, sigma_G)
        return MEAN + (x_S1P - MEAN) * DEVIATION / (DEVIATION**2 + sigma**2).sqrt()

    fine = tuple(torch.logspace(1, -2, 200).tolist())
    of_end, of_others = (loss("consistency", each, TEACHERS[kind], sigmas=fine).error for each in (end, TEACHER))
    assert of_end < 1e-2 * of_others
    for objective, most in (("continuous_consistency", 1e-4), ("consistency_limit", 1e-6)):
        settings = {} if objective == "consistency_limit" else {"tangent_warmup": 0}
        of_end, of_others = (
            loss(objective, each, TEACHERS[kind], **settings).weighted.item() for each in (end, TEACHER)
        )
        assert of_end < most * of_others, objective


@of_every_kind
def test_a_pair_is_weighted_as_its_students_parameterization_says(kind):
    batch, model, sigma = pack(), replace(MODEL, parameterization=kind), 20.0
    sums = loss("regression", lambda *_: batch.tokens_S1P + 1, None, batch=batch, model=model, sigmas=(sigma,))
    weight = parameterization_of(model).loss_weight(torch.tensor(sigma)).item()
    assert sums.error == 12 and sums.weighted == pytest.approx(12 * weight)


def test_a_pair_begins_with_the_noise_of_its_seed_and_ends_with_its_video():
    batch, first, seen = pack(), 20.0, []

    def student(batch, x_S1P, sigma_G):
        seen.append((x_S1P, sigma_of(batch, sigma_G)))
        return batch.tokens_S1P

    assert loss("regression", student, None, batch=batch, sigmas=(first, 2.0)).objective == 0
    assert loss("regression", lambda *_: batch.tokens_S1P + 1, None, batch=batch, sigmas=(first,)).error == 12
    loss("regression", student, None, batch=batch, sigmas=(first,))
    x_S1P, sigma_S11 = seen[-1]
    assert (sigma_S11 == first).all()
    for key, grid, tokens in ((33, (1, 2, 2), slice(0, 4)), (44, (2, 2, 2), slice(4, 12))):
        noise = latent_noise(torch.tensor([key]), (5, *grid))
        torch.testing.assert_close(x_S1P[tokens], first * patchify(noise, MODEL))
    levels = {sigma.item() for _, sigma_S11 in seen for sigma in sigma_S11.unique()}
    assert levels <= {first, 2.0}
    other = replace(batch, extra_G={"seed_key": batch.extra_G["seed_key"] + 1})
    loss("regression", student, None, batch=other, sigmas=(first,))
    assert not torch.equal(seen[-1][0], x_S1P)


@of_every_kind
def test_a_student_moves_to_where_the_teacher_is_and_stays_there(kind):
    """A student of one number: its mean. Beside a critic that knows it, the gradient leads to the teacher's."""

    def step(mean):
        shift = torch.tensor(mean, requires_grad=True)

        def student(batch, x_S1P, sigma_G):
            return shift + DEVIATION * x_S1P / sigma_of(batch, sigma_G)

        critic = of_normal(mean, DEVIATION) if kind == "edm" else of_network(kind, mean)
        loss("distribution_matching", student, TEACHERS[kind], critic, sigmas=(80.0,)).objective.backward()
        return shift.grad.item()

    assert step(MEAN - 0.5) < -0.1 and step(MEAN + 0.5) > 0.1, "against the gradient"
    assert abs(step(MEAN)) < 1e-5


def test_the_way_of_a_student_is_the_restart_samplers():
    batch, seen = pack(), []

    def student(batch, x_S1P, sigma_G):
        seen.append(sigma_G[0].item())
        return TEACHER(batch, x_S1P, sigma_G)

    of = networks("distribution_matching", student, TEACHER, sigmas=(80.0, 5.0, 0.5))
    states = {calls: student_state(of, batch, calls) for calls in (1, 2, 3)}
    assert seen == [80.0, 80.0, 5.0] and [sigma_G[0].item() for _, sigma_G in states.values()] == [80.0, 5.0, 0.5]
    is_sample = batch.layout.on("cpu").is_sample_S
    noises = [(states[1][0] / 80)[is_sample]]
    x0_S1P = TEACHER(batch, states[1][0], states[1][1])
    noises.append(((states[2][0] - x0_S1P) / 5)[is_sample])
    assert all(abs(noise.std() - 1) < 0.25 for noise in noises) and not torch.allclose(*noises)


def test_what_is_given_stays_and_bears_no_loss():
    batch = pack(given=((0, 2),))
    for objective in OF_STUDENTS:
        seen = []

        def student(batch, x_S1P, sigma_G, seen=seen):
            seen.append(x_S1P)
            return torch.full_like(x_S1P, 100.0, requires_grad=True)

        settings = {} if objective == "guidance" else TWO_LEVELS
        sums = loss(objective, student, TEACHER, TEACHER, batch=batch, **settings)
        assert all(torch.equal(x_S1P[:2], batch.tokens_S1P[:2]) for x_S1P in seen), objective
        other = replace(batch, tokens_S1P=batch.tokens_S1P.clone())
        other.tokens_S1P[:2] += 1
        moved = loss(objective, lambda b, x, s: torch.full_like(x, 100.0), TEACHER, TEACHER, batch=other, **settings)
        torch.testing.assert_close(moved.error, sums.error, msg=objective)


def test_what_is_given_with_noise_has_it_in_every_objective():
    """As Cosmos-1.0 sees it: its teacher and student were never asked of anything cleaner."""
    batch, model = pack(given=((0, 2),)), replace(MODEL, conditioning_mode="augmented", conditioning_sigma=0.01)
    for objective in OF_STUDENTS.keys() - {"flow_grpo"}:  # whose x is stored
        seen = []

        def asked(batch, x_S1P, sigma_G, seen=seen):
            seen.append(x_S1P)
            return torch.zeros_like(x_S1P, requires_grad=True)

        settings = {} if objective == "guidance" else TWO_LEVELS
        loss(objective, asked, asked, asked, batch=batch, model=model, **settings)
        found = torch.stack([x_S1P[:2] for x_S1P in seen]) - batch.tokens_S1P[:2]
        assert seen and ((found.std((1, 2, 3)) / 0.01 - 1).abs() < 0.7).all(), objective


def test_a_student_that_is_told_the_scale_learns_all_of_them():
    """Its scales are drawn for each sample, and it has learnt everything when it answers as the teacher at each."""
    seen, model = [], replace(MODEL, guidance_embedding_range=(2.0, 5.0))

    def network(batch, x_S1P, sigma_G):
        has_text = torch.tensor([float(s.text_length > 0) for s in batch.layout.segments])
        return x_S1P + of_tokens(batch, has_text)

    def student(batch, x_S1P, sigma_G):
        seen.append(batch.guidance_G)
        return x_S1P + of_tokens(batch, batch.guidance_G)

    def other(batch, x_S1P, sigma_G):
        return x_S1P + 3.0

    for key in range(200):
        batch = replace(pack(), noise_key_G=torch.tensor([key + 1, 1000 + key, 0]))
        asked = {"batch": batch, "model": model}
        assert loss("guidance", student, guided(network, 1.0), **asked).error < 1e-10
        assert key or loss("guidance", other, guided(network, 1.0), **asked).error > 0.1
    scales = torch.stack(seen)[:, :2].flatten()
    assert 2 < scales.min() < 2.1 and 4.9 < scales.max() < 5 and abs(scales.mean() - 3.5) < 0.1
    assert len(scales.unique()) == 400


@pytest.mark.parametrize("objective", [name for name in OF_STUDENTS if name != "regression"])
def test_every_network_is_asked_at_the_students_scale(objective):
    """The student, its teacher and its critic, in the student's step and in the critic's."""
    asked, model = {}, replace(MODEL, guidance_embedding_range=(2.0, 5.0))

    def network(name):
        def denoise(batch, x_S1P, sigma_G):
            asked.setdefault(name, []).append(batch.guidance_G[:2].tolist())
            return torch.zeros_like(x_S1P, requires_grad=True)

        return denoise

    of = networks(objective, *map(network, ("student", "teacher", "critic")), model=model, step=4, sigmas=(20.0, 2.0))
    OBJECTIVES[objective](of, pack())
    assert {"student", "teacher"} <= asked.keys()
    scales = {tuple(pair) for pairs in asked.values() for pair in pairs}
    assert len(scales) == 1 and all(2 < scale < 5 for scale in next(iter(scales)))
    made = generated(of, pack(), step=4, update=1)
    assert all(2 < scale < 5 for scale in made.guidance_G[:2].tolist())


def test_guidance_leads_away_from_no_text():
    def network(batch, x_S1P, sigma_G):
        has_text = torch.tensor([float(s.text_length > 0) for s in batch.layout.segments])
        assert len(batch.text_L1E) == batch.layout.text_capacity
        return x_S1P + has_text[batch.layout.on("cpu").segment_of_token_S][:, None, None]

    batch, sigma_G = pack(), torch.ones(3)
    x_S1P = torch.zeros(16, 1, 5)
    told = guided(network, 3.0)(batch, x_S1P, sigma_G)
    assert (told[:12] == 3).all() and (guided(network, 1.0)(batch, x_S1P, sigma_G)[:12] == 1).all()
