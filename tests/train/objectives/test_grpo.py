"""Flow-GRPO: its loss and gradient, its clip, and the policy in which it ends."""

from dataclasses import replace

import pytest
import torch

from megadit.infer.sampling.samplers import euler, noisy_steps, settings_randomness
from megadit.models.diffusion.noise import Stream, latent_noise, seed_key
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.embeddings import token_sequence
from megadit.train.config.distill import DistillConfig
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.training_sample import State, TrainingSample
from megadit.train.objectives.denoise import sampling_noise
from megadit.train.objectives.registry import OBJECTIVES
from tests.train.objectives.exact import MODEL, networks, of_normal, pack, sigma_of

POLICY = of_normal(0.7, 0.5)
SIZED = replace(MODEL, in_channels=5)


class Student:
    """A denoiser with a parameter."""

    def __init__(self, value=0.3):
        self.value = torch.tensor(value, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch, x_S1P, sigma_G):
        return POLICY(batch, x_S1P, sigma_G) + self.value * x_S1P.sin()


def states(rewards=(0.9, 0.2)):
    """A pack of states at two levels, and padding."""
    batch = pack()
    extra_G = batch.extra_G | {"reward": torch.tensor([*rewards, 0.0])}
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in extra_G.items()}
    return replace(batch, tokens_S1P=batch.tokens_S1P.double(), extra_G=doubled)


def grpo(student, batch, clip):
    return OBJECTIVES["flow_grpo"](networks("flow_grpo", student, POLICY, model=SIZED, grpo_clip=clip), batch)


def paper(student, batch, clip):
    """arXiv 2505.05470, eq. 5, by the normal densities of the steps, sample by sample."""
    extra_G, layout = batch.extra_G, batch.layout.on("cpu")
    x_S1P, sigma_S11 = batch.tokens_S1P, sigma_of(batch, extra_G["sigma"].clamp(min=1e-9))
    down_S11, up_S11 = (sigma_of(batch, extra_G[name]) for name in ("sigma_down", "sigma_up"))

    def mean(denoise):
        D_S1P = denoise(batch, x_S1P, sigma_S11[:, 0, 0].new_tensor([2.0, 0.5, 1.0]))
        return x_S1P + (down_S11 - sigma_S11) * (x_S1P - D_S1P) / sigma_S11

    shapes, total = ((1, 2, 2), (2, 2, 2)), 0.0
    for number, shape in enumerate(shapes):
        here = (layout.segment_of_token_S == number) & layout.is_target_S
        stream = Stream.STEP + int(extra_G["noise_index"][number])
        noise = latent_noise(extra_G["seed_key"][number : number + 1], (5, *shape), stream=stream).double()
        noise_s1P = token_sequence(noise, SIZED)
        up = up_S11[here][0, 0, 0]
        next_s1P = mean(POLICY)[here] + up * noise_s1P
        of_student, of_policy = (
            torch.distributions.Normal(mean(each)[here], up).log_prob(next_s1P).mean() for each in (student, POLICY)
        )
        ratio, advantage = (of_student - of_policy).exp(), 2 * extra_G["reward"][number] - 1
        clipped = ratio.clamp(1 - clip, 1 + clip)
        total = total - here.sum() * torch.minimum(ratio * advantage, clipped * advantage)
    return total


@pytest.mark.parametrize("clip", [1e-4, 0.01, 10.0])
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_equals_the_papers_loss(value, clip):
    batch, student, other = states(), Student(value), Student(value)
    found, expected = grpo(student, batch, clip), paper(other, batch, clip)
    torch.testing.assert_close(found.objective, expected, rtol=1e-9, atol=0)
    (of_found,), (of_expected,) = (
        torch.autograd.grad(loss, each.value) for loss, each in ((found.objective, student), (expected, other))
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-9, atol=1e-12)
    assert found.weighted == found.objective
    if value == 0:
        assert found.error == 0 and of_found.abs() > 1e-3, "it begins unclipped"


def test_what_is_clipped_teaches_nothing():
    batch, student = states(rewards=(1.0, 0.5)), Student(0.0)
    gradient = torch.autograd.grad(grpo(student, batch, 1e-5).objective, student.value)[0]
    there = Student(-0.01 * gradient.sign().item())  # a step towards what is rewarded
    found = grpo(there, batch, 1e-5)
    assert found.error > 0 and torch.autograd.grad(found.objective, there.value)[0] == 0
    back = Student(0.01 * gradient.sign().item())
    assert torch.autograd.grad(grpo(back, batch, 1e-5).objective, back.value)[0] != 0


def test_noise_of_a_step_is_that_of_the_sampler():
    batch = states()
    found_S1P = sampling_noise(batch, SIZED, torch.tensor([Stream.STEP + 5, Stream.STEP + 2, Stream.STEP]))
    for number, (shape, stream) in enumerate((((1, 2, 2), Stream.STEP + 5), ((2, 2, 2), Stream.STEP + 2))):
        here = batch.layout.on("cpu").segment_of_token_S == number
        noise = latent_noise(batch.extra_G["seed_key"][number : number + 1], (5, *shape), stream=stream)
        assert torch.equal(found_S1P[here], token_sequence(noise, SIZED))


@pytest.mark.parametrize("wish", [1.0, -1.0])
def test_a_step_along_the_gradient_makes_what_is_rewarded(wish):
    """Videos of normal data by the sampler itself; rewarded is a high mean, or a low one."""
    sigmas, count, shape = torch.tensor([20.0, 5.0, 1.0, 0.3, 0.0], dtype=torch.float64), 300, (5, 1, 2, 2)
    seeds, steps = torch.tensor([seed_key(number) for number in range(count)]), noisy_steps(sigmas, eta=1.0)
    sizes = {"num_steps": 4, "guidance": 1.0, "num_frames": 1, "height": 2, "width": 2, "fps": 8}
    settings = SamplingSettings(sampler="euler", eta=1.0, **sizes)
    states: list[torch.Tensor] = []

    def denoise(x, sigma_B):
        states.append(x)
        variance = sigma_B[0] ** 2
        return (0.25 * x + 0.7 * variance) / (0.25 + variance)  # POLICY

    (randomness,) = settings_randomness(settings, seeds, shape)
    videos = euler(denoise, 20 * latent_noise(seeds, shape).double(), sigmas, randomness)
    means = wish * videos.mean((1, 2, 3, 4))
    rewards = 0.5 + 0.5 * ((means - means.mean()) / means.std()).clamp(-1, 1)
    samples = [
        TrainingSample(
            sample_id=f"{number} {step.sigma}",
            occurrence=0,
            latent_CTHW=videos[number].float(),
            state=State(state[number].float(), step),
            text_LE=torch.zeros(1, 4),
            fps=0.0,
            seed=number,
            reward=rewards[number].item(),
        )
        for state, step in zip(states, steps, strict=False)
        for number in range(count)
    ]
    tokens = 4 * len(samples)
    model = replace(SIZED, crossattn_emb_size=4)
    about = {"seq_length": tokens, "text_seq_length": len(samples), "seed": 0, "text_dropout": 0.0}
    batch = PackFormat(model=model, extras=DistillConfig(teacher="", objective="flow_grpo").extras, **about).pack(
        samples
    )
    value = torch.zeros((), requires_grad=True)
    of = networks("flow_grpo", lambda *asked: POLICY(*asked) + value, POLICY, model=model)
    gradient = torch.autograd.grad(OBJECTIVES["flow_grpo"](of, batch).objective / tokens, value)[0]
    assert -wish * gradient > 0.02, "every D that is moved this way moves the videos"
