"""Distances against closed forms, scipy and torchmetrics; the extrapolated one against truth in many draws."""

import numpy as np
import pytest
import scipy.linalg
import torch

from megadit.infer.evaluate.metrics import distances
from megadit.infer.evaluate.metrics.distances import Features, Moments, frechet, moments
from megadit.infer.evaluate.metrics.intervals import resamplings
from megadit.models.shared.errors import UserError


def features(x_ND, side="made", count=20) -> Features:
    """Of videos with one feature each."""
    return Features(x_ND[:, None], resamplings(range(len(x_ND)), side, count))


def gaussian(count, width, seed, shift=0.0, scale=1.0):
    x = torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return shift + scale * x


def test_frechet_of_known_normal_distributions():
    """Of diagonal covariances it is |mu - nu|^2 + sum (s - t)^2."""
    a = Moments(torch.tensor([1.0, 2.0]).double(), torch.tensor([4.0, 9.0]).double().diag())
    b = Moments(torch.tensor([0.0, 0.0]).double(), torch.tensor([1.0, 25.0]).double().diag())
    assert frechet(a, b) == pytest.approx(5 + (2 - 1) ** 2 + (3 - 5) ** 2, rel=1e-12)
    assert frechet(a, a) == pytest.approx(0, abs=1e-12)


def test_frechet_equals_scipy_and_is_symmetric():
    a, b = (moments(gaussian(60, 8, seed)[:, None] @ torch.rand(8, 8).double()) for seed in (0, 1))
    root = scipy.linalg.sqrtm(a.covariance_DD.numpy() @ b.covariance_DD.numpy())
    apart = ((a.mean_D - b.mean_D) ** 2).sum().item()
    expected = apart + a.covariance_DD.trace().item() + b.covariance_DD.trace().item() - 2 * np.trace(root).real
    assert frechet(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-9)


def test_weights_count_videos_several_times():
    x_NFD = gaussian(12, 4, 0).reshape(6, 2, 4)
    weight_N = torch.tensor([1, 0, 2, 1, 0, 3]).double()
    weighted = moments(x_NFD, weight_N)
    repeated = moments(x_NFD.repeat_interleave(weight_N.long(), 0))
    torch.testing.assert_close(weighted.mean_D, repeated.mean_D)
    torch.testing.assert_close(weighted.covariance_DD, repeated.covariance_DD)


class OfRows(torch.nn.Module):
    """Gives torchmetrics the features themselves: "pictures" are numbers of rows."""

    num_features = 16

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.rows[pictures[:, 0, 0, 0].long() + 256 * pictures[:, 1, 0, 0].long()]


