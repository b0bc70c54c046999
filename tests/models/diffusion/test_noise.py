import math

import pytest
import torch

from megadit.models.diffusion.noise import (
    Stream,
    latent_noise,
    normal,
    philox4x32,
    sample_key,
    seed_key,
    uniform,
    uniform_numbers,
)

# Random123 (https://github.com/DEShawResearch/random123), tests/kat_vectors, philox 4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def as_words(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, answer):
    words = philox4x32(as_words(counter), as_words(key))
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def rows(count, seed=0):
    """Keys and positions over the whole range of int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2, count), generator=generator).unbind()


def test_numbers_without_tensors_are_those_of_a_row():
    for key in (0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789):
        row_W = uniform(torch.tensor([key]), torch.tensor([0]), 9, stream=5)[0]
        assert uniform_numbers(key, 9, stream=5) == row_W.tolist()
        assert uniform_numbers(key, 9, stream=6) != row_W.tolist()


@pytest.mark.parametrize("draw", [normal, uniform])
def test_a_row_does_not_depend_on_the_others(draw):
    """Bit for bit, for any batch size, order and memory layout."""
    key_R, position_R = rows(101)
    whole = draw(key_R, position_R, 7, stream=3)
    assert whole.dtype == torch.float32 and whole.shape == (101, 7)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(key_R[order], position_R[order], 7, stream=3), whole[order])
    assert torch.equal(draw(key_R[::3], position_R[::3], 7, stream=3), whole[::3])
    for row in range(0, 101, 10):
        assert torch.equal(draw(key_R[row : row + 1], position_R[row : row + 1], 7, stream=3), whole[row : row + 1])


@pytest.mark.parametrize("draw", [normal, uniform])
def test_a_column_does_not_depend_on_the_width(draw):
    key_R, position_R = rows(5)
    wide = draw(key_R, position_R, 64, stream=0)
    for width in (1, 2, 3, 4, 5, 33):
        assert torch.equal(draw(key_R, position_R, width, stream=0), wide[:, :width])


def test_numbers_do_not_depend_on_the_default_dtype():
    key_R, position_R = rows(50)
    expected = normal(key_R, position_R, 8, stream=0), uniform(key_R, position_R, 8, stream=0)
    torch.set_default_dtype(torch.float16)
    try:
        found = normal(key_R, position_R, 8, stream=0), uniform(key_R, position_R, 8, stream=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_every_index_matters():
    """Key, position (both words of each) and stream give different, uncorrelated numbers."""
    key, position = torch.tensor([5]), torch.tensor([9])
    base = normal(key, position, 4096, stream=0)
    others = [
        normal(key + 1, position, 4096, stream=0),
        normal(key + 2**32, position, 4096, stream=0),
        normal(-key, position, 4096, stream=0),
        normal(key, position + 1, 4096, stream=0),
        normal(key, position + 2**32, 4096, stream=0),
        normal(key, position, 4096, stream=1),
        normal(position, key, 4096, stream=0),
    ]
    for other in others:
        # The correlation of independent numbers has standard deviation 1/64.
        assert abs((base * other).mean()) < 5 / 64


def test_normal_numbers_are_normal():
    """Moments within five standard deviations of those of N(0, 1); tails and neighbours too."""
    numbers = normal(*rows(20_000), 32, stream=0).double()
    count = numbers.numel()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((numbers**power).mean() - expected) < 5 * math.sqrt(variance / count), power
    for threshold in (1.0, 2.0, 3.0, 4.0):
        expected = math.erfc(threshold / math.sqrt(2))
        assert abs((numbers.abs() > threshold).double().mean() - expected) < 5 * math.sqrt(expected / count)
    for neighbour in (numbers.roll(1, 1), numbers.roll(2, 1), numbers.roll(1, 0)):
        assert abs((numbers * neighbour).mean()) < 5 / math.sqrt(count)
        assert abs(((numbers**2 - 1) * (neighbour**2 - 1)).mean()) < 5 * 2 / math.sqrt(count)


def test_neighbouring_counters_are_uncorrelated():
    """Training draws consecutive positions under one key: the case in which a weak generator fails."""
    numbers = normal(torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000), 16, stream=0).double()
    assert abs((numbers[1:] * numbers[:-1]).mean()) < 5 / math.sqrt(numbers.numel())


def test_extreme_words_give_finite_normals(monkeypatch):
    """The words 0 and 2^32 - 1, which no test would meet by chance."""
    largest = 2**32 - 1
    for radius_word in (0, largest):
        for angle_word in (0, 2**30 - 1, 2**30, 2**31, 3 * 2**30, largest):
            words = torch.tensor([[[radius_word, angle_word, radius_word, angle_word]]])
            monkeypatch.setattr("megadit.models.diffusion.noise._words", lambda *_, words=words: words)
            numbers = normal(*rows(1), 4, stream=0)
            assert numbers.isfinite().all()
            radius = numbers[0, :2].norm().item()
            expected = math.sqrt(-2 * math.log((radius_word + 0.5) / 2**32))
            assert radius == pytest.approx(expected, rel=1e-6)


def test_box_muller_agrees_with_library_functions(monkeypatch):
    """The series for logarithm, cosine and sine, to float32's last bit or so."""
    words = torch.randint(0, 2**32, (1000, 8, 4), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("megadit.models.diffusion.noise._words", lambda *_: words)
    numbers = normal(*rows(1000), 32, stream=0).double().unflatten(1, (8, 2, 2))
    radius = (-2 * ((words[..., 0::2].double() + 0.5) / 2**32).log()).sqrt()
    # Quarter q holds the angles from q pi/2 - pi/4 to q pi/2 + pi/4.
    angle = 2 * math.pi * (words[..., 1::2].double() + 0.5) / 2**32 - math.pi / 4
    expected = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    torch.testing.assert_close(numbers, expected, rtol=1.2e-7, atol=1e-9)


def test_uniform_numbers_are_uniform_and_never_0_or_1(monkeypatch):
    numbers = uniform(*rows(20_000), 32, stream=Stream.SIGMA).double()
    histogram = torch.histc(numbers, bins=64, min=0, max=1)
    expected = numbers.numel() / 64
    # chi-squared with 63 degrees of freedom: mean 63, standard deviation 11.2
    assert ((histogram - expected) ** 2 / expected).sum() < 63 + 5 * 11.2
    monkeypatch.setattr("megadit.models.diffusion.noise._words", lambda *_: torch.tensor([[[0, 2**32 - 1, 1, 2]]]))
    numbers = uniform(*rows(1), 4, stream=0)
    assert numbers.min() > 0 and numbers.max() < 1


def test_latent_noise_is_drawn_position_by_position():
    key_B = torch.tensor([seed_key(1), seed_key(2)])
    noise = latent_noise(key_B, (5, 2, 3, 4))
    assert noise.shape == (2, 5, 2, 3, 4) and noise.is_contiguous()
    position = (1 * 3 + 2) * 4 + 3
    row = normal(key_B[1:], torch.tensor([position]), 5, stream=Stream.NOISE)
    assert torch.equal(noise[1, :, 1, 2, 3], row[0])
    assert torch.equal(latent_noise(key_B[1:], (5, 2, 3, 4)), noise[1:])


def test_keys_are_stable_signed_and_distinct():
    """The literal values pin the hash: changing it would change every video of a given seed."""
    assert seed_key(0) == 9025756203284825921
    assert sample_key(1234, "clip_000001", 0) == 195062503285789253
    keys = {sample_key(s, i, o) for s in range(4) for i in ("a", "b", "1 a", "0 a") for o in range(4)}
    keys |= {seed_key(seed) for seed in range(1000)}
    assert len(keys) == 4 * 4 * 4 + 1000
    assert all(-(2**63) <= key < 2**63 for key in keys) and min(keys) < 0 < max(keys)


def test_numbers_are_pinned():
    """The first numbers of seed 0, so that a change of the generator cannot pass unnoticed."""
    numbers = normal(torch.tensor([seed_key(0)]), torch.tensor([0]), 4, stream=Stream.NOISE)
    torch.testing.assert_close(
        numbers[0], torch.tensor([-0.473833919, 0.695625007, 2.068007469, -0.836493969]), rtol=0, atol=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("draw", [normal, uniform])
def test_gpu_and_cpu_give_the_same_bits(draw):
    key_R, position_R = rows(100_000)
    on_gpu = draw(key_R.cuda(), position_R.cuda(), 16, stream=1)
    assert torch.equal(on_gpu.cpu(), draw(key_R, position_R, 16, stream=1))
