"""A tokenizer without downloads: the orthonormal 3D Haar transform, lossless or reduced by a fitted PCA.

Shapes: B batch, c colours, C latent channels, T/H/W latent frames/height/width, t/h/w offsets within a patch,
i/j/k Haar coefficients along time/height/width, R = 3 t h w raw coefficients of a patch.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megadit.models.host_to_device import constant, sent_together
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.storage import components as parts
from megadit.models.tokenizers.base import frames_covering, latent_size

CPU = torch.device("cpu")
_TEMPORAL_FACTORS = (1, 2, 4, 8)
_SPATIAL_FACTORS = (1, 2, 4, 8, 16)
_PIXELS_AT_ONCE = 1 << 19
"""Numbers of a few videos, which the cache of a core holds with what they become."""
_PIXEL_SIGMA = 0.5
"""Approximate standard deviation of natural images in [-1, 1] (arXiv 2206.00364); an orthonormal transform keeps it."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearBasis:
    """Latents z = (x - mean) basis / scale of raw coefficients x, and back."""

    mean_R: Tensor
    basis_RC: Tensor
    """Orthonormal columns."""
    scale_C: Tensor

    def project(self, x: Tensor) -> Tensor:
        """x [..., R] -> [..., C]."""
        basis = self.on(x.device)
        return (x - basis.mean_R) @ basis.basis_RC / basis.scale_C

    def restore(self, z: Tensor) -> Tensor:
        """z [..., C] -> [..., R]."""
        basis = self.on(z.device)
        return (z * basis.scale_C) @ basis.basis_RC.T + basis.mean_R

    def on(self, device: torch.device) -> "LinearBasis":
        """The same basis on a device; copied once."""
        return self if device == self.mean_R.device else _sent_basis(self, device)