def numbered(first, count):
    number = torch.arange(first, first + count)
    return torch.stack([number % 256, number // 256, number * 0], 1)[:, :, None, None].expand(-1, 3, 4, 4).byte()


def test_equal_to_torchmetrics():
    image = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed (megadit[dev])")
    from torchmetrics.image.kid import KernelInceptionDistance

    real, made = gaussian(400, 16, 0), gaussian(300, 16, 1, shift=0.2, scale=1.1)
    rows = torch.cat([real, made])
    fid = image.FrechetInceptionDistance(feature=OfRows(rows), input_img_size=(3, 4, 4)).set_dtype(torch.float64)
    kid = KernelInceptionDistance(feature=OfRows(rows), subset_size=300, subsets=1)
    for metric in (fid, kid):
        metric.update(numbered(0, 400 if metric is fid else 300), real=True)
        metric.update(numbered(400, 300), real=False)
    ours = frechet(moments(made[:, None]), moments(real[:, None]))
    assert ours == pytest.approx(fid.compute().item(), rel=1e-6)
    kernel = distances.kernel_estimate(features(made), features(real[:300], "real"))
    assert kernel.value == pytest.approx(kid.compute()[0].item(), rel=1e-6)


def test_kernel_distance_has_no_bias():
    """Of equal distributions its mean is 0 even where videos are few; a video is never compared with itself."""
    values = [
        distances.kernel_estimate(
            features(gaussian(12, 3, 2 * n), count=1), features(gaussian(12, 3, 2 * n + 1), "real", 1)
        ).value
        for n in range(400)
    ]
    error = np.std(values) / len(values) ** 0.5
    assert abs(np.mean(values)) < 3 * error
    assert np.std(values) > 0


def test_kernel_distance_of_blocks_agrees_with_that_of_all(monkeypatch):
    made, real = features(gaussian(400, 6, 0, shift=0.3)), features(gaussian(400, 6, 1), "real")
    whole = distances.kernel_estimate(made, real)
    monkeypatch.setattr(distances, "BLOCK", 100)
    blocks = distances.kernel_estimate(made, real)
    assert blocks.value == pytest.approx(whole.value, rel=0.15) and blocks.value != whole.value
    monkeypatch.setattr(distances, "_CHUNK", 1000)
    assert distances.kernel_estimate(made, real).value == pytest.approx(blocks.value, rel=1e-12)


def test_a_few_videos_are_compared_with_every_block_of_many(monkeypatch):
    """Of two in a block of their own there would be one pair, or none."""
    few, many = features(gaussian(8, 6, 0, shift=0.3)), features(gaussian(400, 6, 1), "real")
    whole = distances.kernel_estimate(few, many)
    monkeypatch.setattr(distances, "BLOCK", 20)
    blocks = distances.kernel_estimate(few, many)
    assert blocks.value == pytest.approx(whole.value, rel=0.3) and blocks.value != whole.value
    assert blocks.error < 2 * whole.error


def test_neighbours_of_points_on_a_line(monkeypatch):
    monkeypatch.setattr(distances, "NUM_NEIGHBOURS", 1)
    real = torch.tensor([[0.0], [1.0], [10.0], [11.0]]).double()
    made = torch.tensor([[0.5], [0.6], [50.0]]).double()
    found = distances.neighbours(features(made), features(real, "real"))
    assert found.precision_N.tolist() == [True, True, False]
    assert found.density_N.tolist() == [2.0, 2.0, 0.0]
    assert found.coverage_M.tolist() == [True, True, False, False]
    assert found.recall_M.tolist() == [False, True, True, True]  # 50 has no neighbour within 49.4


def test_a_model_that_repeats_itself_has_precision_and_no_recall():
    real = gaussian(200, 4, 0)
    repeated = real[:1] + 0.01 * gaussian(200, 4, 1)
    shares = {
        name: getattr(distances, name)(features(repeated), features(real, "real"))
        for name in ("precision", "recall", "coverage")
    }
    assert shares["precision"].value == 1 and shares["recall"].value < 0.05 and shares["coverage"].value < 0.2
    low, high = shares["recall"].interval
    assert 0 <= low <= shares["recall"].value <= high < 0.1


def test_too_few_videos_are_refused():
    with pytest.raises(UserError, match="7 generated videos are too few for a Fréchet distance of 8 features: give 18"):
        distances.frechet_estimate(features(gaussian(7, 8, 0)), features(gaussian(99, 8, 1), "real"))
    with pytest.raises(UserError, match="3 videos have no 5 neighbours"):
        distances.neighbours(features(gaussian(3, 8, 0)), features(gaussian(99, 8, 1), "real"))


def known_pair(seed, count=2048, width=64):
    """Two samples of normal distributions whose Fréchet distance is 0.1 + 64 (1.04 - 1)^2 = 0.2024."""
    shift = (0.1 / width) ** 0.5
    return gaussian(count, width, 2 * seed), gaussian(count, width, 2 * seed + 1, shift, 1.04)


TRUTH = 0.1 + 64 * 0.04**2


@pytest.mark.slow
def test_the_interval_holds_the_truth_in_nine_of_ten_draws():
    hits, plain_hits, widths = 0, 0, []
    for seed in range(50):
        real, made = known_pair(seed)
        found = distances.frechet_estimate(features(made, count=30), features(real, "real", 30))
        low, high = found.interval
        hits += low <= TRUTH <= high
        shift = found.extra["plain"] - found.value
        plain_hits += low + shift <= TRUTH <= high + shift
        widths.append((high - low) / 2)
    assert hits >= 45
    assert plain_hits <= 5  # the control: the distance of 2,048 says 1.0
    assert np.mean(widths) < 0.15  # and not because it holds everything


def test_the_extrapolated_distance_is_near_the_truth():
    real, made = known_pair(0)
    found = distances.frechet_estimate(features(made, count=5), features(real, "real", 5))
    assert found.value == pytest.approx(TRUTH, abs=0.12)
    assert found.extra["plain"] > 3 * TRUTH
