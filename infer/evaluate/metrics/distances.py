"""Distances between two sets of features: Fréchet, kernel (MMD), and nearest-neighbour metrics.

Shapes: N videos, F features of each (one for each frame, or one of a clip), D width, R resamplings.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadit.infer.evaluate.metrics.intervals import Estimate, mean_estimate
from megadit.models.shared.errors import UserError

NUM_HALVINGS = 24
"""Random splits of the videos in two from which a Fréchet distance is extrapolated."""
WIDE = 512
"""Width of features above which a Fréchet distance (cubic time) is computed a quarter as often."""
BLOCK = 2048
"""Most videos of which a kernel distance compares all pairs; of more, the mean over blocks is taken, each beside all
videos of a smaller set."""
NUM_NEIGHBOURS = 5
_CHUNK = 1 << 24
"""Most numbers in memory at once."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features of videos, and their weights in each resampling."""

    features_NFD: Tensor
    weight_RN: Tensor

    @property
    def rows_ND(self) -> Tensor:
        """One float64 row for each video: the mean of its features."""
        return self.features_NFD.double().mean(1)


# ------------------------------------------------------------------------------------------------- Fréchet distance


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and covariance of features, float64."""

    mean_D: Tensor
    covariance_DD: Tensor


def moments(features_NFD: Tensor, weight_N: Tensor | None = None) -> Moments:
    """Mean and unbiased covariance of all features of all videos, each video weighted by `weight_N`."""
    x_MD = features_NFD.flatten(0, 1).double()
    weight_M1 = x_MD.new_ones(len(x_MD), 1)
    if weight_N is not None:
        weight_M1 = weight_N.to(x_MD).repeat_interleave(features_NFD.shape[1])[:, None]
    total = weight_M1.sum()
    mean_D = (weight_M1 * x_MD).sum(0) / total
    centred_MD = weight_M1.sqrt() * (x_MD - mean_D)
    return Moments(mean_D, centred_MD.T @ centred_MD / (total - 1))


def frechet(a: Moments, b: Moments) -> float:
    """|mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)), between normal distributions (Dowson and Landau, 1982; as FID,
    arXiv 1706.08500).

    The trace of the root is that of (A^(1/2) B A^(1/2))^(1/2), which is symmetric.
    """
    value_D, vector_DD = torch.linalg.eigh(a.covariance_DD)
    root_DD = (vector_DD * value_D.clamp(min=0).sqrt()) @ vector_DD.T
    product_DD = root_DD @ b.covariance_DD @ root_DD
    shared = torch.linalg.eigvalsh((product_DD + product_DD.T) / 2).clamp(min=0).sqrt().sum()
    apart = (a.mean_D - b.mean_D).square().sum()
    return (apart + a.covariance_DD.trace() + b.covariance_DD.trace() - 2 * shared).item()


def frechet_estimate(made: Features, real: Features) -> Estimate:
    """The Fréchet distance extrapolated to infinitely many videos.

    The distance of N videos is too large by c / N, where c depends on the model (arXiv 1911.07023), so that distances
    of finitely many videos cannot be compared, not even at equal N. For halves of both sets the bias is twice as large,
    so that 2 FD(all) - FD(halves) is unbiased. It may be below 0 for equal distributions. The interval is that of
    resampled plain distances; near a distance of 0 it is slightly too wide.

    Raises:
        UserError: if half of the features are too few for a covariance of full rank.
    """
    check_enough(len(made.features_NFD), len(real.features_NFD), *made.features_NFD.shape[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made_NFD, real_NFD = (side.features_NFD.to(device) for side in (made, real))
    share = 4 if made_NFD.shape[2] > WIDE else 1
    plain = frechet(moments(made_NFD), moments(real_NFD))
    halved_K = torch.tensor([_halved(made_NFD, real_NFD, seed) for seed in range(NUM_HALVINGS // share)])
    resampled_R = [
        frechet(moments(made_NFD, made_N), moments(real_NFD, real_N))
        for made_N, real_N in zip(made.weight_RN[::share], real.weight_RN[::share], strict=True)
    ]
    return Estimate(
        value=2 * plain - halved_K.mean().item(),
        resampled_R=torch.tensor(resampled_R, dtype=torch.float64),
        count=len(made.features_NFD),
        noise=halved_K.std().item() / len(halved_K) ** 0.5,
        extra={"plain": plain},
    )


def check_enough(num_made: int, num_real: int, each: int, width: int) -> None:
    """Raises UserError if there are too few features (`each` per video, of `width`) for the covariance of a half."""
    for name, count in (("generated", num_made), ("real", num_real)):
        if count // 2 * each <= width:
            raise UserError(
                f"{count} {name} videos are too few for a Fréchet distance of {width} features: give "
                f"{2 * (width // each + 1)} or more, or choose only kernel distances (kid, kvd)"
            )


def _halved(made_NFD: Tensor, real_NFD: Tensor, seed: int) -> float:
    """Mean distance of halves."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for side_NFD in (made_NFD, real_NFD):
        order = torch.randperm(len(side_NFD), generator=generator).to(side_NFD.device)
        sides.append([moments(side_NFD[half]) for half in order[: len(order) // 2 * 2].chunk(2)])
    return sum(frechet(made, real) for made, real in zip(*sides, strict=True)) / 2


# -------------------------------------------------------------------------------------------------- kernel distance


def kernel_estimate(made: Features, real: Features) -> Estimate:
    """The unbiased squared maximum mean discrepancy with the kernel (x.y / D + 1)^3 (KID, arXiv 1801.01401).

    The kernel of two videos is the mean over pairs of their features; no video is compared with itself, since its
    frames are correlated. May be below 0.
    """
    num_blocks = -(-max(len(made.features_NFD), len(real.features_NFD)) // BLOCK)
    values, resampled = [], []
    for block in range(num_blocks):
        a, b = (_every(side, num_blocks, block) for side in (made, real))
        kernels = [_kernel(x, y) for x, y in ((a, a), (b, b), (a, b))]
        values.append(_discrepancy(*kernels, torch.ones_like(a.weight_RN[:1]), torch.ones_like(b.weight_RN[:1])))
        resampled.append(_discrepancy(*kernels, a.weight_RN, b.weight_RN))
    return Estimate(
        value=torch.cat(values).mean().item(), resampled_R=torch.stack(resampled).mean(0), count=len(made.features_NFD)
    )


def _every(side: Features, step: int, start: int) -> Features:
    if len(side.features_NFD) <= BLOCK:
        return side
    return Features(side.features_NFD[start::step], side.weight_RN[:, start::step])


def _kernel(a: Features, b: Features) -> Tensor:
    """Kernel of each pair of videos, float64 [N, M]."""
    (_, each, width), (count, others, _) = a.features_NFD.shape, b.features_NFD.shape
    b_MD = b.features_NFD.flatten(0, 1).double()
    rows = []
    for chunk_PFD in a.features_NFD.split(max(1, _CHUNK // (each * count * others))):
        products = chunk_PFD.flatten(0, 1).double() @ b_MD.T / width + 1
        rows.append(products.pow(3).reshape(len(chunk_PFD), each, count, others).mean((1, 3)))
    return torch.cat(rows)


def _discrepancy(aa_NN: Tensor, bb_MM: Tensor, ab_NM: Tensor, a_RN: Tensor, b_RM: Tensor) -> Tensor:
    """Discrepancy of each resampling, [R]; a video that is drawn twice is not compared with itself."""
    within = [_within(kernel, weight) for kernel, weight in ((aa_NN, a_RN), (bb_MM, b_RM))]
    between = ((a_RN @ ab_NM) * b_RM).sum(1) / (a_RN.sum(1) * b_RM.sum(1))
    return within[0] + within[1] - 2 * between


def _within(kernel_NN: Tensor, weight_RN: Tensor) -> Tensor:
    same = weight_RN.square()
    total = ((weight_RN @ kernel_NN) * weight_RN).sum(1) - same @ kernel_NN.diagonal()
    return total / (weight_RN.sum(1).square() - same.sum(1))


# ------------------------------------------------------------------------------------------------------- neighbours


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Precision, density, recall and coverage of each video (arXiv 1904.06991, 2002.09797)."""

    precision_N: Tensor
    """Whether a generated video is nearer to some real one than that one's k-th real neighbour."""
    density_N: Tensor
    """Number of such real videos, divided by k."""
    recall_M: Tensor
    """Whether a real video is nearer to some generated one than that one's k-th generated neighbour."""
    coverage_M: Tensor
    """Whether some generated video is nearer to a real one than its k-th real neighbour."""


def neighbours(made: Features, real: Features) -> Neighbours:
    made_ND, real_MD = made.rows_ND, real.rows_ND
    if min(len(made_ND), len(real_MD)) <= NUM_NEIGHBOURS:
        raise UserError(
            f"{min(len(made_ND), len(real_MD))} videos have no {NUM_NEIGHBOURS} neighbours each: give more, or leave "
            "out precision, recall, density and coverage"
        )
    distance_NM = torch.cdist(made_ND, real_MD, compute_mode="donot_use_mm_for_euclid_dist")
    made_radius_N1, real_radius_M = _radii(made_ND)[:, None], _radii(real_MD)
    is_near_NM = distance_NM < real_radius_M
    return Neighbours(
        precision_N=is_near_NM.any(1),
        density_N=is_near_NM.double().sum(1) / NUM_NEIGHBOURS,
        recall_M=(distance_NM < made_radius_N1).any(0),
        coverage_M=is_near_NM.any(0),
    )


def _radii(x_ND: Tensor) -> Tensor:
    """Distance of each to its k-th neighbour, [N]."""
    distance_NN = torch.cdist(x_ND, x_ND, compute_mode="donot_use_mm_for_euclid_dist")
    return distance_NN.kthvalue(NUM_NEIGHBOURS + 1, dim=1).values  # the point itself comes first, at 0


def _share(of: Callable[[Neighbours], Tensor], is_of_made: bool) -> Callable[[Features, Features], Estimate]:
    def estimate(made: Features, real: Features) -> Estimate:
        weight_RN = made.weight_RN if is_of_made else real.weight_RN
        return mean_estimate(of(neighbours(made, real)), weight_RN, (0.0, float("inf")))

    return estimate


precision = _share(lambda found: found.precision_N, is_of_made=True)
density = _share(lambda found: found.density_N, is_of_made=True)
recall = _share(lambda found: found.recall_M, is_of_made=False)
coverage = _share(lambda found: found.coverage_M, is_of_made=False)