@lru_cache(maxsize=16)
def _sent_basis(basis: LinearBasis, device: torch.device) -> LinearBasis:
    return LinearBasis(*sent_together([basis.mean_R, basis.basis_RC, basis.scale_C], device))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HaarTokenizer:
    """Patches of the video in the Haar basis; `fit` returns one with few, normalised latent channels.

    Causal: the first frame is repeated to fill its temporal patch, so that an image is a video of one frame; a video
    of 1 + k * temporal_compression frames has 1 + k latent frames. Without `pca` the transform is lossless and all
    3 * temporal_compression * spatial_compression^2 coefficients are channels; with factors of 1, the pixels.

    Raises:
        UserError: for compression factors other than 1, 2, 4, 8 in time and 1, 2, 4, 8, 16 in space.
    """

    temporal_compression: int = 4
    spatial_compression: int = 8
    sigma_data: float = _PIXEL_SIGMA
    """Standard deviation of the latents: 1 after `fit`; without `pca` an assumption about the videos, as nothing is
    normalised."""
    pca: LinearBasis | None = None
    reconstruction_psnr: float | None = None
    """PSNR of the videos that the PCA was fitted to, in dB; None without PCA, which is lossless."""

    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, factors in (("temporal_compression", _TEMPORAL_FACTORS), ("spatial_compression", _SPATIAL_FACTORS)):
            choose_one(getattr(self, name), factors, f"{name}={getattr(self, name)} is not supported")

    @property
    def raw_channels(self) -> int:
        return 3 * self.temporal_compression * self.spatial_compression**2

    @property
    def latent_channels(self) -> int:
        return self.raw_channels if self.pca is None else len(self.pca.scale_C)

    # ------------------------------------------------------------------------------------------------ sizes

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of such a video.

        Raises:
            UserError: for a size that cannot be encoded; suggests the nearest sizes.
        """
        factors = {"temporal": self.temporal_compression, "spatial": self.spatial_compression}
        return self.latent_channels, *latent_size(frames, height, width, **factors)

    def frames_covering(self, frames: int) -> int:
        """The smallest number of frames, at least `frames`, that can be encoded."""
        return frames_covering(frames, self.temporal_compression)

    # ------------------------------------------------------------------------------------- video <-> latents

    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents (float32 BCTHW) of RGB video in [-1, 1], normalised over the videos of `fit`; raw without `pca`.

        Raises:
            UserError: for sizes that are not multiples of the patch (see `latent_shape`).
        """
        return _few_at_once(self._encode, video_BCTHW, video_BCTHW[:1].numel())

    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """RGB video (float32 BCTHW, not clamped): the inverse of `encode`, except for components that the PCA
        dropped."""
        return _few_at_once(self._decode, latents_BCTHW, self.raw_channels * latents_BCTHW[:1, :1].numel())

    def _encode(self, video_BCTHW: Tensor) -> Tensor:
        raw_BTHWR = self._to_coefficients(video_BCTHW)
        latents_BTHWC = raw_BTHWR if self.pca is None else self.pca.project(raw_BTHWR)
        return rearrange(latents_BTHWC, "B T H W C -> B C T H W").contiguous()

    def _decode(self, latents_BCTHW: Tensor) -> Tensor:
        latents_BTHWC = rearrange(latents_BCTHW.float(), "B C T H W -> B T H W C")
        return self._from_coefficients(latents_BTHWC if self.pca is None else self.pca.restore(latents_BTHWC))

    def _to_coefficients(self, video_BCTHW: Tensor) -> Tensor:
        self.latent_shape(*video_BCTHW.shape[2:])
        video = video_BCTHW.float()
        if self.temporal_compression > 1:
            first = video[:, :, :1].expand(-1, -1, self.temporal_compression, -1, -1)
            video = torch.cat([first, video[:, :, 1:]], dim=2)
        if torch.compiler.is_compiling():  # traced in half the time, and computed in two thirds
            kernel = self._kernel()
            return F.conv3d(video, kernel, stride=kernel.shape[2:], groups=3).movedim(1, -1)
        patches = rearrange(
            video,
            "B c (T t) (H h) (W w) -> B T H W c t h w",
            t=self.temporal_compression,
            h=self.spatial_compression,
            w=self.spatial_compression,
        )
        time, space = self._haar_matrices(video.device)
        coefficients = _along_each(patches, time, space, space)
        return rearrange(coefficients, "B T H W c i j k -> B T H W (c i j k)")

    def _from_coefficients(self, raw_BTHWR: Tensor) -> Tensor:
        coefficients = rearrange(
            raw_BTHWR,
            "B T H W (c i j k) -> B T H W c i j k",
            i=self.temporal_compression,
            j=self.spatial_compression,
            k=self.spatial_compression,
        )
        time, space = self._haar_matrices(raw_BTHWR.device)
        patches = _along_each(coefficients, time.T, space.T, space.T)
        video = rearrange(patches, "B T H W c t h w -> B c (T t) (H h) (W w)")
        if self.temporal_compression == 1:
            return video
        # The mean over the first temporal patch is the frame that fits its copies best (least squares).
        first = video[:, :, : self.temporal_compression].mean(dim=2, keepdim=True)
        return torch.cat([first, video[:, :, self.temporal_compression :]], dim=2)

    def _haar_matrices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return haar_matrix(self.temporal_compression, device), haar_matrix(self.spatial_compression, device)

    def _kernel(self) -> Tensor:
        """[(c i j k), 1, t, h, w]: the transform as a convolution of each colour."""
        time, space = (np.array(_haar(size)) for size in (self.temporal_compression, self.spatial_compression))
        kernel = np.einsum("it,jh,kw->ijkthw", time, space, space).reshape(-1, 1, len(time), len(space), len(space))
        return torch.from_numpy(np.tile(kernel.astype(np.float32), (3, 1, 1, 1, 1)))

    # -------------------------------------------------------------------------------------------------- fitting

    @classmethod
    def fit(
        cls,
        videos: Iterable[Tensor],
        channels: int = 32,
        temporal_compression: int = 4,
        spatial_compression: int = 8,
        whitening: float = 0.5,
    ) -> "HaarTokenizer":
        """A tokenizer that keeps the `channels` principal components of these videos (batches, RGB BCTHW in [-1, 1]).

        Each component is divided by its standard deviation to the power `whitening` (0: none; 1: full, which weights
        faint details like large structures), and all together by one number, so that sigma_data is 1.

        Raises:
            UserError: if there are no videos, or if they have no components (constant colour).
        """
        sizes = {"temporal_compression": temporal_compression, "spatial_compression": spatial_compression}
        return cls.fit_at_most(videos, channels, (), whitening, **sizes)[0]

    @classmethod
    def fit_at_most(
        cls, videos: Iterable[Tensor], channels: int, others: Iterable[int], whitening: float = 0.5, **sizes: int
    ) -> tuple["HaarTokenizer", dict[int, float]]:
        """Like `fit` (videos: float BCTHW), with at most as many channels as the videos have components; also return
        the PSNR in dB for each possible number of channels in `others`."""
        videos, lossless = list(videos), cls(**sizes)
        if not 1 <= channels <= lossless.raw_channels:
            raise UserError(f"channels={channels} must lie between 1 and {lossless.raw_channels}")
        moments = _moments([lossless._to_coefficients(video) for video in videos], lossless.temporal_compression)
        pca = _principal_components(moments, min(channels, max(1, moments.num_components)), whitening)
        fitted = replace(lossless, sigma_data=1.0, pca=pca)
        foreseen = {count: round(moments.psnr(count), 2) for count in others if count <= moments.num_components}
        return replace(fitted, reconstruction_psnr=round(psnr(fitted, videos), 2)), foreseen

    # ------------------------------------------------------------------------------------------------- on disk

    def save(self, directory: str | os.PathLike) -> None:
        parts.write_component(directory, self._config(), self._tensors())

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "HaarTokenizer":
        """The inverse of `save`.

        Raises:
            UserError: if a file is missing or does not fit the others.
        """
        settings = parts.read_settings(directory, cls()._config().keys() - {"type"})
        channels = settings.pop("channels")
        lossless = cls(**settings)
        if channels is None:
            return lossless
        shapes = {"mean_R": (lossless.raw_channels,), "basis_RC": (lossless.raw_channels, channels)}
        return replace(lossless, pca=LinearBasis(**_read_basis(directory, shapes | {"scale_C": (channels,)})))

    def fingerprint(self) -> str:
        return parts.fingerprint(self._config(), self._tensors())

    def _config(self) -> dict:
        return {
            "type": "haar",
            "temporal_compression": self.temporal_compression,
            "spatial_compression": self.spatial_compression,
            "channels": None if self.pca is None else self.latent_channels,
            "sigma_data": self.sigma_data,
            "reconstruction_psnr": self.reconstruction_psnr,
        }

    def _tensors(self) -> dict[str, Tensor]:
        if self.pca is None:
            return {}
        return {"mean_R": self.pca.mean_R, "basis_RC": self.pca.basis_RC, "scale_C": self.pca.scale_C}


