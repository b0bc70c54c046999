"""Direct preference optimization: its loss and gradient, and that a student learns what was chosen."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megadit.models.diffusion.parameterization import parameterization_of
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.objectives.denoise import draw_sigma, token_noise
from megadit.train.objectives.registry import OBJECTIVES
from tests.train.objectives.exact import MODEL, networks, of_normal

REFERENCE = of_normal(0.0, 1.0)
SIZED = replace(MODEL, in_channels=5, crossattn_emb_size=4)


def pairs(*shapes, chosen=1.0, rejected=-1.0):
    """A pack of pairs, and padding; latents are normal about the two means."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        TrainingSample(
            sample_id=str(number),
            occurrence=0,
            latent_CTHW=chosen + torch.randn(5, *shape, generator=generator),
            rejected_CTHW=rejected + torch.randn(5, *shape, generator=generator),
            preference=1.0,
            text_LE=torch.randn(2, 4, generator=generator),
            fps=8.0,
        )
        for number, shape in enumerate(shapes)
    ]
    form = PackFormat(model=SIZED, seq_length=64, text_seq_length=32, seed=0, text_dropout=0.0, extras=("preference",))
    assert [form.lengths(sample)[0] for sample in samples] == [2 * t * h * w for t, h, w in shapes]
    batch = form.pack(samples)
    assert batch.extra_G["preference"][: 2 * len(shapes)].tolist() == [1, -1] * len(shapes)
    extra_G = {"preference": batch.extra_G["preference"].double()}
    return replace(batch, tokens_S1P=batch.tokens_S1P.double(), extra_G=extra_G)


class Student:
    def __init__(self, value=0.3):
        self.value = torch.tensor(value, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch, x_S1P, sigma_G):
        return REFERENCE(batch, x_S1P, sigma_G) + self.value


def dpo(student, batch, beta, model=SIZED):
    of = networks("dpo", student, REFERENCE, model=model, dpo_beta=beta)
    return OBJECTIVES["dpo"](of, batch), of.config.diffusion


@pytest.mark.parametrize("beta", [0.1, 3.0])
@pytest.mark.parametrize("parameterization", ["edm", "flow", "vp"])
def test_equals_the_papers_loss(parameterization, beta):
    """arXiv 2311.12908, eq. 14, pair by pair, by autograd in float64; pairs of other sizes weigh by their tokens."""
    model = replace(SIZED, parameterization=parameterization)
    batch, student, other = pairs((1, 2, 2), (2, 2, 3)), Student(), Student()
    found, diffusion = dpo(student, batch, beta, model)
    sigma_G = draw_sigma(batch.noise_key_G, diffusion, batch.layout)
    assert sigma_G[0] == sigma_G[1] != sigma_G[2] == sigma_G[3], "the videos of a pair have one noise level"
    noise_S1P = token_noise(batch)
    assert torch.equal(noise_S1P[:4], noise_S1P[4:8]), "and one noise"
    x_S1P = batch.noisy(sigma_G, noise_S1P)
    error_S, reference_S = (
        (D(batch, x_S1P, sigma_G) - batch.tokens_S1P).square().mean((1, 2)) for D in (other, REFERENCE)
    )
    weight_G, expected = parameterization_of(model).loss_weight(sigma_G), 0.0
    for (start, count), pair in zip([(0, 4), (8, 12)], (0, 2), strict=True):
        more_w, more_l = ((error_S - reference_S)[first : first + count].mean() for first in (start, start + count))
        expected = expected + 2 * count * -F.logsigmoid(-beta * weight_G[pair] * (more_w - more_l))
    (of_found,), (of_expected,) = (
        torch.autograd.grad(loss, each.value) for loss, each in ((found.objective, student), (expected, other))
    )
    torch.testing.assert_close(found.objective, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(of_found, of_expected, rtol=1e-9, atol=0)
    assert found.weighted == found.objective and 0 <= found.error <= batch.num_tokens


def test_a_student_learns_what_was_chosen():
    """Of its reference it loses nothing at first: log 2; then it moves towards the chosen videos, about 1."""
    batch, student = pairs((2, 2, 2), (1, 3, 3)), Student(0.0)
    optimizer = torch.optim.Adam([student.value], 0.05)
    first = dpo(student, batch, 1.0)[0]
    torch.testing.assert_close(first.objective / batch.num_tokens, torch.tensor(2.0).log().double())
    for _ in range(30):
        optimizer.zero_grad()
        sums = dpo(student, batch, 1.0)[0]
        sums.objective.backward()
        optimizer.step()
    assert student.value > 0.3 and sums.error == 0 and sums.objective < 0.5 * first.objective
