"""The head beside a critic: what it learns, and where it leads a student, without touching the critic."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.dit import DiT
from megadit.models.ops import ledger
from megadit.train.config.schema import DiffusionConfig
from megadit.train.objectives.adversary import critic_loss, towards_real
from megadit.train.objectives.denoise import draw_sigma, token_noise
from megadit.train.objectives.heads import Adversary, head_parameters
from megadit.train.objectives.losses import edm_loss
from megadit.train.objectives.networks import TrainingModel
from tests.train.objectives.test_distillation import DEVIATION, TEACHER, loss, networks, of_normal, pack, sigma_of

CONFIG = DiTConfig(
    **{"num_layers": 3, "hidden_size": 24, "num_attention_heads": 2, "in_channels": 5, "patch_spatial": 1},
    **{"crossattn_emb_size": 4, "conditioning_sigma": 0.02},
)
DIFFUSION = DiffusionConfig()


@pytest.fixture
def critic():
    generator, dit = torch.Generator().manual_seed(0), DiT(CONFIG)
    for parameter in dit.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    config = networks("distribution_matching", model=CONFIG, sigmas=(1.0,), adversarial_weight=1.0).config
    return TrainingModel(dit, config, critic_loss, adversary=Adversary(CONFIG.hidden_size, seed=7))


def made_and_real(given=()):
    batch = pack(given)
    is_target_S = batch.layout.on("cpu").is_target_S[:, None, None]
    return replace(batch, real_S1P=batch.tokens_S1P + 2.0 * is_target_S)


def loss_of(critic, batch, weight=1.0):
    distill = replace(critic.networks.config.train.distill, adversarial_weight=weight)
    config = SimpleNamespace(model=CONFIG, diffusion=DIFFUSION, train=SimpleNamespace(distill=distill))
    return critic_loss(replace(critic.networks, config=config), batch)


def test_a_critic_learns_to_tell_and_denoises_as_it_did(critic):
    batch = made_and_real()
    before = loss_of(critic, batch)
    sigma_G = draw_sigma(batch.noise_key_G, DIFFUSION, batch.layout)
    expected = edm_loss(critic.dit, batch, sigma_G, token_noise(batch))
    assert before.weighted.item() == pytest.approx(expected.weighted.item(), rel=1e-6)
    told = (before.objective - expected.objective).item() / batch.num_tokens
    assert told == pytest.approx(2 * torch.tensor(2.0).log().item(), rel=1e-5), "at first it knows nothing"
    optimizer = torch.optim.Adam(critic.adversary.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(critic, batch).objective.backward()
        optimizer.step()
    assert (loss_of(critic, batch).objective - expected.objective).item() / batch.num_tokens < 0.7 * told
    swapped = replace(batch, tokens_S1P=batch.real_S1P, real_S1P=batch.tokens_S1P)
    after = loss_of(critic, swapped).objective - loss_of(critic, swapped, weight=0.0).objective
    assert after.item() / batch.num_tokens > 1.3 * told, "which is which is what it has learnt"
    assert sum(parameter.numel() for parameter in critic.adversary.parameters()) == head_parameters(CONFIG.hidden_size)


def test_the_critics_features_learn_from_it(critic):
    torch.nn.init.normal_(critic.adversary.linear_2.weight)
    found = {}
    for weight in (0.0, 1.0):
        critic.zero_grad()
        loss_of(critic, made_and_real(), weight).objective.backward()
        found[weight] = {name: parameter.grad for name, parameter in critic.named_parameters()}
    without, with_head = (
        {name: torch.zeros(()) if grad is None else grad for name, grad in each.items()} for each in found.values()
    )
    changed = {name for name in with_head if not torch.equal(with_head[name], without[name])}
    blocks = {name.split(".")[2] for name in changed if name.startswith("dit.blocks.")}
    assert blocks == {"0", "1"} and "dit.x_embedder.weight" in changed, "what lies before the middle"
    assert not any(name.startswith("dit.final_layer.linear") for name in changed)


def test_the_way_to_real_is_a_gradient_and_the_critic_gets_none(critic):
    torch.nn.init.normal_(critic.adversary.linear_2.weight)
    batch, sigma_G = made_and_real(given=((0, 2),)), torch.tensor([1.5, 0.4, 1.0])
    y_S1P = batch.tokens_S1P + 0.1
    grad_S1P = towards_real(critic.discriminate, batch, y_S1P, sigma_G)
    assert all(parameter.grad is None for parameter in critic.parameters())

    def value(y_S1P):
        with torch.no_grad():
            reported_S = F.softplus(-critic.discriminate(batch, y_S1P, sigma_G))
        return (reported_S * batch.layout.on("cpu").is_target_S).sum().item()

    along = torch.randn(y_S1P.shape, generator=torch.Generator().manual_seed(3))
    step = 1e-2
    expected = (value(y_S1P + step * along) - value(y_S1P - step * along)) / (2 * step)
    assert (grad_S1P * along).sum().item() == pytest.approx(expected, rel=1e-2) and abs(expected) > 1e-3


def test_no_graph_is_left_behind(critic, monkeypatch, request):
    """One of which a part is never gone back through would stay: what blocks keep for their backward holds itself."""

    def num_left():
        gc.collect()
        return sum(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in gc.get_objects())

    gc.freeze()  # objects of other tests are many
    request.addfinalizer(gc.unfreeze)
    monkeypatch.setattr(ledger, "SMALL", 0)
    torch.nn.init.normal_(critic.adversary.linear_2.weight)
    batch, before = made_and_real(), num_left()
    towards_real(critic.discriminate, batch, batch.tokens_S1P, torch.tensor([1.5, 0.4, 1.0]))
    loss_of(critic, batch).objective.backward()
    assert num_left() == before
    critic.denoise(batch, batch.tokens_S1P, torch.ones(3)).sum()
    assert num_left() > before, "negative control"


def test_a_student_follows_it():
    """A student of one number, whose critic and teacher agree: the head moves it, as much as its weight and those of
    the samples say."""
    asked, batch = [], replace(pack(), loss_weight_G=torch.tensor([0.5, 3.0, 1.0]))

    def discriminator(batch, y_S1P, sigma_G):
        asked.append(y_S1P)
        return 0.2 * y_S1P.sum(dim=(1, 2))  # larger is real

    def gradient(weight):
        shift = torch.tensor(0.7, requires_grad=True)

        def student(batch, x_S1P, sigma_G):
            return shift + DEVIATION * x_S1P / sigma_of(batch, sigma_G)

        settings = {"sigmas": (80.0,), "adversarial_weight": weight}
        sums = loss(
            *("distribution_matching", student, TEACHER, of_normal(0.7, DEVIATION)),
            batch=batch,
            discriminator=discriminator,
            **settings,
        )
        sums.objective.backward()
        return shift.grad.item()

    assert abs(gradient(0.0)) < 1e-6 and not asked, "without a weight nobody asks"
    one, two = gradient(0.1), gradient(0.2)
    assert one < -1e-2 and two == pytest.approx(2 * one, rel=1e-3)
    # d/dx0 of the sum over tokens of log(1 + exp(-0.2 sum(y))): its mean over P numbers counts P times
    with torch.no_grad():
        logit_S = 0.2 * asked[-1].sum(dim=(1, 2))
        tensors = batch.layout.on("cpu")
        weight_S = batch.loss_weight_G[tensors.segment_of_token_S] * tensors.is_sample_S
    expected = -(0.1 * 0.2 * 5 * torch.sigmoid(-logit_S) * weight_S).sum().item()
    assert one == pytest.approx(expected, rel=1e-3)
