"""AdamW with bfloat16 moments against torch's with float32 ones."""

from functools import partial

import pytest
import torch
from torch import nn

from megadit.train.optim import adamw
from megadit.train.optim.adamw import HalfMomentAdamW, round_at_random

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def train(build, steps=200):
    """Weights and second moments after steps with gradients of a steady scale, which then falls to a tenth."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 48, generator=generator))
    optimizer = build([{"params": [parameter]}], **SETTINGS)
    for step in range(steps):
        scale = 1.0 if step < steps // 2 else 0.1
        parameter.grad = scale * torch.randn(64, 48, generator=generator)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["exp_avg_sq"].float()


def test_weights_and_moments_are_those_of_torch():
    (ours, our_squares), (theirs, their_squares) = train(HalfMomentAdamW), train(torch.optim.AdamW)
    # 200 steps of about 0.01: the paths are long beside their difference, rounding of 2^-9 a moment and step
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    # a random walk of steps of up to 2^-8 that forgets one in a thousand; its mean is exact
    assert (our_squares / their_squares).mean().item() == pytest.approx(1, abs=0.01)


def test_rounding_to_the_nearest_would_stand_still(monkeypatch):
    """The control: without chance the second moments do not follow."""
    monkeypatch.setattr(adamw, "round_at_random", lambda x, bits: x.bfloat16())
    _, our_squares = train(HalfMomentAdamW)
    _, their_squares = train(torch.optim.AdamW)
    assert abs((our_squares / their_squares).mean().item() - 1) > 0.05


def test_rounding_is_right_on_average_and_exact_where_it_can_be():
    x = torch.full((1 << 16,), 1 + 2**-9)  # a quarter of the way from 1 to the next number, 1 + 2^-7
    bits = torch.arange(1 << 16, dtype=torch.int32)
    rounded = round_at_random(x, bits).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1 + 2**-9, abs=1e-7)
    exact = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf")])
    assert torch.equal(round_at_random(exact, torch.full((6,), 0xFFFF, dtype=torch.int32)).float(), exact)
    assert round_at_random(torch.tensor([float("nan")]), bits[-1:]).isnan().all()


def test_bits_are_uniform_and_differ_from_step_to_step():
    position = torch.arange(1 << 14, dtype=torch.int32)
    first, second = (adamw._hash(position, torch.tensor(seed, dtype=torch.int32)) for seed in (7919, 15838))
    for bits in (first & 0xFFFF, (first >> 16) & 0xFFFF):
        share = torch.histc(bits.float(), 16, 0, 1 << 16) / len(position)
        assert (share - 1 / 16).abs().max() < 0.01  # four standard deviations: 4 sqrt(1/16 / 2^14)
    assert (first == second).float().mean() < 0.001
    assert abs(torch.corrcoef(torch.stack([first.float(), second.float()]))[0, 1]) < 0.04


def test_the_same_step_gives_the_same_moments():
    for one, other in zip(train(HalfMomentAdamW, steps=5), train(HalfMomentAdamW, steps=5), strict=True):
        assert torch.equal(one, other)


def many_steps(recorded, moved_at=None):
    """Weights after steps whose gradients stay in one place but for one step, and how often a recording was made."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(3)]
    optimizer = HalfMomentAdamW([{"params": parameters}], **SETTINGS)
    optimizer._updates = [recorded]
    for parameter in parameters:
        parameter.grad = torch.empty(6, 4)
    for step in range(6):
        if step == moved_at:
            parameters[1].grad = torch.empty(6, 4)
        for parameter in parameters:
            parameter.grad.copy_(torch.randn(6, 4, generator=generator))
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("moved_at", [None, 3])
def test_a_recorded_step_is_the_step(moved_at):
    """It is given the numbers of each step, and recorded anew where a gradient lies elsewhere."""
    recordings = []

    def record(compute, inputs):
        recordings.append(inputs)
        return lambda: compute(*inputs)

    ours, expected = many_steps(adamw.Recorded(record), moved_at), many_steps(adamw.Recorded(), moved_at)
    assert all(map(torch.equal, ours, expected)) and len(recordings) == (1 if moved_at is None else 2)


def test_gradients_that_keep_moving_are_not_recorded_again_and_again():
    recordings, total, places = [], torch.zeros(1), [torch.zeros(1) for _ in range(20)]
    recorded = adamw.Recorded(lambda compute, inputs: recordings.append(1) or partial(compute, *inputs))
    for step in range(40):
        recorded(total.add_, [places[step // 2]], [torch.ones(1)])
    assert total.item() == 40 and len(recordings) == adamw.MOST_RECORDINGS


def test_a_recording_that_kept_its_numbers_would_be_seen():
    """The control: the rate and the random bits of the step in which it was made."""
    frozen = adamw.Recorded(lambda compute, inputs: partial(compute, *[x.clone() for x in inputs]))
    assert not all(map(torch.equal, many_steps(frozen), many_steps(adamw.Recorded())))


def test_what_cannot_be_recorded_is_computed():
    def refuse(compute, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\n...")

    with pytest.warns(UserWarning, match="not recorded as a CUDA graph, which is slower .operation not permitted"):
        ours = many_steps(adamw.Recorded(refuse))
    assert all(map(torch.equal, ours, many_steps(adamw.Recorded())))


@pytest.mark.gpu
def test_a_cuda_graph_is_the_step():
    generator = torch.Generator().manual_seed(0)
    found = []
    for updates in (adamw.Recorded(), adamw.Recorded(lambda compute, inputs: partial(compute, *inputs))):
        parameters = [nn.Parameter(torch.randn(999, 7, generator=generator.manual_seed(0)).cuda()) for _ in range(5)]
        optimizer = HalfMomentAdamW([{"params": parameters}], **SETTINGS)
        optimizer._updates = [updates]
        optimizer.rounded = {parameter: torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in parameters}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad.copy_(torch.randn(999, 7, generator=generator))
            optimizer.step()
        found.append([*(parameter.detach() for parameter in parameters), *optimizer.rounded.values()])
    assert all(map(torch.equal, *found))