def _few_at_once(transform: Callable[[Tensor], Tensor], batch: Tensor, num_pixels: int) -> Tensor:
    """Transforms videos or latents [B, ...] of so many pixels and colours each: on a CPU as many at once as its cache
    holds, in half the time."""
    if batch.device != CPU or torch.compiler.is_compiling():  # an exported graph takes any batch
        return transform(batch)
    return torch.cat([transform(few) for few in batch.split(max(1, _PIXELS_AT_ONCE // max(1, num_pixels)))])


def _along_each(x: Tensor, *matrices: Tensor) -> Tensor:
    """Multiplies the last axes of `x`, one matrix [new, old] for each in order."""
    for axis, matrix in enumerate(matrices, start=-len(matrices)):
        x = (x.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return x


def haar_matrix(size: int, device: torch.device = CPU) -> Tensor:
    """The orthonormal Haar matrix [coefficient, position] of a power of two; row 0 is the mean times sqrt(size)."""
    return constant(_haar(size), device)


@cache
def _haar(size: int) -> tuple[tuple[float, ...], ...]:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        sums, differences = np.kron(matrix, [[1.0, 1.0]]), np.kron(np.eye(len(matrix)), [[1.0, -1.0]])
        matrix = np.concatenate([sums, differences]) / math.sqrt(2)
    return tuple(map(tuple, matrix.tolist()))


def psnr(tokenizer: HaarTokenizer, videos: Iterable[Tensor]) -> float:
    """Peak signal-to-noise ratio of decode(encode(video)), BCTHW, over all pixels, in decibels: 10 log10(2^2 / MSE)."""
    error, count = 0.0, 0
    for video in videos:
        error += (tokenizer.decode(tokenizer.encode(video)) - video).double().square().sum().item()
        count += video.numel()
    return 10 * math.log10(4 * count / max(error, 1e-30))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moments:
    """Moments of the coefficients of all patches of some videos, in float64; `first` are those of first frames, which
    fill their patch with copies."""

    mean_R: Tensor
    first_times_eigenvectors_RR: Tensor
    """Sum of (x - mean) (x - mean)^T over first frames only, times the eigenvectors."""
    eigenvalues: Tensor
    """Eigenvalues of the covariance, ascending."""
    eigenvectors: Tensor
    count: int
    count_first: int
    copies: int

    @property
    def num_components(self) -> int:
        return int((self.eigenvalues > 1e-10 * self.eigenvalues[-1].clamp(min=1e-20)).sum())

    def psnr(self, channels: int) -> float:
        """Predict `psnr` after fitting `channels` channels.

        The orthonormal transform keeps squared errors: a patch's error is the sum of squares of the dropped components;
        for a first frame, of their mean over the copies.
        """
        dropped = slice(len(self.mean_R) - channels)
        left_out, of_first = self.eigenvectors[:, dropped], self.first_times_eigenvectors_RR[:, dropped]
        whole_error = self.count * self.eigenvalues[dropped].sum() - (left_out * of_first).sum()
        of_mean = left_out.unflatten(0, (3, self.copies, -1))[:, 0].flatten(0, 1)
        first_error = ((left_out @ of_mean.T) * (of_first @ of_mean.T)).sum() / self.copies
        num_pixels = len(self.mean_R) * (self.count - self.count_first + self.count_first / self.copies)
        return 10 * math.log10(4 * num_pixels / max((whole_error + first_error).item(), 1e-30))


def _moments(batches: list[Tensor], copies: int) -> _Moments:
    """Moments of batches of coefficients, BTHWR each."""
    rows, firsts = [batch.flatten(0, 3) for batch in batches], [batch[:, 0].flatten(0, 2) for batch in batches]
    count = sum(map(len, rows))
    if not count:
        raise UserError("a PCA needs videos to be fitted to, and there are none")
    mean = torch.stack([batch.double().sum(dim=0) for batch in rows]).sum(dim=0) / count
    covariance, first = (torch.zeros(len(mean), len(mean), dtype=torch.float64, device=mean.device) for _ in range(2))
    for batch, of_first in zip(rows, firsts, strict=True):
        centred, centred_first = batch.double() - mean, of_first.double() - mean
        covariance += centred.T @ centred / count
        first += centred_first.T @ centred_first
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    return _Moments(
        mean_R=mean,
        first_times_eigenvectors_RR=first @ eigenvectors,
        eigenvalues=eigenvalues,
        eigenvectors=eigenvectors,
        count=count,
        count_first=sum(map(len, firsts)),
        copies=copies,
    )


def _principal_components(moments: _Moments, channels: int, whitening: float) -> LinearBasis:
    variance_C, basis_RC = moments.eigenvalues.flip(0)[:channels], moments.eigenvectors.flip(1)[:, :channels]
    if moments.num_components < channels:
        raise UserError(f"channels={channels}, but the videos have only {moments.num_components} principal components")
    # An eigenvector's sign is arbitrary, and differs between libraries: make its largest entry positive.
    largest_1C = basis_RC.gather(0, basis_RC.abs().argmax(dim=0, keepdim=True))
    basis_RC = basis_RC * largest_1C.sign()
    scale_C = variance_C ** (whitening / 2)
    overall = (variance_C / scale_C**2).mean().sqrt()
    return LinearBasis(moments.mean_R.float(), basis_RC.float().contiguous(), (scale_C * overall).float())


def _read_basis(directory: str | os.PathLike, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors = parts.read_tensors(directory)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise UserError(f"{directory}: config.json asks for the tensors {shapes}, the file holds {found}")
    return tensors
